"""The update: a function of replicated state, reduced gradients and the commit record, and of nothing else.

The default clips to a norm, steps all optimizers, then all schedulers; a user may register another. `StepGuard` lets
registered optimizers step inside the update only, and scales their learning rates by the policy for that one step
(FT-HSDP section 5 recommends the square root of the share of replicas that contribute).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.optimizer_numbers import OptimizerNumbers
from helixrt.engines.registered import Registered
from helixrt.engines.sharded import is_scalar, is_sharded, local
from helixrt.engines.tensor_gradients import TensorRanks
from helixrt.errors import MisuseError
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import Update


@dataclass(frozen=True)
class UpdateRecord(CommitRecord):
    """What a registered update function gets: the commit record, and `loss`, the mean over all items of all contributors, equal
    on all replicas and when an update is repeated. It is NaN where nothing was applied, and where the loop has its own
    backward (`session.prepare`)."""

    loss: float = math.nan

    @staticmethod
    def of(record: CommitRecord, loss: float) -> UpdateRecord:
        return UpdateRecord(**{field.name: getattr(record, field.name) for field in fields(record)}, loss=loss)


UpdateFunction = Callable[[UpdateRecord], object]


@dataclass(frozen=True)
class Policy:
    """How learning rates follow the number of contributors c of n configured replicas: not at all ("none"), by c/n
    ("linear") or by the square root of c/n ("sqrt")."""

    lr: Literal["none", "linear", "sqrt"] = "none"

    def __post_init__(self) -> None:
        if self.lr not in ("none", "linear", "sqrt"):
            raise MisuseError(f"Policy(lr={self.lr!r}): must be 'none', 'linear' or 'sqrt'")

    def factor(self, contributors: int, replicas: int) -> float:
        share = contributors / replicas
        return 1.0 if self.lr == "none" else share if self.lr == "linear" else math.sqrt(share)

    def check(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises MisuseError for an optimizer without a rate that could follow them."""
        for key, optimizer in optimizers.items():
            if self.lr != "none" and any(group.get("lr") is None for group in optimizer.param_groups):
                raise MisuseError(
                    f"optimizer {key} ({type(optimizer).__name__}) has a group without lr, which lr_policy={self.lr!r} would "
                    'scale; give it one, or take lr_policy="none"'
                )


def first_rate(optimizers: Mapping[str, Optimizer], factor: float) -> float | torch.Tensor:
    """Of the first group, as an update will use it; NaN where an optimizer has a rate of its own."""
    for optimizer in optimizers.values():
        rate = optimizer.param_groups[0].get("lr")
        return math.nan if rate is None else rate * factor
    return 0.0


@dataclass(frozen=True)
class ModuleUpdate(Update):
    """`loss` is the mean over all items of all contributors; `weight` how many items there were."""

    loss: float = math.nan
    weight: float = 0.0


class StepGuard(AbstractContextManager[None]):
    """Hooks around the optimizers' `step`; `close` takes them away."""

    def __init__(self, optimizers: Mapping[str, Optimizer], parameters: Sequence[torch.Tensor]) -> None:
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers.values()}
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._factor: float | None = None  # of the running update
        self._numbers = OptimizerNumbers(optimizers)
        self._rates: list[tuple[dict[str, Any], Any]] = []  # groups whose rate is scaled now, and the rate to put back
        self._handles = [_before_any_step(self)]
        self._handles += [optimizer.register_step_post_hook(self._after) for optimizer in optimizers.values()]

    def update(self, factor: float) -> AbstractContextManager[None]:
        """Within this, registered optimizers may step, at `factor` times their rates."""
        self._factor = factor
        self._numbers.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._factor = None
        self._put_back()
        if kind is None:
            self._numbers.end()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        known = id(optimizer) in self._optimizers
        self._numbers.stepped = self._numbers.stepped or known
        if known and self._factor == 1.0:
            return
        if not known and not any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            return  # it trains something else
        kind = type(optimizer).__name__
        if not known:
            raise MisuseError(f"{kind}.step() was called, and this optimizer is not registered: register(optimizers=[...])")
        if self._factor is None:
            raise MisuseError(
                f"{kind}.step() was called in the loop; step.commit() runs the same update on all replicas. Take the call "
                "out, or put it into a function registered as the session's update; after session.prepare, call step() of the "
                "optimizer that it returned"
            )
        if self._factor != 1.0:
            for group in optimizer.param_groups:
                rate = group["lr"]
                if isinstance(rate, torch.Tensor):
                    self._rates.append((group, rate.clone()))
                    rate.mul_(self._factor)
                else:
                    self._rates.append((group, rate))
                    group["lr"] = rate * self._factor

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._put_back()

    def _put_back(self) -> None:
        if not self._rates:
            return
        for group, rate in self._rates:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._rates.clear()


def _before_any_step(guard: StepGuard) -> RemovableHandle:
    """A hook on every optimizer of the process, registered or not, that does not keep the guard alive. It is taken away by
    `close` alone: a finalizer could run while torch goes through its hooks."""
    reference = weakref.ref(guard)

    def before(optimizer: Optimizer, args: object, kwargs: object) -> None:
        alive = reference()
        if alive is not None:
            alive.before(optimizer, args, kwargs)

    return register_optimizer_step_pre_hook(before)


def gradient_norm(
    parameters: Sequence[nn.Parameter], scaler: Any, group: InnerGroup | None = None, tensor: TensorRanks | None = None
) -> torch.Tensor | float:
    """Euclidean norm of all gradients, on the device, over all ranks of the replica with the same bits on each; a registered
    function sees gradients that are still scaled. `group`: the ranks over which all parameters with dimensions are cut;
    `tensor`: those over which some are; each element counts once."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    if not with_gradient:
        return 0.0
    gradients = [local(parameter.grad) for parameter in with_gradient]  # type: ignore[arg-type]
    if group is None and tensor is None:
        norm = get_total_norm(gradients)
    else:
        kinds: list[list[torch.Tensor]] = [[], [], []]  # cut over tp, whole over tp, whole over both
        for parameter, gradient in zip(with_gradient, gradients, strict=True):
            over_both = group is not None and is_scalar(parameter)
            kinds[2 if over_both else tensor is not None and not tensor.cuts(parameter)].append(gradient)
        norms = [get_total_norm(kind).to(gradients[0].device) for kind in kinds]
        squares = torch.stack(norms).double().square()
        if group is not None:
            squares[:2] = group.sum(squares[:2])
        if tensor is not None:
            parts = tensor.group.gather(squares)
            squares = torch.stack([torch.stack([part[0] for part in parts]).sum(), *parts[0][1:]])
        norm = squares.sum().sqrt().to(gradients[0].dtype)
    return norm if scaler is None else norm / scaler.get_scale()


def default_update(
    registered: Registered,
    parameters: Sequence[nn.Parameter],
    record: CommitRecord,
    group: InnerGroup | None = None,
    tensor: TensorRanks | None = None,
    overflowed: bool = False,
) -> torch.Tensor | float:
    """Clip, step all optimizers, then all schedulers; the norm before clipping. Without an applied record nothing changes, but
    the scale of a scaler is lowered if gradients have `overflowed`."""
    scaler, optimizers = registered.scaler, list(registered.optimizers.values())
    if not record.applied:
        if scaler is not None and overflowed:
            lower_scale(scaler)
        return 0.0
    if scaler is not None:
        if scaler.is_enabled():  # it asserts that an optimizer has gradients
            optimizers = [optimizer for optimizer in optimizers if _has_gradient(optimizer)]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    norm = gradient_norm(parameters, None, group, tensor)
    if registered.clip_norm is not None and isinstance(norm, torch.Tensor):
        alike = tensor is None and len({is_sharded(parameter) for parameter in parameters}) == 1  # else not scaled in one call
        clip_grads_with_norm_(parameters, registered.clip_norm, norm, foreach=None if alike else False)
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None and optimizers:
        scaler.update()
    for scheduler in registered.schedulers.values():
        scheduler.step()
    return norm


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def lower_scale(scaler: Any) -> None:
    """As the scaler itself does where a gradient overflowed."""
    state = dict(scaler.state_dict())
    if state:  # none while it is switched off
        scaler.load_state_dict(state | {"scale": state["scale"] * scaler.get_backoff_factor(), "_growth_tracker": 0})
