"""Simulated threads of one process: only one runs at a time, and which one goes on is drawn from a seed.

In: functions to run as threads, and a `Surroundings`. Out: one of their interleavings, the same for the same seed. A thread can
be preempted wherever it uses the `SimulatedSystem` (lock, latch, poller, clock) and before every line of the functions whose
code is `watched`; these run unchanged. Each simulated thread is a thread of the operating system that waits for its turn. Time
is virtual: it moves a little with every look at the clock, and jumps to the next deadline when every thread sleeps.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import CodeType, FrameType
from typing import Any

_TICK_S = 2e-6  # that pass between two looks at the clock, on average
STEPS = 15_000  # switches, and looks at the clock, until a world is taken for endless


class WorldError(AssertionError):
    """A rule was broken."""


def check(holds: object, what: str) -> None:
    if not holds:
        raise WorldError(what)


class Abandoned(BaseException):
    """Unwinds a thread of a world that is over."""


class Surroundings(ABC):
    """What happens around the threads."""

    @abstractmethod
    def events(self) -> list[Callable[[], None]]:
        """What may happen now without any of the threads."""

    @abstractmethod
    def all_sleep(self) -> None:
        """No thread can go on: check what must hold then."""


class Task:
    """One simulated thread, with the part of `threading.Thread` that a communicator uses."""

    def __init__(self, threads: Threads, name: str, run: Callable[[], None]) -> None:
        self.threads, self.name, self.run = threads, name, run
        self.number = threads.number()
        self.ready: Callable[[], bool] | None = None  # it sleeps until this holds
        self.until = math.inf  # or until then
        self.ended = False
        self.signals = False  # it may be interrupted, as the main thread by Ctrl-C
        self.interruptible = False  # now: it sleeps on descriptors
        self.deadlines: list[float] = []  # of the calls it is in, the innermost last
        self.baton = threading.Lock()
        self.baton.acquire()
        self._thread = threading.Thread(target=self._body, name=name, daemon=True)

    def start(self) -> None:
        self.threads.tasks.append(self)
        self._thread.start()

    def _body(self) -> None:
        threads = self.threads
        self.baton.acquire()
        try:
            if not threads.over:
                sys.settrace(threads.trace)
                self.run()
        except Abandoned:
            pass
        except BaseException as error:
            threads.fail(error)
        finally:
            sys.settrace(None)
            self.ended = True
            if not threads.over:
                threads.hand_on()

    def join(self, timeout_s: float = math.inf) -> None:
        self.threads.block(lambda: self.ended, self.threads.now + timeout_s)

    def is_alive(self) -> bool:
        return not self.ended

    def unwind(self) -> None:
        try:
            self.baton.release()
        except RuntimeError:
            pass  # it is on its way
        self._thread.join()


class Threads:
    """The scheduler. All its state is used by the one thread that runs."""

    def __init__(self, chance: random.Random, around: Surroundings, watched: Collection[CodeType]) -> None:
        self.chance, self.around, self.watched = chance, around, watched
        self.restless = chance.choice((0.02, 0.08, 0.25))
        self.interrupts = chance.choice((0.0, 0.0, 0.03))
        self._numbers = 0
        self.eager = chance.choice((0.0, 0.05, 0.4))  # of events, while a thread can go on
        self.now = 1.0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.error: BaseException | None = None
        self.over = False
        self.steps = 0
        self.count: Counter[str] = Counter()
        self._finished = threading.Lock()
        self._finished.acquire()

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def me(self) -> Task:
        assert self.current is not None
        return self.current

    def run(self) -> None:
        """Until all threads have ended. Raises what went wrong."""
        self.hand_on()
        self._finished.acquire()
        for task in self.tasks:
            if not task.ended:
                task.unwind()
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.finish()

    def finish(self) -> None:
        if not self.over:
            self.over = True
            self._finished.release()

    # ---- switching

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code in self.watched else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.point()
        return self._line

    def point(self) -> None:
        """Another thread may go on here."""
        if self.over:
            raise Abandoned
        if self.chance.random() < self.restless:
            self._switch()

    def block(self, ready: Callable[[], bool], until: float = math.inf) -> None:
        """The running thread sleeps."""
        if self.over:
            raise Abandoned
        task = self.me()
        task.ready, task.until = ready, until
        try:
            self._switch()
        finally:
            task.ready = None

    def _switch(self) -> None:
        task = self.me()
        if self.hand_on():
            task.baton.acquire()
        if self.over:
            raise Abandoned

    def hand_on(self) -> bool:
        """Choose which thread goes on; whether it is another one. It runs from then on."""
        before = self.current
        try:
            after = self._choose()
        except BaseException as error:
            self.fail(error)
            return False
        if after is None:
            self.finish()
            return False
        if after is before:
            return False
        self.count["switches"] += 1
        self.current = after
        after.baton.release()
        return True

    def _choose(self) -> Task | None:
        while True:
            self.steps += 1
            check(self.steps < STEPS, "no end in sight")
            can = [t for t in self.tasks if not t.ended and (t.ready is None or t.until <= self.now or t.ready())]
            if can and self.chance.random() >= self.eager:
                return self.chance.choice(can)
            events = self.around.events()
            if events and (can or self.chance.random() < 0.5):
                self.chance.choice(events)()
            elif can:
                return self.chance.choice(can)
            elif all(t.ended for t in self.tasks):
                return None
            else:
                self._rest(events)

    def _rest(self, events: list[Callable[[], None]]) -> None:
        self.around.all_sleep()
        until = min(t.until for t in self.tasks if not t.ended)
        if events and (until == math.inf or self.chance.random() < 0.7):
            self.chance.choice(events)()
            return
        asleep = ", ".join(f"{t.name} ({'lasts' if t.until == math.inf else t.until})" for t in self.tasks if not t.ended)
        check(until < math.inf, f"these threads sleep without end: {asleep}")
        self.now = max(self.now, until)

    def tick(self) -> float:
        self.steps += 1
        check(self.steps < STEPS, "no end in sight")
        self.now += self.chance.random() * 2 * _TICK_S
        return self.now


class SimulatedLock:
    def __init__(self, threads: Threads) -> None:
        self._threads, self.owner = threads, None

    owner: Task | None

    def __enter__(self) -> None:
        threads = self._threads
        threads.point()
        while self.owner is not None:
            threads.block(lambda: self.owner is None)
        self.owner = threads.me()

    def __exit__(self, *_: object) -> None:
        self.owner = None


class SimulatedLatch:
    def __init__(self, threads: Threads, lock: SimulatedLock) -> None:
        self._threads, self._lock, self._is_open = threads, lock, False

    def open(self) -> None:
        self._threads.point()
        self._is_open = True
        if self._lock.owner is self._threads.me():  # else the operation ended
            self._threads.count["passed"] += 1

    def wait(self, timeout_s: float) -> None:
        threads = self._threads
        threads.point()
        sleeps(threads, lambda: self._is_open, threads.now + timeout_s)
        threads.count["waited"] += 1


class SimulatedPoller:
    """Stands in for `helixrt.transport.poller.Poller`; `readable` returns whether a watched descriptor is ready."""

    def __init__(self, threads: Threads, readable: Callable[[], bool]) -> None:
        self._threads, self._readable = threads, readable
        self.watched: Mapping[int, int] = {}
        self.woken = self.nudged = self.closed = False
        self.users: set[Task] = set()

    def _used(self) -> None:
        check(not self.closed, "the poller is used after it was closed")

    def watch(self, descriptors: Mapping[int, int]) -> None:
        check(not self.closed or not descriptors, "the poller is used after it was closed")
        self.watched = dict(descriptors)

    def wait(self, timeout_s: float) -> None:
        self._sleep(lambda: self.woken or self.nudged or bool(self.watched and self._readable()), timeout_s, True)

    def sleep(self, timeout_s: float) -> None:
        self._sleep(lambda: self.woken, timeout_s, False)

    def _sleep(self, ready: Callable[[], bool], timeout_s: float, signals: bool) -> None:
        self._used()
        threads = self._threads
        task = threads.me()
        threads.point()
        self._used()
        self.users.add(task)
        task.interruptible = signals and task.signals and len(task.deadlines) == 1
        try:
            if timeout_s > 0:
                threads.count["slept"] += 1
                sleeps(threads, ready, threads.now + timeout_s)
            else:
                threads.point()
        finally:
            self.users.discard(task)
            task.interruptible = False

    def wake(self) -> None:
        self._used()
        self._threads.count["wakes"] += 1
        self.woken = True

    def nudge(self) -> None:
        self._used()
        self._threads.count["nudges"] += 1
        self.nudged = True

    def take_wake(self) -> None:
        self._used()
        self.woken = False

    def take_nudge(self) -> None:
        self._used()
        self.nudged = False

    def close(self) -> None:
        self._used()
        check(not self.users, f"the poller is closed while {[task.name for task in self.users]} sleep on it")
        self.closed = True


def sleeps(threads: Threads, ready: Callable[[], bool], until: float) -> None:
    """A thread sleeps, if need be until `until`: not beyond its caller's deadline. A signal may end it."""
    task = threads.me()
    deadline = task.deadlines[-1] if task.deadlines else math.inf
    check(until <= deadline + 1e-9, f"{task.name} sleeps until {until:.6f}, and its caller needs it back at {deadline:.6f}")
    interrupted = False

    def goes_on() -> bool:
        nonlocal interrupted
        interrupted = interrupted or (task.interruptible and threads.chance.random() < threads.interrupts)
        return interrupted or ready()

    threads.block(goes_on, until)
    if interrupted:
        threads.count["interrupted"] += 1
        raise KeyboardInterrupt


class SimulatedStop:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class SimulatedSystem:
    """Stands in for `helixrt.collectives.system.System`."""

    def __init__(self, threads: Threads, readable: Callable[[], bool]) -> None:
        self._threads, self._readable = threads, readable
        self.stop = SimulatedStop

    def now(self) -> float:
        self._threads.point()
        return self._threads.tick()

    def me(self) -> int:
        return self._threads.me().number

    def lock(self) -> SimulatedLock:
        self.the_lock = SimulatedLock(self._threads)
        return self.the_lock

    def latch(self) -> SimulatedLatch:
        return SimulatedLatch(self._threads, self.the_lock)

    def poller(self) -> SimulatedPoller:
        self.the_poller = SimulatedPoller(self._threads, self._readable)
        return self.the_poller

    def thread(self, run: Callable[..., None], arguments: tuple[Any, ...], name: str) -> Task:
        return Task(self._threads, name, lambda: run(*arguments))

    def is_current(self, thread: object) -> bool:
        return thread is self._threads.current
