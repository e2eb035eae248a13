"""What a user registers: modules, optimizers, schedulers, a gradient scaler, other objects with state.

Everything that the engine cannot train correctly is refused here, by name, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from helixrt.engines.optimizer_state import check_own_entries
from helixrt.engines.state_tree import segment
from helixrt.errors import MisuseError


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is replicated: changed by the update alone, equal on all replicas."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Registered:
    """Names matter: state is stored under them. With one model its name is "" and parameters have the model's own names.

    `scaler`: a `torch.amp.GradScaler`; the engine scales losses with it. `extra`: other replicated state, such as an EMA.
    `buffers`: modes of buffers that a forward may change, by name or pattern (see `engines.buffers`). `hyperparameters`: whose
    a resumed run uses, "checkpoint" or "script".
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    scaler: Any = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    clip_norm: float | None = None
    buffers: Mapping[str, str] = field(default_factory=dict)
    hyperparameters: str = "checkpoint"

    @staticmethod
    def of(
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] = (),
        schedulers: Any = (),
        *,
        scaler: Any = None,
        extra: Mapping[str, Stateful] | None = None,
        clip_norm: float | None = None,
        buffers: Mapping[str, str] | None = None,
        hyperparameters: str = "checkpoint",
    ) -> Registered:
        """From one model or several by name, and one optimizer and scheduler, several by name, or numbered from 0."""
        models = dict(model) if isinstance(model, Mapping) else {"": model}
        optimizers, schedulers = _numbered(optimizers), _numbered(schedulers)
        others = dict(extra or {}), clip_norm, dict(buffers or {}), hyperparameters
        return Registered(models, optimizers, schedulers, scaler, *others)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters in the models' order, each once, under its first name."""
        seen: set[int] = set()
        for model, module in self.models.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield qualified(model, name), parameter

    def check(self) -> None:
        """Raises MisuseError for what cannot be trained."""
        if not self.models:
            raise MisuseError("register at least one model")
        for model, module in self.models.items():
            if not isinstance(module, nn.Module):
                raise MisuseError(f"model {model!r} is a {type(module).__name__}, not a torch.nn.Module")
            _check_modules(model, module)
        for name, parameter in self.parameters():
            _check_parameter(name, parameter)
        known = {id(parameter): name for name, parameter in self.parameters()}
        held: dict[int, str] = {}
        for key, optimizer in self.optimizers.items():
            if not isinstance(optimizer, Optimizer):
                raise MisuseError(f"optimizer {key} is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
            if isinstance(optimizer, torch.optim.LBFGS):
                raise MisuseError(f"optimizer {key}: LBFGS evaluates the loss within its step, and an update may not")
            for number, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    where = f"parameter {place} of group {number}, of shape {list(parameter.shape)}"
                    if id(parameter) not in known:
                        raise MisuseError(
                            f"optimizer {key} holds a parameter that no registered model has ({where}); "
                            "make it from the parameters of the model that session.parallelize gives"
                        )
                    if id(parameter) in held:
                        raise MisuseError(f"{known[id(parameter)]} is in optimizers {held[id(parameter)]} and {key}")
                    held[id(parameter)] = key
            check_own_entries(optimizer, f"optimizer {key}")
        for key, scheduler in self.schedulers.items():
            if isinstance(scheduler, Optimizer) or not isinstance(scheduler, Stateful) or not hasattr(scheduler, "step"):
                raise MisuseError(f"scheduler {key} is a {type(scheduler).__name__}, not a scheduler with step and state_dict")
            of = getattr(scheduler, "optimizer", None)
            if of is not None and not any(of is optimizer for optimizer in self.optimizers.values()):
                raise MisuseError(f"scheduler {key} drives an optimizer that is not registered")
        for key, thing in self.extra.items():
            if not isinstance(thing, Stateful):
                raise MisuseError(f"{key} is a {type(thing).__name__} without state_dict and load_state_dict")
        if self.hyperparameters not in ("checkpoint", "script"):
            raise MisuseError(f"hyperparameters={self.hyperparameters!r}: must be 'checkpoint' or 'script'")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise MisuseError(f"clip_norm={self.clip_norm}: must be above 0, or None for no clipping")

    def check_update_is_complete(self) -> None:
        """For the default update: every trainable parameter has an optimizer, and schedulers need no metric."""
        held = {id(p) for optimizer in self.optimizers.values() for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self.parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise MisuseError(
                    f"{name} requires a gradient and is in no registered optimizer; register its optimizer, freeze it with "
                    "requires_grad_(False), or register an update function"
                )
        for key, scheduler in self.schedulers.items():
            if isinstance(scheduler, ReduceLROnPlateau):
                raise MisuseError(
                    f"scheduler {key} (ReduceLROnPlateau) needs a metric: step it in a function registered as the session's "
                    "update, as scheduler.step(record.loss), behind optimizer.step()"
                )


def qualified(model: str, name: str) -> str:
    return f"{segment(model)}.{name}" if model else name


def _numbered(things: Any) -> dict[str, Any]:
    if isinstance(things, Mapping):
        return dict(things)
    return {str(number): thing for number, thing in enumerate(things if isinstance(things, Iterable) else [things])}


def _check_modules(model: str, module: nn.Module) -> None:
    for name, part in module.named_modules():
        where = qualified(model, name) or type(part).__name__
        if isinstance(part, DistributedDataParallel):
            raise MisuseError(f"{where} is a DistributedDataParallel; register the module that it wraps")
        check_renormalized(part, where)
        if getattr(part, "sparse", False) and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise MisuseError(f"{where} is an embedding with sparse=True; sparse gradients cannot be summed over replicas")


def check_renormalized(part: nn.Module, where: str) -> None:
    """Raises MisuseError for an embedding whose forward changes its weight, which is another change on each replica."""
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise MisuseError(
            f"{where} is an embedding with max_norm={part.max_norm:g}: its forward changes its weight; leave max_norm out, and "
            "scale rows of the weight in a function registered as the session's update"
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise MisuseError(f"{name} has no shape yet (a lazy module); run one forward before registering the model")
    if parameter.requires_grad and not parameter.is_floating_point():
        raise MisuseError(f"{name} is of {parameter.dtype}; trainable parameters must be real floating-point tensors")
