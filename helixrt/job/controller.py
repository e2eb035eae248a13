"""Runs a job's ranks from the first start to the last exit, as `policies` decide.

In: a `Launcher`, the run's store, a function that gives the specs of a replica's incarnation, the
policy's options. Out: the `StopRun` that ended the run, and `history`, what happened when.
The driver calls `run` in its main thread and does its own work in `tick`. Nothing here knows
whether ranks are local processes or Ray actors.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from types import FrameType
from typing import Any

from helixrt.errors import Cause, Retryable
from helixrt.job import policies
from helixrt.job.draining import AskToLeave, DrainAsked, Refuse, asked
from helixrt.job.policies import Options, Phase, RunState, StopRun
from helixrt.job.stuck import Limits
from helixrt.job.watch import ProgressWatch
from helixrt.replica.contracts import Launcher, RankExit, RankSpec, RunStore
from helixrt.replica.run_keys import (
    EXIT_KEY,
    cause_key,
    done_key,
    ended_key,
    given_up_key,
    leave_key,
    poison_key,
    ready_key,
    running_key,
    saves_key,
)
from helixrt.timeouts import Timeouts


class Happening(Enum):
    """What `history` tells of a replica, or of the run (replica -1)."""

    STARTED = "started"
    RUNNING = "running"
    LOST = "lost"
    RESTARTED = "restarted"
    FINISHED = "finished"
    GIVEN_UP = "given_up"
    LEFT = "left"  # at a step boundary, as it was asked to
    DRAINED = "drained"  # stays away until the user says so
    REFUSED = "refused"  # what the user asked for
    WAITING = "waiting"  # for resources to start its ranks with
    SKIPPED = "skipped"  # a batch of its stream, which ended it twice
    FAILED = "failed"  # its program: behind the loop, or so that the run ends
    STOPPED = "stopped"
    LEAVING = "leaving"  # the run: the driver got a signal
    ATTACHED = "attached"  # a driver to the run, whose ranks had trained on without one


@dataclass(frozen=True)
class LifeEvent:
    """One thing that happened to a replica's `incarnation`, at a Unix time, and why."""

    kind: Happening
    replica: int
    incarnation: int
    at_s: float
    why: str = ""


class Terminated(SystemExit):
    """The process was asked to end by a signal; as a SystemExit its code is 128 and the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


_NEW_PHASE = {
    Phase.STARTING: Happening.STARTED,
    Phase.RUNNING: Happening.RUNNING,
    Phase.LOST: Happening.LOST,
    Phase.RESTARTING: Happening.RESTARTED,
    Phase.FINISHED: Happening.FINISHED,
    Phase.GIVEN_UP: Happening.GIVEN_UP,
    Phase.DRAINED: Happening.DRAINED,
}


LOOK_S = 0.2  # of a driver between two looks at what is not urgent: each takes several calls of the run's store
_OVER = frozenset({Phase.LOST, Phase.RESTARTING, Phase.GIVEN_UP, Phase.DRAINED})  # of the incarnation before


class Controller:
    """Owns the launcher from construction on: `run` closes it however it ends.

    `specs(replica, incarnation)` gives the specs of all ranks of that replica. `on_event` gets
    every `LifeEvent` as it is added to `history`, in the thread of `run`. With `timeouts`, ranks that make no
    progress are found (`stuck`).
    """

    def __init__(
        self,
        launcher: Launcher,
        store: RunStore,
        specs: Callable[[int, int], Sequence[RankSpec]],
        options: Options,
        on_event: Callable[[LifeEvent], None] = lambda event: None,
        exit_grace_s: float = 20.0,
        store_patience_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        timeouts: Timeouts | None = None,
        signal_grace_s: float = 25.0,
    ) -> None:
        self.history: list[LifeEvent] = []
        self.state = RunState.initial(options)
        self._launcher, self._store, self._specs, self._options = launcher, store, specs, options
        self._on_event, self._clock = on_event, clock
        self._exit_grace_s, self._store_patience_s = exit_grace_s, store_patience_s
        self._alive: set[tuple[int, str]] = set()  # (incarnation, rank) started and not reported as ended
        self._store_lost_s: float | None = None
        self._told_waiting: set[tuple[int, int]] = set()  # (replica, incarnation)
        self._attached = False
        self._watch: ProgressWatch | None = None
        if timeouts is not None:
            period_s = timeouts.progress_period_s
            limits = Limits(timeouts.step_s, timeouts.start_s, 2 * period_s)
            self._watch = ProgressWatch(store, limits, period_s, clock, launcher.working_on)
        self._look_s, self._looks_at = 0.0, -math.inf  # when the store is read for all replicas again
        self._wake = threading.Event()
        self._signal_grace_s = signal_grace_s
        self._signal: int | None = None
        self._raised: BaseException | None = None  # by the user's own handler of it
        self.at_once = False
        """A second signal has ended the run."""
        self.lets_leave = False
        """After a signal some replicas were still leaving: the process that has them lets them complete that."""
        self._leaves_by_s: float | None = None  # once the replicas were asked to leave because of it

    def take_over(self, state: RunState, alive: frozenset[tuple[int, str]], why: str) -> None:
        """Before `run`: go on from where another controller of this life of the run has stopped. `alive`: the ranks
        (incarnation, coordinate) that were started and have not ended. What it may have left half done is done again."""
        self.state, self._alive = state, set(alive)
        self._attached = True
        self._tell(Happening.ATTACHED, -1, 0, why)
        for index, replica in enumerate(state.replicas):
            specs = self._specs(index, replica.incarnation)
            if self._watch is not None:
                self._watch.began(index, replica.incarnation, [str(spec.coordinate) for spec in specs])
            if replica.phase in (Phase.STARTING, Phase.RESTARTING):
                for spec in specs:
                    self._alive.add((spec.incarnation, str(spec.coordinate)))
                    self._launcher.start(spec)
            elif replica.phase is Phase.LOST:
                self._tell_survivors(index, replica.incarnation)
                self._launcher.kill(index)

    def run(self, poll_s: float = 0.05, tick: Callable[[], None] = lambda: None, look_s: float = 0.0) -> StopRun:
        """Start all replicas, or go on with those that were taken over, and see them through; returns how the run ended, with
        no rank left.

        There is a round every `poll_s`, in which exits are seen. What is not urgent waits for the first round with an exit, or
        that comes `look_s` after its last: whether a replica that runs is done, and `tick`, which is also called at the end.
        At the first SIGINT, SIGTERM or SIGHUP the replicas are asked to leave, with their state saved, within
        `signal_grace_s`; then, once every rank is gone, what the user's own handler of it has raised is raised from here, else
        KeyboardInterrupt or `Terminated`. Ranks that outlive this process may leave later (`lets_leave`). A second signal ends
        the ranks at once; so does whatever `tick` or the launcher raise. Raises Retryable when the store has been away for too
        long: ranks that outlive this process go on then.
        """
        goes_on, ticks_at, self._look_s = False, self._clock(), look_s
        with self._signals():
            try:
                if not self._attached:
                    self._feed(policies.Began())
                while self.state.stopped is None and not self._has_left():
                    self._pause(poll_s)
                    ended = sorted(self._launcher.poll(), key=lambda e: policies.severity(e.code))
                    if ended or self._clock() >= ticks_at:  # an end is judged by what was committed before
                        ticks_at = self._clock() + look_s
                        with suppress(Retryable):  # `_round` knows for how long the store has been away
                            tick()
                    self._round(ended)
                if self.state.stopped is not None and self.state.stopped.ok:
                    self._let_go(poll_s, tick)
                if self._signal is not None:
                    self.lets_leave = goes_on = self._launcher.outlives_driver and self._some_leave()
                    raise self._interruption(self._signal)
            except Retryable:
                goes_on = self._launcher.outlives_driver and self.state.stopped is None
                raise
            finally:
                if not goes_on:
                    with self._undisturbed():
                        self._launcher.close()
            tick()
        assert self.state.stopped is not None
        return self.state.stopped

    def _round(self, ended: Sequence[RankExit]) -> None:
        """Act on what happened since the last round.

        Exits are taken before the store is read: a rank says that it is done before it exits, so
        whoever has exited in good order is known to be done when its exit is judged.
        """
        try:
            if self._read_store(bool(ended)):
                self._store_lost_s = None
        except Retryable as lost:
            now = self._clock()
            self._store_lost_s = now if self._store_lost_s is None else self._store_lost_s
            if now - self._store_lost_s > self._store_patience_s:
                what = f"the run's store did not answer for {self._store_patience_s:g} s: {lost}"
                raise Retryable(Cause(what, "driver")) from lost
        for exit_ in ended:
            self._alive.discard((exit_.incarnation, str(exit_.coordinate)))
            self._feed(self._event_of(exit_))
            replica = self.state.replicas[exit_.coordinate.replica]
            if replica.phase is Phase.FINISHED and replica.incarnation == exit_.incarnation:
                self._tell_survivors(exit_.coordinate.replica, exit_.incarnation)  # one that catches up may wait for it
        self._look_for_stuck_ranks()
        self._look_at_launches()
        self._feed(policies.Tick())

    def _read_store(self, at_once: bool) -> bool:
        """Whether the store was asked. Of replicas that run it is asked once in `look_s`, or `at_once`: a rank has ended."""
        asked, looks = False, at_once or self._clock() >= self._looks_at
        if looks:
            self._looks_at = self._clock() + self._look_s
        for index, replica in enumerate(self.state.replicas):
            if replica.phase in policies.SETTLED or (replica.phase is Phase.RUNNING and not looks):
                continue
            asked = True
            if self._store.get(done_key(index)) is not None:
                self._feed(policies.ReplicaDone(index))
            elif replica.phase is not Phase.RUNNING and self._store.get(running_key(index, replica.incarnation)) is not None:
                self._feed(policies.ReplicaRunning(index, replica.incarnation))
        return asked

    def _look_for_stuck_ranks(self) -> None:
        if self._watch is None:
            return
        active = [i for i, r in enumerate(self.state.replicas) if r.phase in policies.ACTIVE]
        with suppress(Retryable):  # time without the store is not observed
            for stuck in self._watch.look(active):
                self._feed(stuck)

    def _look_at_launches(self) -> None:
        for index, replica in enumerate(self.state.replicas):
            if replica.phase not in (Phase.STARTING, Phase.RESTARTING):
                continue
            if self._watch is not None and self._watch.has_time_left(index):
                self._feed(policies.TimeAsked(index, replica.incarnation))
            if self._launcher.waiting(index):
                self._feed(policies.CapacityAwaited(index, replica.incarnation))
                if (index, replica.incarnation) not in self._told_waiting:
                    self._told_waiting.add((index, replica.incarnation))
                    self._tell(Happening.WAITING, index, replica.incarnation, self._launcher.awaits)

    def drain(self, event: DrainAsked) -> None:
        """Carry out the user's request, or say why not. From `tick` alone."""
        state, decision = asked(self.state, event, self._clock())
        if isinstance(decision, AskToLeave):  # before the state changes: the store may not take it
            self._put_surely(leave_key(decision.replica, decision.incarnation), decision.reason)
        self.state = state
        if isinstance(decision, Refuse):
            self._tell(Happening.REFUSED, event.replica, self.state.replicas[event.replica].incarnation, decision.reason)

    def committed(self, lives: Iterable[tuple[int, int]]) -> None:
        """These replicas (and incarnations) have contributed to steps that were committed. From `tick` alone."""
        for replica, incarnation in lives:
            if self.state.replicas[replica].losses:
                self._feed(policies.Committed(replica, incarnation))

    def _feed(self, event: policies.Event) -> None:
        before = self.state
        self.state, decisions = policies.decide(before, event, self._clock(), self._options)
        for index, (old, new) in enumerate(zip(before.replicas, self.state.replicas, strict=True)):
            if isinstance(event, policies.Began):
                self._tell(Happening.STARTED, index, new.incarnation)
            elif (old.phase, old.incarnation) != (new.phase, new.incarnation):
                if new.phase in _OVER:
                    self._tell_survivors(index, old.incarnation)
                lost = Happening.LEFT if new.left else Happening.LOST
                # Lost and started again (or drained) at once is one change of state but two happenings.
                if new.phase in (Phase.RESTARTING, Phase.DRAINED) and old.phase is not Phase.LOST:
                    self._tell(lost, index, old.incarnation, new.why)
                kind = lost if new.phase is Phase.LOST else _NEW_PHASE[new.phase]
                self._tell(kind, index, new.incarnation, new.why)
        if isinstance(event, policies.RankEnded) and self.state.stopped and self.state.replicas == before.replicas:
            if event.code != policies.DIVERGED_EXIT:  # the driver says what differs, and what follows
                self._tell(Happening.FAILED, event.replica, event.incarnation, event.reason)
        for decision in decisions:
            self._execute(decision)

    def _tell_survivors(self, replica: int, incarnation: int) -> None:
        """So that they do not wait for its heartbeats to pass."""
        with suppress(Retryable):  # then they do; a store that stays away ends the run in `_round`
            self._store.put_if_absent(ended_key(replica, incarnation), "yes")

    def _execute(self, decision: policies.Decision) -> None:
        if isinstance(decision, policies.StartReplica):
            specs = self._specs(decision.replica, decision.incarnation)
            if self._watch is not None:
                self._watch.began(decision.replica, decision.incarnation, [str(spec.coordinate) for spec in specs])
            for spec in specs:
                self._alive.add((spec.incarnation, str(spec.coordinate)))
                self._launcher.start(spec)
        elif isinstance(decision, policies.KillReplica):
            self._launcher.kill(decision.replica)
        elif isinstance(decision, policies.GiveUp):
            with suppress(Retryable):  # else they wait for it until their own limit
                self._store.put_if_absent(given_up_key(decision.replica), decision.reason)
                self._store.put_if_absent(ready_key(decision.replica), "given up")
        elif isinstance(decision, policies.SkipBatch):
            self._list_poison(decision.replica, str(decision.position))
            incarnation = self.state.replicas[decision.replica].incarnation
            self._tell(Happening.SKIPPED, decision.replica, incarnation, decision.reason)
        elif isinstance(decision, StopRun):
            self._tell(Happening.STOPPED, -1, 0, decision.reason)

    def _list_poison(self, replica: int, position: str) -> None:
        index = 0
        while self._put_surely(poison_key(replica, index), position) != position:
            index += 1

    def _put_surely(self, key: str, value: str) -> str:
        """Put it, before anything else is done; for as long as the store may be away. Returns what stands."""
        deadline = self._clock() + self._store_patience_s
        while True:
            try:
                return self._store.put_if_absent(key, value)
            except Retryable:
                if self._clock() >= deadline:
                    raise
                self._pause(0.2)

    def _event_of(self, exit_: RankExit) -> policies.RankEnded:
        replica, rank, position = exit_.coordinate.replica, str(exit_.coordinate), None
        if exit_.code == policies.RETRY_EXIT and self._options.ranks_per_replica > 1:
            with suppress(Retryable):
                if (cause := self._store.get(cause_key(replica, exit_.incarnation))) is not None:
                    exit_ = replace(exit_, **json.loads(cause))
        reason = exit_.reason
        if self._watch is not None:
            position = self._watch.position(replica, exit_.incarnation, rank)
            stuck = self._watch.complaint(replica, exit_.incarnation, rank) if exit_.code > 0 else ""
            reason += f"; {stuck}" if stuck else ""
        saves = exit_.code == policies.LEFT_EXIT and self._saves(replica, exit_.incarnation)
        where = (position, saves, exit_.error, exit_.host)
        return policies.RankEnded(replica, exit_.incarnation, rank, exit_.code, reason, *where)

    def _saves(self, replica: int, incarnation: int) -> bool:
        try:
            return self._store.get(saves_key(replica, incarnation)) is not None
        except Retryable:
            return True  # it may

    def _let_go(self, poll_s: float, tick: Callable[[], None]) -> None:
        """Tell the ranks to exit and wait for them; who stays longer than the grace is killed by close. The run has failed if
        the user's code behind the loop does not return."""
        self._store.put_if_absent(EXIT_KEY, "ok")
        deadline, failed = self._clock() + self._exit_grace_s, list[RankExit]()
        while self._alive and self._clock() < deadline:
            self._pause(poll_s)
            if self._signal is not None and self._leaves_by_s is None:
                self._leaves_by_s = self._clock() + self._signal_grace_s
                deadline = min(deadline, self._leaves_by_s)
            for exit_ in self._launcher.poll():
                self._alive.discard((exit_.incarnation, str(exit_.coordinate)))
                if exit_.code and self.state.replicas[exit_.coordinate.replica].phase is Phase.FINISHED:
                    failed.append(exit_)
                    self._tell(Happening.FAILED, exit_.coordinate.replica, exit_.incarnation, exit_.reason)
            tick()
        if failed:
            first = min(failed, key=lambda e: policies.severity(e.code))
            self.state = replace(self.state, stopped=StopRun(False, f"after the last step, {first.reason}"))

    def _tell(self, kind: Happening, replica: int, incarnation: int, why: str = "") -> None:
        event = LifeEvent(kind, replica, incarnation, time.time(), why)
        self.history.append(event)
        self._on_event(event)

    def _pause(self, poll_s: float) -> None:
        self._wake.wait(poll_s)
        self._wake.clear()

    @property
    def asked_by(self) -> str:
        """The signal by which the run ends; "" without one."""
        return "" if self._signal is None else signal.Signals(self._signal).name

    def _has_left(self) -> bool:
        """After a signal: whether no replica that runs is left, or the grace is over."""
        to = "driver"
        if self._signal is None and self._launcher.told_to_end:
            self._signal, to = signal.SIGTERM, "keeper of the run"
        if self._signal is None:
            return False
        if self._leaves_by_s is None:
            self._leaves_by_s = self._clock() + self._signal_grace_s
            why = f"{self.asked_by} to the {to}"
            for index, replica in enumerate(self.state.replicas):
                if replica.phase in policies.ACTIVE:
                    with suppress(Retryable):
                        self._store.put_if_absent(leave_key(index, replica.incarnation), why)
            with suppress(Retryable):
                self._launcher.leaving()
            self._tell(Happening.LEAVING, -1, 0, f"{why}: the replicas save their state and leave; another signal ends at once")
            self.state = replace(self.state, replicas=tuple(replace(r, drained=True) for r in self.state.replicas))
        return self._clock() >= self._leaves_by_s or not self._some_leave()

    def _some_leave(self) -> bool:
        return any(
            r.phase is Phase.RUNNING or (r.phase is Phase.LOST and r.left and len(r.ended) < self._options.ranks_per_replica)
            for r in self.state.replicas
        )

    def _interruption(self, number: int) -> BaseException:
        return self._raised or (KeyboardInterrupt() if number == signal.SIGINT else Terminated(number))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn signals into a flag, so that none strikes between a start and its record; the user's own handlers are called,
        too. A second one raises at once, in case `tick` hangs. Outside the main thread: no change. SIGHUP does not end ranks
        that go on without this process, and a second one is ignored: a terminal that is closed may send several."""
        numbers = [signal.SIGINT, signal.SIGTERM, *([] if self._launcher.outlives_driver else [signal.SIGHUP])]
        users = {number: signal.getsignal(number) for number in numbers}

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal == number == signal.SIGHUP:
                return
            again, self._signal = self._signal is not None, number
            self._wake.set()
            if again:
                self.at_once = True
                raise self._interruption(number)
            own = users[signal.Signals(number)]
            if callable(own) and own is not signal.default_int_handler:
                try:
                    own(number, frame)
                except BaseException as error:
                    self._raised = error

        with handlers(note, numbers):
            yield

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """No signal interrupts the end of the ranks; it has a deadline of its own."""
        with handlers(lambda number, frame: None, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            yield


@contextmanager
def handlers(handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Signals that are ignored, as SIGHUP is under nohup, stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old: dict[int, Any] = {}
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, handler)
        yield
    finally:
        for restored, previous in old.items():
            signal.signal(restored, previous)
