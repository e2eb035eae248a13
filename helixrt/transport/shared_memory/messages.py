"""How messages travel through shared memory: the sending and the receiving half of one end of a link.

A short message (at most EAGER_BYTES) is a frame in the ring. Until its receiver is ready it lies in memory of the
receiving end; the sender lets no more than EAGER_BUDGET bytes of them wait there.

Any other is offered: a small frame with its name, length and address. When its receiver is ready, it reads the bytes
straight out of the sender's memory (one copy, `process_memory`) and says TAKEN; or, where that is
not permitted, asks for them (PULL) and gets them through the ring in pieces (two copies).

Measured with 8 MiB messages from cold memory, both ways at once, one core per process: read directly 14 GB/s each
way, through the ring 7.5 GB/s (a copy within one process: 19 GB/s). What is to be summed is read directly too, a piece at a
time, and summed while it is in the cache (`intake`).

So no message waits for anything but its own receiver. A sender that takes memory back (`forget`) first takes the
offer out of its segment's table, and a reader looks there once it has read: bytes that may have changed
meanwhile are never delivered. What the peer says is checked: SegmentError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from helixrt.transport.contract import Buffer, Outcome, Received, Sent
from helixrt.transport.intake import Intake, fill
from helixrt.transport.process_memory import ProcessMemory, address_of
from helixrt.transport.shared_memory.segment import (
    OFFERS,
    Fence,
    Frame,
    Kind,
    OwnSegment,
    PeerSegment,
    RingWriter,
    SegmentError,
    Word,
    charge,
)

EAGER_BYTES = 64 << 10
EAGER_BUDGET = 4 << 20  # bytes of short messages that may wait for their receivers, per direction
PIECE_BYTES = 128 << 10
READ_BYTES = 4 << 20  # per system call
OFFERS_WAITING = 1 << 16  # more unanswered offers than any plan makes: the peer is wrong

Name = tuple[int, int]  # (op, index)


@dataclass(slots=True)
class _Offered:
    """A message of ours that waits in the caller's memory."""

    data: Buffer
    ticket: int = 0  # in the table of offers; 0: it is not there, and can only travel through the ring
    done: int = -1  # bytes put in the ring; -1 until it was asked for


class Sending:
    """The messages of ours that are not `Sent` yet. `forgotten` is shared with the receiving half."""

    def __init__(
        self,
        peer: int,
        own: OwnSegment,
        theirs: PeerSegment,
        writer: RingWriter,
        outcome: Callable[[Outcome], None],
        forgotten: set[int],
    ) -> None:
        self._peer, self._own, self._theirs, self._writer, self._outcome = peer, own, theirs, writer, outcome
        self._forgotten = forgotten
        self._offered: dict[Name, _Offered] = {}
        self._waiting: deque[tuple[Frame, Buffer | None]] = deque()  # frames for which the ring had no room
        self._asked: deque[Name] = deque()  # offered messages to go through the ring
        self._eager, self._freed = 0, 0  # bytes of short messages sent, and of those the peer has freed
        self._slots, self._tickets = list(range(OFFERS)), 0

    @property
    def blocked(self) -> bool:
        """Whether something waits for room in the ring."""
        return bool(self._waiting or self._asked)

    def unfinished(self) -> Name | None:
        """A message that only the peer can finish."""
        return next(iter(self._offered), None)

    def send(self, op: int, index: int, data: Buffer) -> None:
        size = len(data)
        if size <= EAGER_BYTES and self._may_hold(charge(size)):
            self._eager += charge(size)
            self.put(Frame(Kind.EAGER, index, op, size, size=size), data)
            return
        offered = self._offered[op, index] = _Offered(data)
        address = 0
        if self._slots:
            self._tickets += 1
            slot = self._slots.pop()
            offered.ticket = self._tickets * OFFERS + slot
            self._own.offers[slot] = offered.ticket
            address = address_of(data)
        self.put(Frame(Kind.OFFER, index, op, size, address, offered.ticket))

    def forget(self, op: int) -> None:
        for name in [n for n in self._offered if n[0] == op]:
            self._withdraw(self._offered.pop(name))
        keep: deque[tuple[Frame, Buffer | None]] = deque()
        for frame, payload in self._waiting:
            if frame.op != op or frame.kind not in (Kind.EAGER, Kind.OFFER):
                keep.append((frame, payload))
            elif frame.kind == Kind.EAGER:
                self._eager -= charge(frame.size)
        self._waiting = keep
        self._asked = deque(name for name in self._asked if name[0] != op)

    def put(self, frame: Frame, payload: Buffer | None = None) -> None:
        """In the ring now, or as soon as there is room."""
        if self._waiting or not self._try(frame, payload):
            self._waiting.append((frame, payload))

    def give(self, limit: int, publish: Callable[[], None]) -> int:
        """Frames that waited, then pieces of what the peer asked for; about how many bytes."""
        given = 0
        while self._waiting and self._try(*self._waiting[0]):
            given += self._waiting.popleft()[0].size or 1
        while self._asked and not self._waiting and given < limit:
            name = self._asked[0]
            offered = self._offered[name]
            size = min(len(offered.data) - offered.done, PIECE_BYTES, self._writer.largest)
            place = self._writer.put(Frame(Kind.PIECE, name[1], name[0], len(offered.data), offered.done, size=size))
            if place is None:
                break
            place[:] = offered.data[offered.done : offered.done + size]
            offered.done += size
            given += size or 1
            publish()
            if offered.done == len(offered.data):
                self._asked.popleft()
                self._finish(name)
        return given

    def pulled(self, frame: Frame) -> None:
        name = (frame.op, frame.index)
        offered = self._offered.get(name)
        if offered is not None and offered.done < 0:
            offered.done = 0
            self._asked.append(name)
        elif frame.op not in self._forgotten:
            raise SegmentError(f"it asks for message {name}, which was not offered")

    def taken(self, frame: Frame) -> None:
        name = (frame.op, frame.index)
        offered = self._offered.get(name)
        if offered is not None and offered.done < 0 and offered.ticket:
            self._finish(name)
        elif frame.op not in self._forgotten:
            raise SegmentError(f"it has taken message {name}, which was not offered")

    def end(self) -> None:
        """No offer stands any more."""
        for offered in self._offered.values():
            self._withdraw(offered)
        self._offered.clear()
        self._waiting.clear()
        self._asked.clear()

    def _may_hold(self, more: int) -> bool:
        """Whether the peer has memory for that many bytes of short messages."""
        if self._eager + more - self._freed > EAGER_BUDGET:
            freed = self._theirs.load(Word.EAGER_FREED)
            if not self._freed <= freed <= self._eager:
                raise SegmentError(f"{freed} bytes of short messages freed: must be {self._freed} to {self._eager}")
            self._freed = freed
        return self._eager + more - self._freed <= EAGER_BUDGET

    def _try(self, frame: Frame, payload: Buffer | None) -> bool:
        place = self._writer.put(frame)
        if place is None:
            return False
        if payload is not None:
            place[:] = payload
        if frame.kind == Kind.EAGER:
            self._outcome(Sent(self._peer, frame.op, frame.index))
        return True

    def _finish(self, name: Name) -> None:
        self._withdraw(self._offered.pop(name))
        self._outcome(Sent(self._peer, *name))

    def _withdraw(self, offered: _Offered) -> None:
        if offered.ticket:
            slot = offered.ticket % OFFERS
            self._own.offers[slot] = 0
            self._slots.append(slot)


@dataclass(slots=True)
class _Incoming:
    """A message of the peer's that is on its way into `into`."""

    into: Buffer | Intake
    done: int = 0
    address: int = 0  # where it lies in the peer's memory,
    own_address: int = 0  # and where in ours, unless it is taken in
    ticket: int = 0


class Receiving:
    """The messages of the peer that are not `Received` yet. `put` answers the peer; `memory` is the peer's, if it may
    be read. `whole` becomes true with each long message; whoever reads it sets it back."""

    def __init__(
        self,
        peer: int,
        own: OwnSegment,
        theirs: PeerSegment,
        memory: ProcessMemory | None,
        fence: Fence,
        outcome: Callable[[Outcome], None],
        put: Callable[[Frame], None],
        forgotten: set[int],
    ) -> None:
        self._peer, self._own, self._theirs, self._memory = peer, own, theirs, memory
        self._fence, self._outcome, self._put, self._forgotten = fence, outcome, put, forgotten
        self._posted: dict[Name, Buffer | Intake] = {}
        self._held: dict[Name, bytes] = {}  # short ones that came before their receiver
        self._offers: dict[Name, Frame] = {}  # long ones whose receiver is not ready
        self._reading: dict[Name, _Incoming] = {}  # out of the peer's memory
        self._pulling: dict[Name, _Incoming] = {}  # through the ring
        self._came, self._freed = 0, 0  # bytes of short messages, and of those that are not held any more
        self.whole = False

    @property
    def busy(self) -> bool:
        """Whether `read` has something to do."""
        return bool(self._reading)

    def awaited(self) -> Name | None:
        """A message that is still to come."""
        return next(iter((*self._posted, *self._reading, *self._pulling)), None)

    def receive(self, op: int, index: int, into: Buffer | Intake) -> None:
        name = (op, index)
        assert name not in self._posted and name not in self._reading and name not in self._pulling, name
        held = self._held.pop(name, None)
        if held is not None:
            self._free(len(held))
            self._deliver(name, held, into)
        elif (offer := self._offers.pop(name, None)) is not None:
            self._begin(name, offer, into)
        else:
            self._posted[name] = into

    def forget(self, op: int) -> None:
        for name in [n for n in self._held if n[0] == op]:
            self._free(len(self._held.pop(name)))
        for posted in (self._posted, self._offers, self._reading, self._pulling):
            for name in [n for n in posted if n[0] == op]:
                del posted[name]

    def end(self) -> None:
        """Let go of the caller's memory."""
        for kept in (self._posted, self._held, self._offers, self._reading, self._pulling):
            kept.clear()

    def eager(self, frame: Frame, payload: memoryview) -> None:
        name, size = (frame.op, frame.index), frame.size
        if size != frame.length or size > EAGER_BYTES:
            raise SegmentError(f"a short message of {frame.length} bytes in a frame of {size}")
        self._came += charge(size)
        if self._came - self._freed > EAGER_BUDGET:
            raise SegmentError(f"{self._came - self._freed} bytes of short messages that nobody waits for")
        into = self._posted.pop(name, None)
        if into is None and frame.op not in self._forgotten:
            self._new(name)
            self._held[name] = bytes(payload)
            return
        self._free(size)
        if into is not None:
            self._deliver(name, payload, into)

    def offer(self, frame: Frame) -> None:
        name = (frame.op, frame.index)
        if frame.op in self._forgotten:
            return
        into = self._posted.pop(name, None)
        if into is not None:
            self._begin(name, frame, into)
            return
        self._new(name)
        if len(self._offers) >= OFFERS_WAITING:
            raise SegmentError(f"more than {OFFERS_WAITING} offers that nobody waits for")
        self._offers[name] = frame

    def piece(self, frame: Frame, payload: memoryview) -> None:
        name = (frame.op, frame.index)
        incoming = self._pulling.get(name)
        if incoming is None:
            if frame.op in self._forgotten:
                return
            raise SegmentError(f"a piece of message {name}, which nobody asked for")
        end, size = incoming.done + frame.size, len(incoming.into)
        if frame.where != incoming.done or end > size or (frame.size == 0) != (size == 0):
            raise SegmentError(
                f"bytes {frame.where} to {frame.where + frame.size} of message {name}: must begin at {incoming.done}, "
                f"end at most at {size}"
            )
        if isinstance(incoming.into, Intake):
            incoming.into.put(payload)
        else:
            incoming.into[incoming.done : end] = payload
        incoming.done = end
        if end == size:
            del self._pulling[name]
            self._outcome(Received(self._peer, *name))
            self.whole = True

    def read(self, limit: int) -> int:
        """Go on reading offered messages out of the peer's memory, the oldest first; bytes read."""
        total = 0
        while self._reading and total < limit and not self.whole:
            name, incoming = next(iter(self._reading.items()))
            assert self._memory is not None
            into, at = incoming.into, incoming.done
            try:
                if isinstance(into, Intake):
                    done = self._memory.read(incoming.address + at, *into.place())
                    into.came(done)
                else:
                    size = min(len(into) - at, READ_BYTES)
                    done = self._memory.read(incoming.address + at, incoming.own_address + at, size)
            except OSError:  # no memory that can be read so: a device's, or a policy changed
                del self._reading[name]
                self._pull(name, incoming.into)
                total += 1
                continue
            incoming.done += done
            total += done
            if incoming.done < len(incoming.into):
                continue
            del self._reading[name]
            self._fence()
            stands = self._theirs.offers[incoming.ticket % OFFERS] == incoming.ticket
            if stands and self._memory.alive():
                self._put(Frame(Kind.TAKEN, name[1], name[0]))
                self._outcome(Received(self._peer, *name))
                self.whole = True
            else:  # withdrawn by its sender, which may have written there; or the process ended, and the bytes may be another's
                self._posted[name] = incoming.into
        return total

    def _begin(self, name: Name, offer: Frame, into: Buffer | Intake) -> None:
        self._agreed(name, offer.length, len(into))
        if self._memory is not None and offer.ticket and len(into):
            own_address = 0 if isinstance(into, Intake) else address_of(into)
            self._reading[name] = _Incoming(into, 0, offer.where, own_address, offer.ticket)
        else:
            self._pull(name, into)

    def _pull(self, name: Name, into: Buffer | Intake) -> None:
        if isinstance(into, Intake):
            into.restart()
        self._pulling[name] = _Incoming(into)
        self._put(Frame(Kind.PULL, name[1], name[0]))

    def _deliver(self, name: Name, content: bytes | memoryview, into: Buffer | Intake) -> None:
        self._agreed(name, len(content), len(into))
        fill(into, content)
        self._outcome(Received(self._peer, *name))

    def _free(self, size: int) -> None:
        self._freed += charge(size)
        self._own.store(Word.EAGER_FREED, self._freed)

    def _new(self, name: Name) -> None:
        if name in self._held or name in self._offers or name in self._reading or name in self._pulling:
            raise SegmentError(f"message {name} twice")

    def _agreed(self, name: Name, came: int, posted: int) -> None:
        if came != posted:
            raise SegmentError(f"message {name} has {came} bytes, agreed were {posted}")
