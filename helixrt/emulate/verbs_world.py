"""A simulated world for the flow control of verbs: production's connections over simulated NICs, in a seeded order.

In: a seed. Out: a `Verdict`, or a `Violation` with the line that replays it (`python -m helixrt.emulate.verbs_world --seed N`).
What runs is `VerbsConnection`, its send queue and `protocol/verbs/flow.py`; the NICs are `verbs_nic`'s. A world draws the
sizes of both ends, how fast each process and each NIC is, where the counters stand (some are about to pass 2^32), and when
messages are forgotten or a NIC fails.

Every message arrives once, whole and in its order; memory is given back only when no NIC reads it any more; no queue
overflows; every operation ends, and then all memory is returned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from helixrt.emulate import seeded
from helixrt.emulate.seeded import check, content, replayable
from helixrt.emulate.verbs_nic import SimulatedPair
from helixrt.protocol.link import frames
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.messages import Failure
from helixrt.transport.verbs.connection import VerbsConnection
from helixrt.transport.verbs.memory import Registrations
from helixrt.transport.verbs.queue_pair import QueuePair, Sizes

CHUNK_BYTES = 4096
LENGTHS = (-1, 0, 10, 900, 4096, 4097, 6000, 8192, 8193, 12_000, 20_000)  # -1: a frame without a message
SHORT_LENGTHS = (-1, 0, 10, 900)  # such messages use up receives, and no slots
STEPS = 40_000
GENERATION = 300  # more than fits an immediate
LOOK_S = 1e-4  # what passes between two looks at the clock


@dataclass(frozen=True)
class Verdict:
    """What a run did, both ends together."""

    seed: int
    steps: int
    delivered: int
    starved: int  # times that frames waited for credit
    crowded: int  # worlds in which all receives but the spare ones were in use
    wrapped: int  # counters that passed 2^32
    forgotten: int  # messages whose memory was taken back under way
    failed: int  # NICs


class End:
    """A `Carrier`, and the caller above it."""

    def __init__(self, world: VerbsWorld, me: int, sizes: Sizes) -> None:
        self.world, self.me = world, me
        self.pair = SimulatedPair(sizes, world.random)
        self.to_send: list[int] = []  # lengths
        self.sources: dict[int, memoryview] = {}  # sequence -> memory that is lent
        self.begun = 0
        self.arriving: memoryview | None = None
        self.received: list[int] = []
        self.controls = self.controls_sent = 0
        self.starved = self.forgotten = 0
        self.writes = False  # it is its turn to write

    def join(self) -> None:
        other = self.world.ends[1 - self.me].pair
        self.pair.other, self.pair.busy = other, self.world.nics  # type: ignore[method-assign]
        self.connection = VerbsConnection(
            cast(QueuePair, self.pair),
            other.attributes(),
            cast(Registrations, self.pair.registrations),
            self,
            1 - self.me,
            0,
            GENERATION,
            self.wake,
            lambda pair: pair.disarm(),
            self.world.clock,
        )

    def wake(self, connection: VerbsConnection) -> None:
        self.writes = True

    # ---- the caller

    def begin(self) -> None:
        length = self.to_send.pop()
        if length < 0:
            self.controls_sent += 1
            self.connection.put(frames.pack(Frame(Kind.BEAT, GENERATION)))
        else:
            self.begun += 1
            name = (self.begun, 0)
            memory = memoryview(bytearray(content(self.me, name, length)))
            self.sources[self.begun] = memory
            frame = Frame(Kind.DATA, GENERATION, self.begun, op=self.begun, index=0, length=length)
            self.connection.put(frames.pack(frame), memory if length else None, name, self.begun)
        if not self.connection.blocked:
            self.writes = True

    def forget(self) -> None:
        """Take back the memory of the message that waits longest."""
        sequence = next(iter(self.sources))
        self.forgotten += 1
        self.world.hurries = True  # nothing else happens in so short a time
        self.connection.detach((sequence, 0))
        self.world.hurries = False
        self._take_back(sequence)

    def write(self) -> None:
        self.writes = False
        self.connection.write(1 << 20)
        self.starved += self.connection.blocked

    def read(self) -> None:
        self.connection.read(1 << 20)

    def _take_back(self, sequence: int) -> None:
        source = self.sources.pop(sequence, None)
        if source is not None:
            source[:] = b"\xcc" * len(source)

    # ---- calls of its connection

    def frame_came(self, connection: Any, frame: Frame) -> None:
        check(not connection.closed, "a frame came on a closed connection")
        if frame.kind is not Kind.DATA:
            self.controls += 1
            return
        check(frame.sequence == len(self.received) + 1, f"message {frame.sequence} after {len(self.received)}")
        self.arriving = connection.landing = memoryview(bytearray(frame.length))

    def payload_came(self, connection: Any, sequence: int) -> None:
        expected = content(1 - self.me, (sequence, 0), len(self.arriving or b""))
        check(self.arriving == expected, f"message {sequence} came with other bytes than were sent")
        self.received.append(sequence)

    def frame_left(self, connection: Any, sequence: int) -> None:
        self._take_back(sequence)

    def broke(self, connection: Any, failure: Failure, reason: str) -> None:
        check(self.world.failed > 0, f"the rail of {self.me} broke: {failure}, {reason}")
        check(failure in (Failure.PATH, Failure.CASCADE), f"{failure}: {reason}")
        connection.close()


class VerbsWorld:
    module = "helixrt.emulate.verbs_world"

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.steps = self.failed = 0
        self.now_s = 0.0
        self.hurries = False
        self.ends = [End(self, me, self.draw_sizes()) for me in range(2)]
        for end in self.ends:
            end.join()
            lengths, counts = self.random.choice(((LENGTHS, (0, 5, 30, 50)), (SHORT_LENGTHS, (5, 60, 150))))
            end.to_send = [self.random.choice(lengths) for _ in range(self.random.choice(counts))]
        self.wrapping = [self.wind(end) for end in self.ends]
        # How often each thing happens, in relation: to begin, write, read at an end; to send, answer at its NIC.
        self.weights = [[self.random.choice((0.03, 0.3, 1.0)) for _ in range(5)] for _ in range(2)]
        self.fails = self.random.random() < 0.15
        self.forgets = self.random.random() < 0.3

    def draw_sizes(self) -> Sizes:
        rng = self.random
        return Sizes(
            chunk_bytes=CHUNK_BYTES,
            slots=rng.choice((1, 2, 3, 8)),
            receives=rng.choice((64, 72)),
            sends=rng.choice((64, 80)),
            bounces=rng.choice((1, 2, 5)),
            bounce_bytes=rng.choice((CHUNK_BYTES, 2 * CHUNK_BYTES)),
            signal_every=rng.choice((1, 4, 16)),
        )

    def wind(self, end: End) -> bool:
        """Counters of what goes from `end` that are about to pass 2^32."""
        if self.random.random() < 0.5:
            return False
        at = (1 << 32) - self.random.randrange(1, 40)
        flow, theirs = end.connection._sends.flow, self.ends[1 - end.me].connection._sends.flow
        flow.said = flow.used = theirs.heard = theirs.told = at
        flow.posted = flow.completed = flow.signalled = at
        return True

    # ---- running

    def run(self) -> Verdict:
        with replayable(self.module, self.seed):
            while steps := self.possible():
                self.steps += 1
                check(self.steps < STEPS, "no end in sight")
                ((_, step),) = self.random.choices(steps, [weight for weight, _ in steps])
                step()
            self.judge()
        return self.verdict()

    def possible(self) -> list[tuple[float, Callable[[], None]]]:
        steps: list[tuple[float, Callable[[], None]]] = []
        for end, (begin, write, read, _, _) in zip(self.ends, self.weights, strict=True):
            if end.connection.closed:
                continue
            if end.to_send:
                steps.append((begin, end.begin))
            if end.writes:
                steps.append((write, end.write))
            if end.pair.readable:
                steps.append((read, end.read))
            if self.forgets and end.sources:
                steps.append((0.02, end.forget))
        steps += self.of_nics()
        if self.fails and steps and not self.failed:
            steps.append((0.01, self.fail))
        return steps

    def of_nics(self) -> list[tuple[float, Callable[[], None]]]:
        steps: list[tuple[float, Callable[[], None]]] = []
        for end, (_, _, _, send, answer) in zip(self.ends, self.weights, strict=True):
            if end.pair.can_send:
                steps.append((send, end.pair.send))
            if end.pair.can_answer:
                steps.append((answer, end.pair.answer))
        return steps

    def nics(self) -> None:
        """While a process polls, NICs go on; and it is as if nothing else did while one waits for its own."""
        while (steps := self.of_nics()) and (self.hurries or self.random.random() < 0.3):
            self.random.choice(steps)[1]()

    def clock(self) -> float:
        """Of the connections. The machine's would have a slow process change what a seed does."""
        self.now_s += LOOK_S
        return self.now_s

    def fail(self) -> None:
        """Both NICs: no message of either reaches the other any more."""
        self.failed += 1
        for end in self.ends:
            if not end.connection.closed:
                end.connection.fail(Failure.PATH, "the cable was cut") if self.random.random() < 0.3 else end.pair.fail()

    # ---- judgement

    def judge(self) -> None:
        for end in self.ends:
            other = self.ends[1 - end.me]
            if self.failed:
                end.connection.close()
            else:
                check(not end.to_send and end.connection.idle, f"{end.me} still waits to write")
                check(not end.sources, f"{end.me} has not got back the memory of {list(end.sources)}")
                check(len(other.received) == end.begun, f"{end.begun} messages of {end.me}, {len(other.received)} came")
                check(other.controls == end.controls_sent, f"{end.controls_sent} frames of {end.me}, {other.controls} came")
                check(end.connection.emptied() or bool(end.pair.can_send), f"{end.me} is not empty")
            check(not end.pair.registrations.ranges, f"{end.me} has kept memory registered")

    def verdict(self) -> Verdict:
        flows = [end.connection._sends.flow for end in self.ends]
        crowded = any(end.pair.most_on_their_way >= end.pair.sizes.receives - 32 for end in self.ends)
        return Verdict(
            seed=self.seed,
            steps=self.steps,
            delivered=sum(len(end.received) for end in self.ends),
            starved=sum(end.starved for end in self.ends),
            crowded=int(crowded),
            wrapped=sum(flow.said >= 1 << 32 for flow in flows),
            forgotten=sum(end.forgotten for end in self.ends),
            failed=self.failed,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    seeded.main(lambda seed: VerbsWorld(seed).run(), arguments)


if __name__ == "__main__":
    main()
