"""A simulated NIC: queue pairs in memory, whose work requests are sent, answered and completed in a seeded order.

In: what production's `VerbsConnection` and its send queue post. Out: completions, and the other end's memory. `Wrong` when a
promise of the flow control is broken: a message comes and no receive is posted, a slot is written that was not used yet, a
queue overflows, or memory is changed that the NIC may still read.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

from helixrt.emulate.seeded import check
from helixrt.protocol.verbs.flow import CHAIN
from helixrt.transport.verbs.queue_pair import RECEIVE_BIT, Request, Sizes
from helixrt.transport.verbs.wire import RECEIVE_BYTES, Attributes

FLUSHED, UNANSWERED = 5, 12
ENUMS = SimpleNamespace(
    WR_SEND=2,
    WR_RDMA_WRITE_WITH_IMM=1,
    SEND_SIGNALED=2,
    WC_SUCCESS=0,
    WC_RECV=128,
    WC_RECV_RDMA_WITH_IMM=129,
    statuses={FLUSHED: "WR_FLUSH_ERR", UNANSWERED: "RETRY_EXC_ERR"},
)
NIC = SimpleNamespace(library=SimpleNamespace(enums=ENUMS, Error=OSError))
_SHIFT = 32  # an address is the number of a memory, and an offset


@dataclass(slots=True)
class Completion:
    wr_id: int
    status: int = ENUMS.WC_SUCCESS
    opcode: int = 0
    byte_len: int = 0
    imm_data: int = 0


class Registered:
    """A range that a NIC may read."""

    key = 7

    def __init__(self, number: int, view: memoryview) -> None:
        self.number, self.view = number, view


class SimulatedRegistrations:
    """Gives addresses to the caller's memory; `ranges` are those that were not released."""

    def __init__(self) -> None:
        self.ranges: dict[int, Registered] = {}
        self._count = 0

    def take(self, view: memoryview) -> tuple[Registered, int]:
        self._count += 1
        made = self.ranges[self._count] = Registered(self._count, view)
        return made, self._count << _SHIFT

    def release(self, memory: Registered) -> None:
        check(self.ranges.pop(memory.number, None) is not None, "a range was released twice")


class SimulatedPair:
    """Stands in for `QueuePair`. `busy` is called at each poll: a NIC works while the process does."""

    events = SimpleNamespace(fileno=lambda: -1)
    nic, key = NIC, 3

    def __init__(self, sizes: Sizes, chance: random.Random) -> None:
        self.sizes = sizes
        self.registrations = SimulatedRegistrations()
        self.other: SimulatedPair = self
        self.readable, self._armed = False, True
        self.failed = self.is_reset = False
        self.posted: deque[Request] = deque()  # and not sent
        self.sent: deque[tuple[Request, bytes]] = deque()  # and not answered; with the bytes that went
        self.queue: deque[Completion] = deque()
        self.receives: deque[int] = deque(range(sizes.receives))
        self.most_on_their_way = 0  # messages that came and were not used
        self._chance = chance
        self._filled: set[int] = set()  # slots that were not used yet
        self._sends = memoryview(bytearray(sizes.sends * RECEIVE_BYTES))
        self._bounces = memoryview(bytearray(sizes.bounces * sizes.bounce_bytes))
        self._received = memoryview(bytearray(sizes.receives * RECEIVE_BYTES))
        self._ring = memoryview(bytearray(sizes.slots * sizes.chunk_bytes))

    def busy(self) -> None:
        """The world's."""

    def attributes(self) -> Attributes:
        sizes = self.sizes
        return Attributes(1, 0, bytes(16), 0, 3, 0, 9, sizes.slots, sizes.receives, sizes.chunk_bytes)

    # ---- what a connection calls

    def slot(self, number: int) -> memoryview:
        self._filled.discard(number)
        return self._ring[number * self.sizes.chunk_bytes :][: self.sizes.chunk_bytes]

    def received(self, index: int) -> memoryview:
        return self._received[index * RECEIVE_BYTES :][:RECEIVE_BYTES]

    def sending(self, number: int) -> tuple[memoryview, int]:
        begin = number % self.sizes.sends * RECEIVE_BYTES
        return self._sends[begin : begin + RECEIVE_BYTES], -1 - begin

    def bounce(self, number: int) -> tuple[memoryview, int]:
        begin = number % self.sizes.bounces * self.sizes.bounce_bytes
        return self._bounces[begin : begin + self.sizes.bounce_bytes], -1 - len(self._sends) - begin

    def post(self, requests: list[Request]) -> None:
        check(len(requests) <= CHAIN, f"{len(requests)} work requests with one call")
        self.posted += requests
        check(len(self.posted) + len(self.sent) <= self.sizes.sends, "the send queue overflows")

    def post_receives(self, first: int) -> None:
        self.receives += range(first, first + CHAIN)
        check(len(self.receives) <= self.sizes.receives, "the receive queue overflows")

    def poll(self) -> list[Completion]:
        self.busy()
        count = min(len(self.queue), self._chance.randint(1, 8))
        return [self.queue.popleft() for _ in range(count)]

    def take_event(self) -> None:
        check(self.readable, "an event was taken that had not come")
        self.readable, self._armed = False, True

    def disarm(self) -> None:
        self.is_reset = True

    # ---- what the NIC does

    @property
    def can_send(self) -> bool:
        return bool(self.posted) and not self.failed and not self.is_reset and not self.other.is_reset

    @property
    def can_answer(self) -> bool:
        return bool(self.sent) and not self.failed and not self.is_reset

    def send(self) -> None:
        """The oldest work request reaches the other end."""
        request, other = self.posted.popleft(), self.other
        content = bytes(self._memory(request))
        self.sent.append((request, content))
        check(bool(other.receives), f"message {request.number} found no receive: its sender had no credit for it")
        index = other.receives.popleft()
        other.most_on_their_way = max(other.most_on_their_way, other.sizes.receives - len(other.receives))
        done = Completion(RECEIVE_BIT | index, byte_len=len(content), imm_data=request.immediate)
        if request.opcode == ENUMS.WR_SEND:
            done.opcode = ENUMS.WC_RECV
            other.received(index)[: len(content)] = content
        else:
            done.opcode = ENUMS.WC_RECV_RDMA_WITH_IMM
            slot, rest = divmod(request.remote_address, other.sizes.chunk_bytes)
            check(not rest and slot not in other._filled, f"slot {slot} was written before its last chunk was used")
            other._filled.add(slot)
            other._ring[request.remote_address :][: len(content)] = content
        other.complete(done)

    def answer(self) -> None:
        """The oldest one that was sent is acknowledged."""
        request, content = self.sent.popleft()
        check(self._memory(request) == content, f"memory of work request {request.number} was changed before it was completed")
        if request.flags & ENUMS.SEND_SIGNALED:
            self.complete(Completion(request.number & 0xFFFFFFFF))

    def complete(self, completion: Completion) -> None:
        if self.is_reset:
            return
        self.queue.append(completion)
        check(len(self.queue) <= self.sizes.sends + self.sizes.receives + CHAIN, "the completion queue overflows")
        if self._armed:
            self.readable, self._armed = True, False

    def fail(self) -> None:
        """No answer comes any more: what is posted fails, and what follows fails with it."""
        self.failed = True
        for number, request in enumerate([*(r for r, _ in self.sent), *self.posted]):
            self.complete(Completion(request.number & 0xFFFFFFFF, UNANSWERED if number == 0 else FLUSHED))
        for index in self.receives:
            self.complete(Completion(RECEIVE_BIT | index, FLUSHED))

    def _memory(self, request: Request) -> memoryview:
        if request.address < 0:
            at = -1 - request.address
            own = self._sends if at < len(self._sends) else self._bounces
            return own[at - (0 if own is self._sends else len(self._sends)) :][: request.length]
        found = self.registrations.ranges.get(request.address >> _SHIFT)
        check(found is not None, f"work request {request.number} reads memory that was released")
        assert found is not None
        return found.view[request.address & (1 << _SHIFT) - 1 :][: request.length]
