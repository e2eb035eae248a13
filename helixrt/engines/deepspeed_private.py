"""What a DeepSpeed engine holds behind its public calls: gradient partitions, flat master weights, counters (0.19.8).

In: an engine with ZeRO 1, 2 or 3. Out: `Partitions`, one kind for each class of optimizer that DeepSpeed wraps around the
user's: this rank's gradients of an accumulation as flat tensors whose layout is known from the start, and back; the tensors
that `step` changes. Nothing else of helixrt knows DeepSpeed's internal names but those of its parsed configuration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from helixrt.engines.inner_group import InnerGroup
from helixrt.errors import ConfigError
from helixrt.private_api import DEEPSPEED_PARTITIONS, require

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Partitions(ABC):
    """This rank's part of what ZeRO has partitioned. All ranks of the replica make the same calls.

    `sizes`: elements of each flat gradient; `masters`: the tensors that the wrapped optimizer updates, one for each;
    `whole_parameters`: each rank keeps whole parameters between steps.
    """

    whole_parameters = True

    def __init__(self, engine: Any, masters: Sequence[torch.Tensor]) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self.masters = list(masters)
        self.sizes = [master.numel() for master in self.masters]
        self.optimizer: torch.optim.Optimizer = engine.optimizer.optimizer

    @abstractmethod
    def forget(self) -> None:
        """No backward of the accumulation has come: as after a step, also where there was none."""

    @abstractmethod
    def read(self, into: Sequence[torch.Tensor]) -> None:
        """Copy the gradients, after the last backward of the accumulation."""

    @abstractmethod
    def install(self, gradients: Sequence[torch.Tensor]) -> None:
        """Have `engine.step` use these gradients, which it changes. No backward is needed before."""

    def parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank keeps of a parameter, live."""
        return parameter.data

    def loaded(self) -> None:  # noqa: B027 values that are copied in place may be all there is to do
        """Masters and parameters have new values."""

    def own_masters(self) -> dict[int, torch.Tensor]:
        """By number, the masters that share no memory with a parameter."""
        return dict(enumerate(self.masters))

    @contextmanager
    def groups(self) -> Iterator[torch.optim.Optimizer]:
        """The wrapped optimizer, with the masters in its groups."""
        yield self.optimizer

    # ---------------------------------------------------------------- of the engine

    def counters(self) -> dict[str, int]:
        return {name: getattr(self._engine, name) for name in _COUNTERS}

    def set_counters(self, values: Mapping[str, int]) -> None:
        for name in _COUNTERS:
            setattr(self._engine, name, values[name])


class ZeroOneOrTwo(Partitions):
    def __init__(self, engine: Any, group: InnerGroup) -> None:
        super().__init__(engine, engine.optimizer.single_partition_of_fp32_groups)

    def forget(self) -> None:
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            kept.clear()
        zero.micro_step_id = -1

    def read(self, into: Sequence[torch.Tensor]) -> None:
        for number, flat in enumerate(into):
            _copy_pieces(self._zero.averaged_gradients[number], flat)

    def install(self, gradients: Sequence[torch.Tensor]) -> None:
        for number, flat in enumerate(gradients):
            self._zero.averaged_gradients[number] = [flat]
            self._zero.all_grad_tensors[number] = None


class ZeroOneInFloat32(Partitions):
    """bfloat16 with ZeRO 1 and gradients accumulated in float32: each rank has the whole sum, and updates its partition."""

    def __init__(self, engine: Any, group: InnerGroup) -> None:
        super().__init__(engine, engine.optimizer.fp32_groups_flat_partition)
        self._group = group

    def forget(self) -> None:
        self._zero.zero_grad(set_to_none=True)

    def read(self, into: Sequence[torch.Tensor]) -> None:
        for mine, flat in zip(self._zero.fp32_groups_gradient_flat_partition, into, strict=True):
            flat.copy_(mine)

    def install(self, gradients: Sequence[torch.Tensor]) -> None:
        zero = self._zero
        for number, flat in enumerate(gradients):
            torch.cat(self._group.gather(flat), out=zero.fp32_groups_gradients_flat[number])
            zero.fp32_groups_has_gradients[number] = [True] * len(zero.bf16_groups[number])


class ZeroThree(Partitions):
    whole_parameters = False

    def __init__(self, engine: Any, group: InnerGroup) -> None:
        super().__init__(engine, engine.optimizer.fp32_partitioned_groups_flat)
        self._padding = list(self._find_padding(group.rank))
        with torch.no_grad():  # memory that was never written, and that replicas would compare
            for number, start, count in self._padding:
                self._zero.fp16_partitioned_groups_flat[number].narrow(0, start, count).zero_()
                self.masters[number].narrow(0, start, count).zero_()
            for parameter in engine.module.parameters():
                if not parameter.requires_grad and (count := _padding_of(parameter, group.rank)):
                    parameter.ds_tensor.data.narrow(0, parameter.ds_tensor.numel() - count, count).zero_()

    def _find_padding(self, rank: int) -> Iterator[tuple[int, int, int]]:
        for number, group in enumerate(self._zero.fp16_groups):
            end = 0
            for parameter in group:
                end += parameter.ds_tensor.ds_numel
                if count := _padding_of(parameter, rank):
                    yield number, end - count, count

    def forget(self) -> None:
        zero = self._zero
        zero.zero_grad(set_to_none=True)  # also sets micro_step_id
        zero.averaged_gradients.clear()
        zero.grad_partitions_flat_buffer.zero_()  # a parameter without a gradient keeps that of an earlier batch
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()

    def read(self, into: Sequence[torch.Tensor]) -> None:
        for number, flat in enumerate(into):
            _copy_pieces(self._zero.averaged_gradients[number], flat)
        for number, start, count in self._padding:
            into[number].narrow(0, start, count).zero_()

    def install(self, gradients: Sequence[torch.Tensor]) -> None:
        for number, flat in enumerate(gradients):
            self._zero.averaged_gradients[number] = [flat]

    def parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.ds_tensor.data  # type: ignore[attr-defined]

    def loaded(self) -> None:
        """Parameters that stay gathered between steps are gathered again: their values in use are copies."""
        zero = self._zero
        zero._partition_all_parameters()
        if persistent := zero.persistent_parameters:
            persistent[0].all_gather(persistent)

    def own_masters(self) -> dict[int, torch.Tensor]:
        flats = self._zero.fp16_partitioned_groups_flat
        return {n: m for n, m in enumerate(self.masters) if m.data_ptr() != flats[n].data_ptr() or m.numel() == 0}

    @contextmanager
    def groups(self) -> Iterator[torch.optim.Optimizer]:
        self._zero._set_fp32_optimizer_param_groups()
        try:
            yield self.optimizer
        finally:
            self._zero._clear_fp32_optimizer_param_groups()


def partitions_of(engine: Any, group: InnerGroup) -> Partitions:
    """Raises ConfigError for an optimizer that is none of the known kinds, or a DeepSpeed that has other ones."""
    require(DEEPSPEED_PARTITIONS)
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kinds: dict[type, Callable[[Any, InnerGroup], Partitions]] = {
        DeepSpeedZeroOptimizer: ZeroOneOrTwo,
        DeepSpeedZeroOptimizer_Stage3: ZeroThree,
        BF16_Optimizer: ZeroOneInFloat32,
    }
    kind = kinds.get(type(engine.optimizer))
    if kind is None:
        name = type(engine.optimizer).__name__
        raise ConfigError("deepspeed.optimizer", name, "must be that of ZeRO 1, 2 or 3 (zero_optimization.stage)")
    return kind(engine, group)


def settings_of(engine: Any) -> Any:
    """The engine's configuration as DeepSpeed has parsed it."""
    return engine._config


def keep_host_collectives_unbuilt() -> None:
    """Have DeepSpeed take Gloo for ranks on one host. Its own collectives in shared memory are compiled at the first start; a
    process that is killed meanwhile leaves a lock at which every later start waits without end."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _copy_pieces(pieces: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    start = 0
    for piece in pieces:
        flat.narrow(0, start, piece.numel()).copy_(piece.reshape(-1))
        start += piece.numel()
    flat.narrow(0, start, flat.numel() - start).zero_()  # the end of the last partition


def _padding_of(parameter: Any, rank: int) -> int:
    """How many elements at the end of this rank's partition belong to no parameter."""
    size = parameter.ds_tensor.ds_numel
    return size - max(0, min(size, parameter.ds_numel - rank * size))
