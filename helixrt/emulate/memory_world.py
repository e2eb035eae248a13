"""A simulated world for links through shared memory: two processes that go on at any moment of each other's.

In: a seed. Out: a `Verdict`, or a `Violation` with the line that replays it (`python -m helixrt.emulate.memory_world --seed
N`).
What runs is `SharedMemoryLink` with its rings, and the pure halves of `protocol/shared_memory/messages.py`; the segments,
the doorbell and the reading of the other's memory are `memory_segments`'. The other process goes on between any two accesses
to a word, and while its memory is read. A process that has nothing to do sleeps until its bell rings.

Every message arrives once and whole; what was forgotten is not written and not read any more; no process sleeps while it
has something to do; a receive that cannot be served any more ends when the peer closes. In the end no offer stands.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from helixrt.emulate import seeded
from helixrt.emulate.link_end import Inbox, Name
from helixrt.emulate.memory_segments import Doorbell, NeighbourMemory, Segment, Watched
from helixrt.emulate.seeded import check, content, replayable
from helixrt.errors import Cause
from helixrt.protocol.shared_memory.messages import Limits
from helixrt.transport.contract import Lost, Outcome, PeerAborted, Received, Sent
from helixrt.transport.intake import Stage
from helixrt.transport.shared_memory.handshake import Joined
from helixrt.transport.shared_memory.link import SharedMemoryLink

LIMITS = Limits(eager=1000, budget=4000, piece=700)
LENGTHS = (0, 1, 300, 1000, 1001, 2500, 6000)
RINGS_BYTES = (2048, 4096, 16_384)
STEPS = 20_000
_STAGES = (Stage(), Stage())  # of a process each


@dataclass(frozen=True)
class Verdict:
    """What a run did, both ends together."""

    seed: int
    steps: int
    received: int
    meanwhile: int  # steps of one process in the middle of another's
    by_ring: int  # worlds in which no memory of the other process is read
    forgotten: int  # operations
    withdrawn: int  # offers that were withdrawn while they were read
    slept: int
    rung: int
    ended: int  # links that the world ended early


class End:
    """A process: its link, its driver's loop, and the caller above."""

    def __init__(self, world: MemoryWorld, me: int) -> None:
        self.world, self.me = world, me
        self.bell = Doorbell()
        self.dead = self.asleep = False
        self.todo: list[Callable[[], None]] = []
        self.outcomes: list[Outcome] = []
        self.lent: dict[Name, Inbox] = {}
        self.returned: list[Inbox] = []
        self.sources: dict[Name, memoryview] = {}
        self.unsent: set[Name] = set()
        self.received: set[Name] = set()
        self.forgotten: set[int] = set()
        self.ended: Lost | PeerAborted | None = None
        self.closed = False
        self.slept = 0

    def join(self, segments: Sequence[Segment], memory: NeighbourMemory | None) -> None:
        joined = Joined(cast(Any, segments[self.me]), cast(Any, segments[1 - self.me]), cast(Any, memory), -1, 0)
        watch, stage = cast(Any, Watched()), _STAGES[self.me]
        connection = cast(Any, self.bell)
        self.link = SharedMemoryLink(1 - self.me, connection, joined, watch, None, self.outcomes.append, stage, LIMITS)

    # ---- the driver

    def can_turn(self) -> bool:
        return not self.dead and not self.link.ended and (not self.asleep or self.bell.readable)

    def turn(self) -> None:
        self.asleep = False
        ready = self.bell.readable
        if ready or not self.link.quiet(0.0):
            self.link.progress(0.0, ready, False)
        self.hear()
        if self.link.ended:
            return
        if self.world.random.random() < 0.7:
            self.link.arm()
            self.hear()
            if not self.link.ended and self.link.deadline is None:
                self.asleep = True
                self.slept += 1

    def act(self) -> None:
        """The caller does the next thing; that wakes its driver."""
        self.asleep = False
        self.todo.pop()()
        self.hear()

    def hear(self) -> None:
        outcomes = list(self.outcomes)
        self.outcomes.clear()
        for outcome in outcomes:
            match outcome:
                case Sent(_, op, index):
                    check((op, index) in self.unsent or op in self.forgotten, f"Sent {op, index} twice, or never begun")
                    self._sent((op, index))
                case Received(_, op, index):
                    if op not in self.forgotten:
                        self._received((op, index))
                case Lost() | PeerAborted():
                    check(self.ended is None, "ended twice")
                    self.ended = outcome
                    self._over()

    def _sent(self, name: Name) -> None:
        self.unsent.discard(name)
        self.sources[name][:] = b"\xcc" * len(self.sources[name])

    def _received(self, name: Name) -> None:
        inbox = self.lent[name]
        check(name not in self.received, f"Received {name} twice")
        check(inbox.memory == content(1 - self.me, name, len(inbox)), f"{name} came with other bytes than were sent")
        self.received.add(name)
        self._take_back(name)

    def _take_back(self, name: Name) -> None:
        inbox = self.lent.pop(name)
        inbox.end()
        self.returned.append(inbox)

    def _over(self) -> None:
        """All memory is the caller's."""
        for name in list(self.lent):
            self._take_back(name)
        for name in list(self.unsent):
            self._sent(name)
        self.todo.clear()

    # ---- the caller

    def send(self, name: Name, length: int) -> None:
        if name[0] not in self.forgotten:
            source = self.sources[name] = memoryview(bytearray(content(self.me, name, length)))
            self.unsent.add(name)
            self.link.send(*name, source)

    def receive(self, name: Name, length: int, sink: bool) -> None:
        if name[0] not in self.forgotten:
            inbox = self.lent[name] = Inbox(name, length)
            self.link.receive(*name, inbox if sink else inbox.memory)

    def forget(self, op: int) -> None:
        self.forgotten.add(op)
        self.link.forget(op)
        for name in [name for name in self.lent if name[0] == op]:
            self._take_back(name)
        for name in [name for name in self.unsent if name[0] == op]:
            self._sent(name)

    def leave(self, how: str) -> None:
        self.world.ended += 1
        self.closed = True
        if how == "close":
            self.link.close()
        elif how == "abort":
            self.link.abort(Cause("enough", f"rank {self.me}"))
        else:
            self.dead = True
            self.bell.close()
        self._over()

    def waits(self) -> bool:
        """It waits for something that only the peer can do."""
        return bool(self.lent)


class MemoryWorld:
    module = "helixrt.emulate.memory_world"

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.steps = self.met = self.ended = self.withdrawn = 0
        self._within = -1  # the process in whose middle the other goes on
        self._acts = -1  # the process that acts
        rng = self.random
        ring_bytes = rng.choice(RINGS_BYTES)
        self.segments = [Segment(ring_bytes, self.meanwhile) for _ in range(2)]
        self.ends = [End(self, me) for me in range(2)]
        self.ends[0].bell.other, self.ends[1].bell.other = self.ends[1].bell, self.ends[0].bell
        denied = rng.choice((0.0, 0.0, 0.05))
        self.direct = rng.random() < 0.7
        for end in self.ends:
            memory = NeighbourMemory(rng, denied, self.ends[1 - end.me].bell, self.meanwhile) if self.direct else None
            end.join(self.segments, memory)
        self.busy = rng.choice((0.0, 0.02, 0.2))
        self.weights = [[rng.choice((0.05, 0.3, 1.0)) for _ in range(2)] for _ in range(2)]
        self.draw_traffic()

    def draw_traffic(self) -> None:
        rng = self.random
        for sender in self.ends:
            receiver = self.ends[1 - sender.me]
            for op in range(rng.randint(0, 3)):
                for index in range(rng.choice((1, 4, 12))):
                    length, name = rng.choice(LENGTHS), (op, index)
                    sender.todo.append(partial(sender.send, name, length))
                    receiver.todo.append(partial(receiver.receive, name, length, rng.random() < 0.4))
        for end in self.ends:
            rng.shuffle(end.todo)
            if rng.random() < 0.45:
                end.todo.insert(rng.randint(0, len(end.todo)), partial(end.forget, rng.randrange(3)))
        if rng.random() < 0.15:
            end = rng.choice(self.ends)
            end.todo.insert(rng.randint(0, len(end.todo)), partial(end.leave, rng.choice(("close", "abort", "kill"))))

    # ---- running

    def run(self) -> Verdict:
        with replayable(self.module, self.seed):
            self.go_on()
            self.judge()
            if not self.ended:
                self.part()
            for end in self.ends:
                for inbox in end.returned:
                    inbox.check_untouched()
        return self.verdict()

    def go_on(self) -> None:
        """Until neither process can make a step."""
        while steps := [step for end in self.ends for step in self.possible(end)]:
            self.steps += 1
            check(self.steps < STEPS, "no end in sight")
            ((_, me, step),) = self.random.choices(steps, [weight for weight, _, _ in steps])
            self._acts = me
            step()
            self._acts = -1

    def possible(self, end: End) -> list[tuple[float, int, Callable[[], None]]]:
        steps: list[tuple[float, int, Callable[[], None]]] = []
        act, turn = self.weights[end.me]
        if end.todo and not end.dead and not end.link.ended:
            steps.append((act, end.me, end.act))
        if end.can_turn():
            steps.append((turn, end.me, end.turn))
        return steps

    def meanwhile(self) -> None:
        """In the middle of what one process does, the other one goes on."""
        if self._acts < 0 or self._within >= 0 or self.random.random() >= self.busy:
            return
        other = self.ends[1 - self._acts]
        steps = self.possible(other)
        if steps:
            self._within, self.met = self._acts, self.met + 1
            reading = self.ends[self._acts].link._in.busy
            offers = sum(map(bool, self.segments[other.me].offers))
            self.random.choice(steps)[2]()
            self.withdrawn += reading and other.forgotten != set() and sum(map(bool, self.segments[other.me].offers)) < offers
            self._within = -1

    # ---- judgement

    def judge(self) -> None:
        """Neither process can make a step: check that nothing is left open."""
        for end in self.ends:
            other = self.ends[1 - end.me]
            if end.ended is not None:
                check(other.closed, f"{end.me} reports {end.ended}: the other end exists")
                continue
            if end.closed or other.closed:
                check(end.closed or not end.waits(), f"{end.me} waits for {list(end.lent)} of an end that is gone")
                continue
            over = end.forgotten | other.forgotten
            waits = [name for name in end.lent if name[0] not in over]
            check(not waits, f"{end.me} has not received {waits}")
            unsent = [name for name in end.unsent if name[0] not in over]
            check(not unsent, f"{end.me} has not sent {unsent}")

    def part(self) -> None:
        """One end closes: the other notices if it waits for something, and else not."""
        first, second = self.random.sample(self.ends, 2)
        waited = second.waits()
        unfinished = bool(second.unsent)
        self._acts = first.me
        first.closed = True
        first.link.close()
        first._over()
        self._acts = -1
        self.go_on()
        check(isinstance(second.ended, Lost) == (waited or unfinished), f"{second.me}: {second.ended}; it waited: {waited}")
        if second.ended is None:
            second.link.close()
        check(not any(sum(map(bool, segment.offers)) for segment in self.segments), "an offer stands after the end")
        check(all(segment.ends == 2 for segment in self.segments), "a segment is still in use")

    def verdict(self) -> Verdict:
        return Verdict(
            seed=self.seed,
            steps=self.steps,
            received=sum(len(end.received) for end in self.ends),
            meanwhile=self.met,
            by_ring=int(not self.direct),
            forgotten=sum(len(end.forgotten) for end in self.ends),
            withdrawn=self.withdrawn,
            slept=sum(end.slept for end in self.ends),
            rung=sum(end.bell.rung for end in self.ends),
            ended=self.ended,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    seeded.main(lambda seed: MemoryWorld(seed).run(), arguments)


if __name__ == "__main__":
    main()
