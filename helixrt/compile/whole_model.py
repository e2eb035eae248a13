"""A whole model as every rank of a pipeline captures it: without memory for tensors, then cut into chunks.

In: a model, its loss, the arguments of one micro-batch. Out: `CutModel`s, in training and in evaluation mode, for arguments of
these and of other shapes. The model is held, so that it can be captured again; its tensors may be replaced meanwhile by others
of the same shapes, on meta too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from helixrt.compile.fake_model import capture_whole
from helixrt.errors import ConfigError
from helixrt.passes.autocast import autocast_to, without_autocast
from helixrt.passes.capture import watched
from helixrt.passes.chunk_times import ChunkTimes
from helixrt.passes.cut import cut
from helixrt.passes.cut_model import CutModel
from helixrt.passes.own_values import Axis
from helixrt.passes.parts import Part
from helixrt.passes.seeding import seeded
from helixrt.passes.uncut import uncut
from helixrt.passes.unit_costs import balanced, chunk_times
from helixrt.passes.units import units
from helixrt.schedule.ir import Schedule

Agreed = Callable[[Sequence[int]], Sequence[int]]  # what this rank has chosen, to what all ranks take
Call = tuple[tuple[Any, ...], dict[str, Any], Any]  # positional arguments, keywords, target
Times = Callable[[Part, Schedule], Mapping[str, ChunkTimes] | None]  # of the units of a joint graph; None: estimates


class WholeModel:
    """`device` is the one that the graphs run on, `watched` what the user changes where `model` is a copy of it, `autocast` the
    type that forward and loss run under autocast to (None: they run in the types of parameters and arguments). `times` gives
    those by which chunks are balanced for a schedule, in place of estimates, where there are any. `agreed` makes ranks that
    hold other parts of the model, and so estimate other times, cut it in the same way: it is given the first units of later
    chunks. `axes`: over which ranks share the model or a batch. `alike` is given the joint part of each capture, and makes
    those of such ranks alike."""

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        call: Call,
        device: torch.device | str = "cpu",
        *,
        watched: nn.Module | None = None,
        autocast: torch.dtype | None = None,
        times: Times | None = None,
        agreed: Agreed = tuple,
        limit_bytes: float = math.inf,
        axes: Sequence[Axis] = (),
        alike: Callable[[Part], Part] = lambda joint: joint,
    ) -> None:
        self.model, self.loss, self.device, self.autocast = model, loss, device, autocast
        self._watched = model if watched is None else watched
        self._axes, self._alike = axes, alike
        self._times, self._agreed, self._limit_bytes = times, agreed, limit_bytes
        self.args, self.kwargs, self.target = shapes_of(call)
        self.chunk_times: tuple[ChunkTimes, ...] | None = None  # once it is cut, where the chunks were balanced by `times`

    def cut(self, schedule: Schedule, cuts: Sequence[str] | None = None) -> CutModel:
        """The chunks that `schedule` runs; `cuts` are the modules that later ones begin with, else chunks are balanced, with at
        most `limit_bytes` on each stage. The model is captured in the mode that it is in.

        Raises CaptureError for a model that cannot be captured or cut, ConfigError for cuts that are none, or where none fits.
        """
        joint = self.joint()
        if schedule.chunks == 1:
            if self._limit_bytes < math.inf:
                raise ConfigError("memory_gb", self._limit_bytes / (1 << 30), "needs several chunks to balance: pp above 1")
            return uncut(joint)
        if cuts is None:
            measured = None if self._times is None else self._times(joint, schedule)
            limit, flying = self._limit_bytes, schedule.in_flight
            try:
                found = balanced(joint, schedule, measured=measured, limit_bytes=limit, in_flight=flying)
            except ConfigError as error:
                if error.key != "limit_bytes":
                    raise
                raise ConfigError("memory_gb", limit / (1 << 30), error.rule) from error
            starts = self._agreed(found.starts)
            self.chunk_times = None if measured is None else chunk_times(joint, starts, measured)
            return cut(joint, starts)
        try:
            return cut(joint, cuts)
        except ConfigError as error:
            raise ConfigError("cuts", error.value, error.rule) from error

    def again(self, like: CutModel, call: Call, training: bool) -> CutModel:
        """The model for these arguments, in the mode that it is in or (not `training`) in evaluation mode, cut where `like` is.
        Raises CaptureError."""
        with nullcontext() if training else _evaluating(self.model):
            joint = self._captured(shapes_of(call))
        if len(like.chunks) == 1:
            return uncut(joint)
        found = units(joint)
        later = like.chunks[1:]
        return cut(joint, [found.layers.index(chunk.layers[0]) + 1 if chunk.layers else found.count - 1 for chunk in later])

    def joint(self) -> Part:
        """The whole model's graph, in the mode that it is in. Raises CaptureError."""
        return self._captured((self.args, self.kwargs, self.target))

    def _captured(self, call: Call) -> Part:
        args, kwargs, target = call
        with without_autocast(), autocast_to(self.autocast, self.device):
            joint = capture_whole(self.model, args, kwargs, loss=self.loss, target=target, device=self.device)
        watched(joint, self._watched, self.loss, modes=False)
        return seeded(self._alike(joint), self._axes)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def shapes_of(call: Call) -> Call:
    """The same arguments without memory, and without autograd: a pipeline gives no gradients of its inputs."""

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return cast(Call, pytree.tree_map_only(torch.Tensor, shape_of, call))
