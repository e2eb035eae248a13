"""Runs a job's ranks from the first start to the last exit, as `policies` decide.

In: a `Launcher`, the run's store, a function that gives the specs of a replica's incarnation, the
policy's options. Out: the `StopRun` that ended the run, and `history`, what happened when.
The driver calls `run` in its main thread and does its own work in `tick`. Nothing here knows
whether ranks are local processes or Ray actors.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from helixrt.replica.run_keys import EXIT_KEY, done_key, ended_key, leave_key, poison_key, running_key, saves_key
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
    STOPPED = "stopped"
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
    """The process was asked to end by SIGTERM; as a SystemExit its code is 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


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
        self._signal: int | None = None

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

        There is a round every `poll_s`, in which exits are seen. What is not urgent waits for the first round that comes
        `look_s` after its last: whether a replica that runs is done, and `tick`, which is also called at the end. Ctrl-C
        raises KeyboardInterrupt and SIGTERM raises `Terminated` from here, once every rank is gone; so does whatever `tick` or
        the launcher raise. Raises Retryable when the store has been away for too long: ranks that outlive this process go on
        then.
        """
        goes_on, ticks_at, self._look_s = False, self._clock(), look_s
        with self._signals():
            try:
                if not self._attached:
                    self._feed(policies.Began())
                while self.state.stopped is None:
                    self._pause(poll_s)
                    self._round()
                    if self._clock() >= ticks_at:
                        ticks_at = self._clock() + look_s
                        with suppress(Retryable):  # `_round` knows for how long the store has been away
                            tick()
                if self.state.stopped.ok:
                    self._let_go(poll_s, tick)
            except Retryable:
                goes_on = self._launcher.outlives_driver and self.state.stopped is None
                raise
            finally:
                if not goes_on:
                    with self._undisturbed():
                        self._launcher.close()
            tick()
        return self.state.stopped

    def _round(self) -> None:
        """See what happened since the last round and act on it.

        Exits are taken before the store is read: a rank says that it is done before it exits, so
        whoever has exited in good order is known to be done when its exit is judged.
        """
        ended = sorted(self._launcher.poll(), key=lambda e: policies.severity(e.code))
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
        replica, rank, reason, position = exit_.coordinate.replica, str(exit_.coordinate), exit_.reason, None
        if self._watch is not None:
            position = self._watch.position(replica, exit_.incarnation, rank)
            stuck = self._watch.complaint(replica, exit_.incarnation, rank) if exit_.code > 0 else ""
            reason += f"; {stuck}" if stuck else ""
        saves = exit_.code == policies.LEFT_EXIT and self._saves(replica, exit_.incarnation)
        return policies.RankEnded(replica, exit_.incarnation, rank, exit_.code, reason, position, saves)

    def _saves(self, replica: int, incarnation: int) -> bool:
        try:
            return self._store.get(saves_key(replica, incarnation)) is not None
        except Retryable:
            return True  # it may

    def _let_go(self, poll_s: float, tick: Callable[[], None]) -> None:
        """Tell the ranks to exit and wait for them; who stays longer than the grace is killed by close."""
        self._store.put_if_absent(EXIT_KEY, "ok")
        deadline = self._clock() + self._exit_grace_s
        while self._alive and self._clock() < deadline:
            self._pause(poll_s)
            for exit_ in self._launcher.poll():
                self._alive.discard((exit_.incarnation, str(exit_.coordinate)))
            tick()

    def _tell(self, kind: Happening, replica: int, incarnation: int, why: str = "") -> None:
        event = LifeEvent(kind, replica, incarnation, time.time(), why)
        self.history.append(event)
        self._on_event(event)

    def _pause(self, poll_s: float) -> None:
        self._wake.wait(poll_s)
        if self._signal == signal.SIGTERM:
            raise Terminated
        if self._signal is not None:
            raise KeyboardInterrupt

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into a flag, so that none strikes between a start and its record.

        A second one raises at once, in case `tick` hangs. Outside the main thread: no change.
        """

        def note(number: int, frame: FrameType | None) -> None:
            again, self._signal = self._signal is not None, number
            self._wake.set()
            if again:
                raise KeyboardInterrupt

        with _handlers(note):
            yield

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """No signal interrupts the end of the ranks; it has a deadline of its own."""
        with _handlers(lambda number, frame: None):
            yield


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, handler)
        yield
    finally:
        for restored, previous in old.items():
            signal.signal(restored, previous)
