"""`helixrt.compile`: one line makes a model train in two interwoven strands.

    @helixrt.compile(loss=torch.nn.functional.cross_entropy, microbatches=8)
    class Model(torch.nn.Module): ...

    model = helixrt.compile(model, loss=..., microbatches=8)
    loss = model.train_step(tokens, target=targets)

In: a module, or a class of modules. Out: the same one, with `train_step` (a `TrainStep`) and `explain`; its class, its
`state_dict`, `model(x)`, `eval()` and pickling are untouched. Gradients are in `p.grad`, as after a plain loop over the
micro-batches.

The module itself can be called: `helixrt.compile` is both its name and the function's.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Unpack, cast

import torch
from torch import nn

from helixrt.compile.explanation import Explanation
from helixrt.compile.options import Keywords, Options
from helixrt.compile.train_step import TrainStep
from helixrt.errors import ConfigError

__all__ = ["Explanation", "Options", "TrainStep", "compile"]


def compile(model_or_class: Any = None, **options: Unpack[Keywords]) -> Any:
    """Give a module, or all modules of a class, a `train_step`; as a function or a decorator, with options or without.

    The options, by keyword, are the fields of `Options`. Raises ConfigError for options that cannot work; capture happens in
    the first `train_step`.
    """
    chosen = Options.of(options)
    if model_or_class is None:
        return lambda decorated: attach(decorated, chosen)
    return attach(model_or_class, chosen)


def attach(model_or_class: Any, options: Options) -> Any:
    """`compile` with checked options."""
    is_class = isinstance(model_or_class, type)
    if not (issubclass(model_or_class, nn.Module) if is_class else isinstance(model_or_class, nn.Module)):
        raise ConfigError("compile", model_or_class, "must be a torch.nn.Module or a class of modules")
    if isinstance(model_or_class, torch.jit.ScriptModule):
        raise ConfigError("compile", type(model_or_class).__name__, "is TorchScript; give the module it was made from")
    taken = getattr(model_or_class, "train_step", None)
    if taken is not None and not isinstance(taken, TrainStep | TrainStepOfEach):
        raise ConfigError("compile", type(model_or_class).__name__, "has a train_step of its own; rename that one")
    keeps = getattr(model_or_class, "explain", None)
    if is_class:
        model_or_class.train_step = TrainStepOfEach(options)
        report: Any = explain
    else:
        model_or_class.train_step = step = TrainStep(model_or_class, options)
        report = step.explain
    if keeps is None or getattr(keeps, "__func__", keeps) in (explain, TrainStep.explain):  # a model's own stays
        model_or_class.explain = report
    return model_or_class


class TrainStepOfEach:
    """The `train_step` of a decorated class: the first access to `instance.train_step` makes one for the instance."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __get__(self, instance: nn.Module | None, owner: type) -> TrainStep | TrainStepOfEach:
        if instance is None:
            return self
        step = instance.__dict__["train_step"] = TrainStep(instance, self.options)
        return step


def explain(self: nn.Module, *, times: bool = False) -> Explanation:
    """What was captured and how the strands are woven; see `TrainStep.explain`."""
    return cast(TrainStep, self.train_step).explain(times=times)


class CallableModule(ModuleType):
    """A module that is called as its function of the same name."""

    def __call__(self, model_or_class: Any = None, **options: Unpack[Keywords]) -> Any:
        return compile(model_or_class, **options)


sys.modules[__name__].__class__ = CallableModule
