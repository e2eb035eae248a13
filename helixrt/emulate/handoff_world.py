"""A simulated world for a communicator's hand-off between its callers and its thread: any interleaving of their lines.

In: a seed. Out: a `Verdict`, or a `Violation` with the line that replays it (`python -m helixrt.emulate.handoff_world --seed
N`).
What runs is production's `Communicator` with `HandOff`, `Execution` and `Handle`; threads, clock, lock and sleeping are
`threads`', the links are `handoff_endpoint`'s. Several callers submit, wait, wait with a limit, compute, and submit from
callbacks; messages arrive at any moment; meanwhile the generation is aborted, broken by a peer, configured again, closed.

When every thread sleeps, nothing that has arrived is left undone, no deadline has passed and no operation that ended is
unsettled. Turns are taken by the driver, or by another thread while no caller drives. Every operation ends once, in its
generation, with the generation's first cause if it fails; its waiter returns, and one with a limit sleeps within it.
A callback runs in a thread that counts as awake.
Collectives begin in the order in which they were submitted. In the end no thread is left, and the poller is closed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType

import torch

from helixrt.collectives import background
from helixrt.collectives.communicator import Communicator
from helixrt.collectives.execution import Execution, Wire
from helixrt.collectives.handle import CollectiveError, Handle
from helixrt.collectives.reduction import Op, Reduction
from helixrt.emulate import seeded
from helixrt.emulate.handoff_endpoint import SimulatedEndpoint
from helixrt.emulate.seeded import Violation
from helixrt.emulate.threads import SimulatedSystem, Surroundings, Task, Threads, check
from helixrt.errors import Cause, HelixError, Retryable
from helixrt.protocol.collective.algorithms import direct
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.handoff import Sleep
from helixrt.protocol.patience import Patience

CHUNK = 64
TUNING = Tuning(chunk_bytes=CHUNK, least_chunk_bytes=CHUNK)
SIZE = 2
TIMEOUT_S = 1000.0  # of an operation whose messages come
SHORT_S = (0.002, 0.05)  # of one that may end by its deadline
LATE_S = 1e-3
_SUM = Reduction(Op.SUM)
_MEMORY = torch.zeros(4 * CHUNK, dtype=torch.uint8)
_RECEIVES = [direct.receive_from(1, CHUNK * n, 1, TUNING) for n in (1, 3)]
_SEND = direct.send_to(1, CHUNK, 1, TUNING)
_BARRIER = direct.barrier(0, SIZE)


def _codes() -> frozenset[CodeType]:
    """The functions in which a thread can be preempted before every line."""
    codes = {f.__code__ for part in (Communicator, Handle) for f in vars(part).values() if isinstance(f, FunctionType)}
    for function in (background.run, background.end, Execution.take_ended):
        assert isinstance(function, FunctionType)
        codes.add(function.__code__)
    return frozenset(codes)


@dataclass
class Call:
    """An operation that a caller submitted."""

    generation: int
    handle: Handle
    messages: set[tuple[int, int]] = field(default_factory=set)  # it must receive
    due: float = float("inf")  # its deadline, at the latest
    ends: int = 0
    finishes: int = 0


@dataclass(frozen=True)
class Verdict:
    """What a run did."""

    seed: int
    steps: int
    switches: int
    ended: int  # operations that ended well
    failed: int
    slept: int
    nudges: int
    wakes: int
    passed: int  # the role, from one caller to another that waited
    timed_out: int  # waits with a limit
    nested: int  # waits in a callback
    interrupted: int
    expired: int  # operations that ended by their deadlines
    aborted: int
    configured: int  # generations after the first


class HandOffWorld(Surroundings):
    module = "helixrt.emulate.handoff_world"
    share_that_close_late = (0.8, 0.6)  # when all callers have come; when all operations have ended

    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, random.Random(seed)
        rng = self.chance
        self.threads = Threads(rng, self, _codes())
        patience = Patience(rng.choice((0.0, 20e-6)), rng.choice((1e-3, 5e-3)))
        self.endpoint = SimulatedEndpoint(self.threads, rng, patience.park_s)
        self.system = SimulatedSystem(self.threads, lambda: self.endpoint.readable)
        self.communicator = Communicator(self.endpoint, TUNING, "simulated", patience, self.system)  # type: ignore[arg-type]
        self.handoff = self.communicator._handoff
        self.endpoint.lock = self.system.the_lock
        self.endpoint.driver = lambda: self.handoff.driver
        self.endpoint.sleepers = lambda: self.system.the_poller.users
        self.calls: list[Call] = []
        self.waits: dict[Task, list[Call]] = {}  # what each thread waits for, the innermost last
        self.causes: dict[int, str] = {}  # generation -> the first cause
        self.given = {
            "the group is being configured again",
            "the communicator was closed",
            "the communicator is not configured",
        }
        self.generation = 0
        self.tags = 0
        self.callers_left = rng.randint(1, 4)
        self.broken_by_a_peer = rng.random() < 0.1
        self.count = self.threads.count
        manager = Task(self.threads, "the manager", self.manage)
        self.manager = manager

    # ---- running

    def run(self) -> Verdict:
        try:
            self.manager.start()
            self.threads.run()
            self.judge()
        except (AssertionError, LookupError, ValueError, TypeError, OSError, HelixError) as error:
            name = "" if type(error).__name__ == "WorldError" else f"{type(error).__name__}: "
            raise Violation(f"{name}{error}; replay: python -m {self.module} --seed {self.seed}") from error
        finally:
            if self.communicator._abandoned is not None:
                self.communicator._abandoned.detach()
        return self.verdict()

    def manage(self) -> None:
        """The thread that configures and closes."""
        rng, communicator = self.chance, self.communicator
        self.configure()
        for number in range(self.callers_left):
            Task(self.threads, f"caller {number}", self.call).start()
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            self.pause()
            if rng.random() < 0.4:
                self.abort()
            else:
                self.configure()
        if rng.random() < self.share_that_close_late[0]:
            self.threads.block(lambda: self.callers_left == 0)
        if rng.random() < self.share_that_close_late[1]:
            self.threads.block(lambda: all(call.handle.done for call in self.calls))
        communicator.close()
        check(communicator._thread is None or not communicator._thread.is_alive(), "closed, and the thread has not ended")

    def configure(self) -> None:
        communicator = self.communicator
        communicator.begin()
        self.note_failure()
        self.generation += 1
        if self.chance.random() < 0.1:
            Task(self.threads, "an aborting one", self.abort).start()
        try:
            communicator.configure(self.generation, 0, {1: b"there"}, 10.0)
        except Retryable as error:
            check(error.cause.what in self.given, f"configuring failed: {error}")
        self.count["configured"] += 1

    def abort(self) -> None:
        cause = f"enough {len(self.given)}"
        self.given.add(cause)
        self.count["aborted"] += 1
        self.communicator.abort(Cause(cause))

    def note_failure(self) -> None:
        """A generation's cause stays what it was first."""
        execution = self.communicator._execution
        if execution is not None and execution.failure is not None:
            what = execution.failure.cause.what
            first = self.causes.setdefault(self.communicator.generation, what)
            check(first == what, f"generation {self.communicator.generation} ended by {first}, and now by {what}")

    def pause(self) -> None:
        """It computes, or does something else."""
        self.threads.block(lambda: False, self.threads.now + self.chance.choice((0.0, 1e-4, 3e-3, 0.03, 0.3)))

    # ---- callers

    def call(self) -> None:
        rng, mine = self.chance, list[Call]()
        self.threads.me().signals = True
        for _ in range(rng.randint(1, 5)):
            if rng.random() < 0.3:
                self.pause()
            if rng.random() < 0.4:
                self.wait(self.submit(True))
            else:
                mine.append(self.submit(False))
            while mine and rng.random() < 0.4:
                self.wait(mine.pop(rng.randrange(len(mine))))
        rng.shuffle(mine)
        for each in mine:
            if rng.random() < 0.7:
                self.wait(each)
        self.callers_left -= 1

    def submit(self, waits: bool, may_nest: bool = True) -> Call:
        rng, communicator = self.chance, self.communicator
        kind = rng.choice(("receive", "receive", "receive", "send", "barrier"))
        plan = rng.choice(_RECEIVES) if kind == "receive" else _SEND if kind == "send" else _BARRIER
        wire = None
        if kind != "barrier":
            self.tags += 1
            wire = Wire(-self.tags, 0)
        limit_s = rng.choice(SHORT_S) if rng.random() < 0.05 or self.endpoint.never else TIMEOUT_S
        call = Call(-1, Handle(None))

        def finish() -> None:
            call.finishes += 1

        call.handle = communicator.submit(plan, _MEMORY, _MEMORY, _SUM, limit_s, wire=wire, finish=finish, waits=waits)
        call.generation, call.due = self.endpoint.generation, self.threads.now + limit_s
        if kind == "receive":
            assert wire is not None
            call.messages = {(wire.op, index) for index in range(len(plan.nodes))}
        self.calls.append(call)
        nests = may_nest and rng.random() < 0.15
        call.handle.then(lambda: self.over(call, nests))
        return call

    def over(self, call: Call, nests: bool) -> None:
        """For `then`."""
        call.ends += 1
        try:
            check(call.ends == 1, "an operation ended twice")
            awake = self.threads.me() is not self.communicator._thread or self.handoff.sleep is Sleep.AWAKE
            check(awake, "the thread runs a callback and counts as sleeping")
        except AssertionError as error:  # a handle logs what its callbacks raise, and goes on
            self.threads.fail(error)
        if nests:
            self.count["nested"] += 1
            inner = self.submit(self.chance.random() < 0.5, may_nest=False)
            self.wait(inner)

    def wait(self, call: Call) -> None:
        rng, threads = self.chance, self.threads
        task = threads.me()
        limit_s = rng.choice((0.0, 1e-4, 0.01)) if rng.random() < 0.25 else None
        self.waits.setdefault(task, []).append(call)
        task.deadlines.append(float("inf") if limit_s is None else threads.now + limit_s + 1e-3)
        try:
            ended = call.handle.wait(limit_s)
            if not ended:
                check(limit_s is not None, "a wait returned before its operation ended")
                self.count["timed out"] += 1
        except CollectiveError as error:
            check(call.handle.done, "a wait raised before its operation ended")
            check(error.cause.what in self.given or "did not end in time" in error.cause.what, f"failed by {error}")
        except KeyboardInterrupt:
            pass
        finally:
            task.deadlines.pop()
            self.waits[task].pop()
            check(self.handoff.driver != task.number or task.deadlines, f"{task.name} returned, and drives")

    # ---- around the threads

    def events(self) -> list[Callable[[], None]]:
        events = self.endpoint.events()
        if self.broken_by_a_peer and self.endpoint.open and self.chance.random() < 0.05:
            events.append(self.peer_ends)
        return events

    def peer_ends(self) -> None:
        cause = f"the peer ended {len(self.given)}"
        self.given.add(cause)
        self.broken_by_a_peer = False
        self.endpoint.end(Cause(cause), self.chance.random() < 0.5)

    def all_sleep(self) -> None:
        communicator, execution = self.communicator, self.communicator._execution
        self.note_failure()
        if execution is not None:
            check(not execution.ended, "an operation ended, and no thread is about to complete it")
            arrived = [o for o in self.endpoint.inbox if execution.running]
            check(not arrived, f"{arrived} arrived, and every thread sleeps")
        now = self.threads.now
        for call in self.calls:
            if not call.handle.done:
                current = execution is not None and call.generation == communicator.generation
                check(current, f"an operation of generation {call.generation} is left, and its generation is over")
                check(call.due + LATE_S >= now, f"an operation's deadline passed at {call.due:.6f}, and it is {now:.6f}")
        for task, calls in self.waits.items():
            check(not calls or not calls[-1].handle.done, f"{task.name} sleeps, and its operation has ended")
        for task in self.threads.tasks:
            check(task.ended or not task.deadlines or task.deadlines[-1] >= now, f"{task.name} sleeps after its time was over")

    def judge(self) -> None:
        for call in self.calls:
            check(call.handle.done and call.ends == 1, "an operation was left without an end")
            well = call.handle.failure is None
            check(call.finishes == well, f"what follows an operation ran {call.finishes} times; it ended well: {well}")
        poller = self.system.the_poller
        check(poller.closed, "the poller is left open")
        check(self.endpoint.closed, "the endpoint is left open")

    def verdict(self) -> Verdict:
        failures = [call.handle.failure for call in self.calls]
        count = self.count
        return Verdict(
            seed=self.seed,
            steps=self.threads.steps,
            switches=count["switches"],
            ended=sum(failure is None for failure in failures),
            failed=sum(failure is not None for failure in failures),
            slept=count["slept"],
            nudges=count["nudges"],
            wakes=count["wakes"],
            passed=count["passed"],
            timed_out=count["timed out"],
            nested=count["nested"],
            interrupted=count["interrupted"],
            expired=sum(failure is not None and "did not end in time" in failure.cause.what for failure in failures),
            aborted=count["aborted"],
            configured=count["configured"] - 1,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    seeded.main(lambda seed: HandOffWorld(seed).run(), arguments)


if __name__ == "__main__":
    main()
