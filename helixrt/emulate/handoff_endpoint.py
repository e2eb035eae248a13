"""A simulated endpoint below one communicator: what its peers do is drawn from a seed.

In: what the communicator sends and posts. Out: the messages of the peers, at any time after they were posted or before; a lost
peer or one that aborts. Like shared memory, it may become readable only after `next_deadline` was asked, until `progress`.
"""

from __future__ import annotations

import random
import select
from collections.abc import Callable, Collection, Mapping, Sequence

from helixrt.emulate.threads import SimulatedLock, Task, Threads, check
from helixrt.errors import Cause, Retryable
from helixrt.protocol.handoff import PARKED
from helixrt.transport.contract import Buffer, Endpoint, Lost, Outcome, PeerAborted, Received, Refused, Sent, Sink

Message = tuple[int, int, int]  # (peer, operation, index)

_STOP_S = 0.1  # how often `connect` asks whether it was stopped
_LATE_S = 2e-3  # a turn may be so much too late: other threads ran


class SimulatedEndpoint(Endpoint):
    def __init__(self, threads: Threads, chance: random.Random, park_s: float) -> None:
        self._threads, self._chance = threads, chance
        self.rings_when_asked = chance.random() < 0.6
        self.beat_s = chance.choice((0.01, 0.5))
        self.never = chance.choice((0.0, 0.0, 0.03))  # of messages that do not come
        self.early = chance.choice((0.0, 0.3))  # of messages that came before they were posted
        self.latest_s = (PARKED + 1) * park_s + _LATE_S
        self.lock: SimulatedLock | None = None
        self.driver: Callable[[], int] = lambda: 0
        self.sleepers: Callable[[], Collection[Task]] = tuple  # on the descriptors
        self.generation = -1
        self.open = self.closed = False
        self.asked = False
        self._reset()

    def _reset(self) -> None:
        self.readable = False
        self.beat = self._threads.now + self.beat_s
        self.coming: list[Message] = []  # posted, and not there yet
        self.leaving: list[Message] = []  # sent, and not taken yet
        self.inbox: list[Outcome] = []  # arrived, for the next `progress`
        self.delivered: set[tuple[int, int]] = set()
        self.begun: list[int] = []  # collectives, in the order of their first messages
        self.ended: Cause | None = None

    # ---- what the peers do

    def events(self) -> list[Callable[[], None]]:
        if not self.open:
            return []
        events: list[Callable[[], None]] = [lambda m=m: self._arrive(m) for m in self.coming]  # type: ignore[misc]
        events += [lambda m=m: self._leave(m) for m in self.leaving]  # type: ignore[misc]
        return events

    def _arrive(self, message: Message) -> None:
        self.coming.remove(message)
        self.inbox.append(Received(*message))
        self._ring()

    def _leave(self, message: Message) -> None:
        self.leaving.remove(message)
        self.inbox.append(Sent(*message))
        self._ring()

    def _ring(self) -> None:
        if not self.rings_when_asked or self.asked:
            self.readable = True

    def end(self, cause: Cause, lost: bool) -> None:
        """A peer is lost, or aborts."""
        if self.open and self.ended is None:
            self.ended = cause
            self.inbox.append(Lost(1, cause) if lost else PeerAborted(1, cause))
            self._ring()

    # ---- for the communicator

    def _held(self) -> None:
        assert self.lock is not None
        check(self.lock.owner is self._threads.me(), "the endpoint is used without the lock")
        check(not self.closed, "the endpoint is used after it was closed")

    def address(self) -> bytes:
        return b"here"

    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        threads = self._threads
        until, comes = threads.now + deadline_s, threads.now + self._chance.choice((0.0, 0.01, 0.5))
        while threads.now < comes:
            if stopped() or threads.now >= until:
                raise Retryable("connecting was stopped")
            threads.block(lambda: False, min(comes, until, threads.now + _STOP_S))
        self.generation, self.open = generation, True
        self._reset()

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        self._held()
        if op >= 0 and op not in self.begun:
            check(not self.begun or op > self.begun[-1], f"collective {op} begins after {self.begun}")
            self.begun.append(op)
        self.leaving.append((peer, op, index))
        if self._chance.random() < 0.5:
            self._at_once(self.leaving.pop(), True)

    def receive(self, peer: int, op: int, index: int, into: Buffer | Sink) -> None:
        self._held()
        if self._chance.random() >= self.never:
            self.coming.append((peer, op, index))
            if self._chance.random() < self.early:
                self._at_once(self.coming.pop(), False)

    def _at_once(self, message: Message, sent: bool) -> None:
        """It happened within the call: over shared memory `next_deadline` reports it, and no descriptor."""
        self.inbox.append(Sent(*message) if sent else Received(*message))
        if not self.rings_when_asked:
            self.readable = True

    def forget(self, op: int) -> None:
        raise NotImplementedError("a communicator ends generations, not operations")

    def descriptors(self) -> Mapping[int, int]:
        self._held()
        return {1: select.EPOLLIN} if self.open else {}

    def progress(self, now: float) -> Sequence[Outcome]:
        self._held()
        check(self.open, "a generation that ended is brought on")
        driver = self.driver()
        check(driver in (0, self._threads.me().number), f"{self._threads.me().name} takes a turn while caller {driver} drives")
        others = [task.name for task in self.sleepers() if task is not self._threads.me() and task.deadlines]
        check(not others, f"{self._threads.me().name} takes a turn while {others} sleep as drivers")
        self.asked = self.readable = False
        if now >= self.beat:
            check(now - self.beat <= self.latest_s, f"a heartbeat is {now - self.beat:.6f} s late")
            self.beat = now + self.beat_s
        inbox, self.inbox = self.inbox, []
        self.delivered.update((o.op, o.index) for o in inbox if isinstance(o, Received))
        return inbox

    def next_deadline(self) -> float | None:
        self._held()
        self.asked = True
        return 0.0 if self.inbox else self.beat

    def abort(self, cause: Cause) -> None:
        self._held()
        self.open = False
        self._reset()

    def close(self) -> None:
        self._held()
        self.open, self.closed = False, True
        self._reset()

    def refused(self) -> Refused:
        return Refused()
