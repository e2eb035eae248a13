"""An existing loop on the session: stand-ins for its optimizers, schedulers and loader (`Session.prepare`).

In: the objects of the loop. Out: the same, where the loader is `Session.steps` as one sequence of micro-batches, and the step
of the last optimizer after every `accumulate`-th backward is `Step.commit`. The order of calls is checked, and each wrong one
raises a `MisuseError` that says what to call instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from helixrt.errors import ConfigError, MisuseError
from helixrt.job.loader_checks import reads_all_items
from helixrt.job.step import Step

if TYPE_CHECKING:
    from helixrt.job.session import Session


def prepare(
    session: Session,
    things: Sequence[Any],
    *,
    until: int,
    accumulate: int,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
) -> tuple[Any, ...]:
    """See `Session.prepare`. `settings`: other arguments of `Session.register`."""
    for axis, size in asdict(session.settings.mesh).items():
        if size != 1:
            rule = "session.prepare takes models that are whole on each rank; call session.parallelize(model) before the "
            raise ConfigError(f"mesh.{axis}", size, rule + "optimizer is made, then session.register and session.steps")
    kinds = [_kind(thing) for thing in things]
    if kinds.count("loader") != 1:
        rule = "the one that trains; a loader for validation stays as it is"
        raise MisuseError(f"session.prepare was given {kinds.count('loader')} loaders; give it one: {rule}")
    if "model" not in kinds or "optimizer" not in kinds:
        raise MisuseError("session.prepare needs the model and its optimizer: prepare(model, optimizer, loader, until=...)")
    optimizers = [thing for thing, kind in zip(things, kinds, strict=True) if kind == "optimizer"]
    schedulers = [thing for thing, kind in zip(things, kinds, strict=True) if kind == "scheduler"]
    models = [session.parallelize(thing) for thing, kind in zip(things, kinds, strict=True) if kind == "model"]
    loader = things[kinds.index("loader")]
    if session.streams > 1 and reads_all_items(loader):
        raise MisuseError(
            "the loader reads the same items on every replica; make it with sampler=session.sampler(dataset, shuffle=True), "
            "which deals the items over the replicas"
        )
    session.register(
        models[0] if len(models) == 1 else {str(number): model for number, model in enumerate(models)},
        optimizers,
        schedulers,
        **settings,
    )
    loop = Loop(session, loader, optimizers, schedulers, until, accumulate, say)
    stand_ins: dict[str, Iterator[Any]] = {
        "model": iter(models),
        "optimizer": iter([PreparedOptimizer(loop, number) for number in range(len(optimizers))]),
        "scheduler": iter([PreparedScheduler(loop, number) for number in range(len(schedulers))]),
        "loader": iter([PreparedLoader(loop)]),
    }
    return tuple(next(stand_ins[kind]) for kind in kinds)


def _kind(thing: Any) -> str:
    if isinstance(thing, PreparedOptimizer | PreparedScheduler | PreparedLoader):
        raise MisuseError("session.prepare was given what it gave back; call it once, with the objects of the loop")
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, Optimizer):
        return "optimizer"
    if isinstance(thing, torch.amp.GradScaler):
        raise MisuseError("session.prepare takes no GradScaler; use session.register(scaler=...) and session.steps")
    if callable(getattr(thing, "step", None)) and callable(getattr(thing, "state_dict", None)):
        return "scheduler"
    if hasattr(thing, "__iter__"):
        return "loader"
    raise MisuseError(f"session.prepare takes models, optimizers, schedulers and a loader, not a {type(thing).__name__}")


@dataclass
class _Turn:
    """The micro-batch that the loop is in: what it has called so far."""

    step: Step[Any]
    last: bool  # of its step
    optimizers: set[int] = field(default_factory=set)  # that were stepped
    schedulers: set[int] = field(default_factory=set)
    backward_done: bool = False
    skipped: bool = False


class Loop:
    """What the stand-ins of one loop share. One thread at a time."""

    def __init__(
        self,
        session: Session,
        loader: Any,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        until: int,
        accumulate: int,
        say: Callable[[str], None],
    ) -> None:
        self.loader, self.optimizers, self.schedulers = loader, list(optimizers), list(schedulers)
        self._session, self._until, self._accumulate = session, until, accumulate
        self._say = say
        self._turn: _Turn | None = None  # while the user's code runs
        self._began = self._running = self._left = self._settled = False

    # ---------------------------------------------------------------- the loader

    def batches(self) -> Iterator[Any]:
        """The micro-batches of all steps; nothing once these are over."""
        if self._running or self._left:
            self._check_not_left()
            raise MisuseError("the prepared loader was iterated over a second time within its loop")
        return iter(()) if self._began else self._batches()

    def _batches(self) -> Iterator[Any]:
        self._began = self._running = True
        try:
            for step in self._session.steps(self.loader, until=self._until, accumulate=self._accumulate):
                for number, batch in enumerate(step, start=1):
                    step.expect_backward()
                    turn = self._turn = _Turn(step, number == self._accumulate)
                    try:
                        yield batch
                    except GeneratorExit:
                        self._left = True
                        raise
                    finally:
                        self._turn = None
                    self._check_complete(turn)
        finally:
            self._running = False

    def _check_complete(self, turn: _Turn) -> None:
        """Raises MisuseError if the loop takes the next micro-batch too early."""
        if turn.skipped:
            return
        missing = [number for number in range(len(self.optimizers)) if number not in turn.optimizers]
        if missing and (turn.last or turn.optimizers):
            name = self._name("optimizer", missing[0], self.optimizers)
            after = f"after the {self._accumulate} backwards" if self._accumulate > 1 else "after the backward"
            raise MisuseError(
                f"{name}.step() was not called {after} of step {turn.step.number}; call it, or loader.skip() for a batch that "
                "is to be left out"
            )
        for number in range(len(self.schedulers)):
            if turn.optimizers and number not in turn.schedulers:
                name = self._name("scheduler", number, self.schedulers)
                raise MisuseError(
                    f"{name}.step() was not called after optimizer.step() in step {turn.step.number}; schedulers step once for "
                    "each update, so give schedules in updates, not in epochs"
                )
        if turn.last:
            turn.step.check_no_backward()
        else:
            self._settle(turn)

    # ---------------------------------------------------------------- what the user's code calls

    def step_optimizer(self, number: int, closure: Any) -> None:
        name = self._name("optimizer", number, self.optimizers)
        turn = self._turn
        if turn is None:
            if self._running:  # in an update function of the user
                self.optimizers[number].step()
                return
            self._check_not_left()
            raise MisuseError(f"{name}.step() was called outside the loop over the prepared loader")
        if closure is not None:
            raise MisuseError(f"{name}.step() was given a closure, which computes the loss again; an update may not")
        if number in turn.optimizers:
            raise MisuseError(f"{name}.step() was called twice in one micro-batch of step {turn.step.number}")
        self._settle(turn)
        turn.optimizers.add(number)
        if turn.last and len(turn.optimizers) == len(self.optimizers):
            self._commit(turn)

    def skip(self) -> None:
        turn = self._turn
        if turn is None or turn.backward_done:
            raise MisuseError("loader.skip() was called outside the loop over the prepared loader, or after optimizer.step()")
        turn.step.skip()
        turn.backward_done = turn.skipped = True
        turn.optimizers |= set(range(len(self.optimizers)))
        if turn.last:
            self._commit(turn)

    def _commit(self, turn: _Turn) -> None:
        self._turn = None
        try:
            turn.step.commit()
        finally:
            self._turn = turn

    def step_scheduler(self, number: int) -> None:
        name = self._name("scheduler", number, self.schedulers)
        turn = self._turn
        if turn is None:
            if self._running:
                self.schedulers[number].step()
                return
            self._check_not_left()
            raise MisuseError(
                f"{name}.step() was called outside the loop over the prepared loader; the update steps schedulers"
            )
        if not turn.optimizers:
            raise MisuseError(f"{name}.step() was called before optimizer.step() in step {turn.step.number}; call it after")
        if number in turn.schedulers:
            raise MisuseError(f"{name}.step() was called twice after one optimizer.step() in step {turn.step.number}")
        turn.schedulers.add(number)

    def zero_gradients(self, number: int, set_to_none: bool) -> None:
        if self._turn is None or self._turn.step.done is not None:
            self.optimizers[number].zero_grad(set_to_none)

    def _settle(self, turn: _Turn) -> None:
        if not turn.backward_done:
            turn.step.own_backward_done()
            turn.backward_done = True
            first, self._settled = not self._settled, True
            if first and (outside := turn.step.trained_outside()):
                self._say(
                    f"{outside} is not registered and has a gradient: this run does not exchange, update or save it. If it is "
                    "trained with the rest, give its module to session.prepare"
                )

    def _check_not_left(self) -> None:
        if self._left:
            raise MisuseError(
                "the loop over the prepared loader was left (break, return) before its last update; until= of session.prepare "
                "says how long it goes on"
            )

    @staticmethod
    def _name(kind: str, number: int, all_: Sequence[Any]) -> str:
        return kind if len(all_) == 1 else f"{kind} {number} ({type(all_[number]).__name__})"


class PreparedLoader:
    """Gives micro-batches over all epochs. Its length and other attributes are those of the loader behind it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return self._loop.batches()

    def skip(self) -> None:
        """Leave the batch that was given last out, in place of its backward and `optimizer.step()`. It counts nothing; those
        of other replicas count as before."""
        self._loop.skip()

    def __len__(self) -> int:
        """Batches of an epoch of this replica."""
        return len(self._loop.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loop"].loader, name)


class PreparedScheduler:
    """Checks its calls; all else is the scheduler's own."""

    def __init__(self, loop: Loop, number: int) -> None:
        self._loop, self._number = loop, number

    def step(self) -> None:
        """Check that it is called once for each `optimizer.step()`. The update steps the scheduler."""
        self._loop.step_scheduler(self._number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loop"].schedulers[self.__dict__["_number"]], name)


class PreparedOptimizer(Optimizer):
    """An optimizer whose `step` ends the session's step; all else is the optimizer's own."""

    def __init__(self, loop: Loop, number: int) -> None:  # not the base's: parameters and state are those of the real one
        self._loop, self._number = loop, number

    @property
    def _real(self) -> Optimizer:
        return self._loop.optimizers[self._number]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing before the step's last backward; after it, exchange, agreement and update."""
        self._loop.step_optimizer(self._number, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing within a step; after it, that of the optimizer."""
        self._loop.zero_gradients(self._number, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._real.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._real.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._real.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        loop = self.__dict__.get("_loop")
        if loop is None:
            raise AttributeError(name)
        return getattr(loop.optimizers[self.__dict__["_number"]], name)

    def __repr__(self) -> str:
        return repr(self._real)
