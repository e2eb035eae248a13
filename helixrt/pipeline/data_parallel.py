"""Train steps of a module that DistributedDataParallel wraps.

In: the module as the user has it. Out: the module whose graphs are run, and when its ranks exchange gradients: during
the last micro-batch's backward, unless the step runs under `no_sync()`, exactly as a plain loop does that puts
`no_sync()` around all micro-batches but the last. The exchange is DistributedDataParallel's own: it hangs on autograd's
accumulation of each parameter, so that micro-batch's gradients go through autograd.

A module that was compiled before it was wrapped is stepped as `wrapped.module.train_step`; `Wrapper` finds the
DistributedDataParallel around it. One that wraps more than the module, or another part of it, waits for gradients that
this step does not make, so it is refused.

`_pre_forward` and `_post_forward` are torch's private halves of its forward (2.0 to 2.15): they tell the exchange that
a backward is coming. This is the one file that uses them.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helixrt.errors import ConfigError
from helixrt.pipeline.gradients import ParameterGradients, accumulator_held
from helixrt.private_api import DDP_HALVES, require


class Exchanging:
    """Gradients of the last micro-batch: each goes through autograd, where the exchange waits for it."""

    def __init__(self, model: DistributedDataParallel, gradients: ParameterGradients) -> None:
        self.model, self.gradients, self.expected = model, gradients, False

    def give(self, name: str, gradient: torch.Tensor) -> None:
        if not self.expected:  # not before: those of earlier micro-batches may pass through autograd, too
            self.expected = True
            with torch.enable_grad():
                self.model._post_forward(())
        self.gradients.through_autograd(name, gradient)


@dataclass(frozen=True)
class DataParallel:
    """`model` as the user calls it; `module` is what is captured."""

    model: nn.Module
    module: nn.Module

    def begin(self, gradients: ParameterGradients) -> Exchanging | None:
        """Begin a step; gives what takes the last micro-batch's gradients, None when ranks do not exchange any. Raises
        ConfigError where DistributedDataParallel has no such halves."""
        if not isinstance(self.model, DistributedDataParallel):
            return None
        require(DDP_HALVES)
        with torch.enable_grad():
            self.model._pre_forward()
            if self.model.require_backward_grad_sync:
                return Exchanging(self.model, gradients)
            self.model._post_forward(())
        return None

    def eager(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch of a plain loop."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()


def data_parallel(model: nn.Module) -> DataParallel:
    """Raises ConfigError for settings of DistributedDataParallel that graphs cannot serve."""
    if not isinstance(model, DistributedDataParallel):
        return DataParallel(model, model)
    for setting in ("find_unused_parameters", "static_graph"):
        if getattr(model, setting):
            raise ConfigError(setting, True, "is not supported by train_step, whose graphs know which parameters are used")
    return DataParallel(model, model.module)


class Wrapper:
    """The DistributedDataParallel around a module, searched for again when other accumulators are held."""

    def __init__(self) -> None:
        self._held: frozenset[int] = frozenset()
        self._found: weakref.ref[DistributedDataParallel] | None = None

    def of(self, model: nn.Module) -> nn.Module:
        """What exchanges the gradients of `model`: its wrapper, else `model` itself.

        Raises ConfigError when a DistributedDataParallel has parameters of `model` and is not its wrapper.
        """
        if isinstance(model, DistributedDataParallel) or not dist.is_available() or not dist.is_initialized():
            return model
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        held = frozenset(id(parameter) for parameter in parameters if accumulator_held(parameter))
        gone = self._found is not None and self._found() is None
        if held != self._held or gone:
            self._found = search(model, parameters) if held else None
            self._held = held
        found = None if self._found is None else self._found()
        return model if found is None else found


def search(model: nn.Module, parameters: list[nn.Parameter]) -> weakref.ref[DistributedDataParallel] | None:
    """The living DistributedDataParallel of `model`. Raises ConfigError as `Wrapper.of` does."""
    wanted = {id(parameter) for parameter in parameters}
    gc.collect()  # one that was dropped may still be alive in a cycle
    living = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    sharing = [each for each in living if wanted.intersection(map(id, each.parameters()))]
    for each in sharing:
        if each.module is not model or len(sharing) > 1:
            what = f"of {type(each.module).__name__}" if len(sharing) == 1 else f"{len(sharing)} times"
            rule = "waits for other gradients than this train_step makes; compile the module that it wraps, once, whole"
            raise ConfigError("DistributedDataParallel", what, rule)
    return weakref.ref(sharing[0]) if sharing else None
