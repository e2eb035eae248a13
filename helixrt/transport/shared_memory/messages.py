"""Messages through shared memory: moves the bytes that the two halves of a link's end decide about.

In: the caller's memory, frames that came, room in the ring. Out: frames in the ring, bytes in the caller's memory, outcomes.
Which message goes which way is decided by `protocol/shared_memory/messages.py`.

Measured with 8 MiB messages from cold memory, both ways at once, one core per process: read directly 14 GB/s each
way, through the ring 7.5 GB/s (a copy within one process: 19 GB/s). What is to be summed is read directly too, a piece at a
time, and summed while it is in the cache (`intake`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from helixrt.protocol.calls import Agreement
from helixrt.protocol.shared_memory.frames import OFFERS, Frame, Kind, SegmentError
from helixrt.protocol.shared_memory.messages import LIMITS, Inbox, Limits, Name, Offered, Outbox, Way
from helixrt.transport.contract import Buffer, Outcome, Received, Sent
from helixrt.transport.intake import Intake, fill
from helixrt.transport.process_memory import ProcessMemory, address_of
from helixrt.transport.shared_memory.segment import Fence, OwnSegment, PeerSegment, RingWriter, Word

READ_BYTES = 4 << 20  # per system call
_WAIT, _DELIVER, _HOLD, _READ, _PULL = Way.WAIT, Way.DELIVER, Way.HOLD, Way.READ, Way.PULL  # found faster so


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
        agreement: Agreement,
        limits: Limits = LIMITS,
    ) -> None:
        self._agreement = agreement
        self._peer, self._own, self._theirs, self._writer, self._outcome = peer, own, theirs, writer, outcome
        self._box = Outbox(forgotten, writer.largest, limits)
        self._data: dict[Name, Buffer] = {}  # the caller's memory

    @property
    def blocked(self) -> bool:
        """Whether something waits for room in the ring."""
        return self._box.blocked

    def unfinished(self) -> Name | None:
        """A message that only the peer can finish."""
        return next(iter(self._box.offered), None)

    def unfinished_names(self) -> Iterable[Name]:
        """All of them."""
        return self._box.offered

    def send(self, op: int, index: int, data: Buffer) -> None:
        if op != self._agreement.latest and (differs := self._agreement.begin(op)):
            raise SegmentError(differs)
        box, name = self._box, (op, index)
        frame = box.send(name, len(data), self._freed)
        if frame.ticket:
            self._own.offers[frame.ticket % OFFERS] = frame.ticket
            frame = frame._replace(where=address_of(data))
        if box.waiting or not self._try(frame, data):
            self._data[name] = data
            box.waiting.append(frame)
        elif frame.kind == Kind.OFFER:
            self._data[name] = data

    def _freed(self) -> int:
        return self._theirs.load(Word.EAGER_FREED)

    def forget(self, op: int) -> None:
        for offered in self._box.forget(op):
            self._withdraw(offered)
        for name in [name for name in self._data if name[0] == op]:
            del self._data[name]

    def put(self, frame: Frame) -> None:
        """A frame without payload: in the ring now, or as soon as there is room."""
        if self._box.waiting or not self._try(frame, None):
            self._box.waiting.append(frame)

    def give(self, limit: int, publish: Callable[[], None]) -> int:
        """Frames that waited, then pieces of what the peer asked for; about how many bytes."""
        given, box = 0, self._box
        while box.waiting:
            frame = box.waiting[0]
            name = (frame.op, frame.index)
            if not self._try(frame, self._data[name] if frame.kind == Kind.EAGER else None):
                break
            box.waiting.popleft()
            if frame.kind == Kind.EAGER:
                del self._data[name]
            given += frame.size or 1
        while box.asked and not box.waiting and given < limit:
            piece = box.piece()
            place = self._writer.put(piece)
            if place is None:
                break
            name = (piece.op, piece.index)
            place[:] = self._data[name][piece.where : piece.where + piece.size]
            given += piece.size or 1
            publish()
            ended = box.gave(piece)
            if ended is not None:
                self._finish(name, ended)
        return given

    def pulled(self, frame: Frame) -> None:
        self._box.pulled(frame)

    def taken(self, frame: Frame) -> None:
        ended = self._box.taken(frame)
        if ended is not None:
            self._finish((frame.op, frame.index), ended)

    def end(self) -> None:
        """No offer stands any more."""
        for offered in self._box.offered.values():
            self._withdraw(offered)
        self._box.offered.clear()
        self._box.waiting.clear()
        self._box.asked.clear()
        self._data.clear()

    def _try(self, frame: Frame, payload: Buffer | None) -> bool:
        place = self._writer.put(frame)
        if place is None:
            return False
        if frame.kind == Kind.EAGER:
            assert payload is not None
            place[:] = payload
            self._outcome(Sent(self._peer, frame.op, frame.index))
        return True

    def _finish(self, name: Name, offered: Offered) -> None:
        self._withdraw(offered)
        del self._data[name]
        self._outcome(Sent(self._peer, *name))

    def _withdraw(self, offered: Offered) -> None:
        if offered.ticket:
            self._own.offers[offered.slot] = 0


class Receiving:
    """The messages of the peer that are not `Received` yet. `put` answers the peer; `memory` is the peer's, if it may
    be read. `whole` becomes true with each long message; its reader resets it."""

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
        agreement: Agreement,
        limits: Limits = LIMITS,
    ) -> None:
        self._agreement = agreement
        self._peer, self._own, self._theirs, self._memory = peer, own, theirs, memory
        self._fence, self._outcome, self._put = fence, outcome, put
        self._box = Inbox(memory is not None, forgotten, agreement, limits)
        self._into: dict[Name, Buffer | Intake] = {}  # memory that waits for a message, or gets it now
        self._addresses: dict[Name, int] = {}  # of what is read into, unless it is taken in
        self._held: dict[Name, tuple[bytes, float]] = {}  # and when it came (monotonic)
        self._offered_s: dict[Name, float] = {}  # when unrequested messages were offered
        self.whole = False

    @property
    def busy(self) -> bool:
        """Whether `read` has something to do."""
        return bool(self._box.reading)

    def awaited(self) -> Name | None:
        """A message that is still to come."""
        return self._box.awaited()

    def awaited_names(self) -> Iterable[Name]:
        """All of them that have not begun to come."""
        return self._box.posted

    def receive(self, op: int, index: int, into: Buffer | Intake) -> None:
        if op != self._agreement.latest and (differs := self._agreement.begin(op)):
            raise SegmentError(differs)
        name = (op, index)
        way = self._box.receive(name, len(into))
        if way is _DELIVER:
            self._free()
            content, came_s = self._held.pop(name)
            self._deliver(name, content, into, came_s)
            return
        self._into[name] = into
        if way is not _WAIT:
            self._begin(name, way)

    def forget(self, op: int) -> None:
        freed = self._box.forget(op)
        for name in freed:
            del self._held[name]
        if freed:
            self._free()
        for table in (self._into, self._addresses, self._offered_s):
            for name in [name for name in table if name[0] == op]:
                del table[name]

    def end(self) -> None:
        """Let go of the caller's memory."""
        self._box.end()
        for table in (self._into, self._addresses, self._held, self._offered_s):
            table.clear()

    def eager(self, frame: Frame, payload: memoryview) -> None:
        name = (frame.op, frame.index)
        way = self._box.eager(frame)
        if way is _HOLD:
            self._held[name] = bytes(payload), time.monotonic()
            return
        self._free()
        if way is _DELIVER:
            self._deliver(name, payload, self._into.pop(name))

    def offer(self, frame: Frame) -> None:
        name, way = (frame.op, frame.index), self._box.offer(frame)
        if way is _WAIT:
            self._offered_s[name] = time.monotonic()
        self._begin(name, way)

    def piece(self, frame: Frame, payload: memoryview) -> None:
        coming = self._box.piece(frame)
        if coming is None:
            return
        name = (frame.op, frame.index)
        into = self._into[name]
        if isinstance(into, Intake):
            into.put(payload)
        else:
            into[frame.where : coming.done] = payload
        if coming.done == coming.length:
            del self._into[name]
            self._outcome(Received(self._peer, *name, self._offered_s.pop(name, 0.0)))
            self.whole = True

    def read(self, limit: int) -> int:
        """Go on reading offered messages out of the peer's memory, the oldest first; bytes read."""
        total, reading = 0, self._box.reading
        while reading and total < limit and not self.whole:
            name, coming = next(iter(reading.items()))
            assert self._memory is not None
            into, at = self._into[name], coming.done
            try:
                if isinstance(into, Intake):
                    done = self._memory.read(coming.address + at, *into.place())
                    into.came(done)
                else:
                    size = min(coming.length - at, READ_BYTES)
                    done = self._memory.read(coming.address + at, self._addresses[name] + at, size)
            except OSError:  # no memory that can be read so: a device's, or a policy changed
                self._box.unreadable(name)
                self._addresses.pop(name, None)
                self._pull(name)
                total += 1
                continue
            coming.done += done
            total += done
            if coming.done < coming.length:
                continue
            self._addresses.pop(name, None)
            self._fence()
            stands = self._theirs.offers[coming.ticket % OFFERS] == coming.ticket
            if self._box.was_read(name, stands, stands and self._memory.alive()):
                del self._into[name]
                self._put(Frame(Kind.TAKEN, name[1], name[0]))
                self._outcome(Received(self._peer, *name, self._offered_s.pop(name, 0.0)))
                self.whole = True
        return total

    def _begin(self, name: Name, way: Way) -> None:
        if way is _PULL:
            self._pull(name)
        elif way is _READ:
            into = self._into[name]
            if not isinstance(into, Intake):
                self._addresses[name] = address_of(into)

    def _pull(self, name: Name) -> None:
        into = self._into[name]
        if isinstance(into, Intake):
            into.restart()
        self._put(Frame(Kind.PULL, name[1], name[0]))

    def _deliver(self, name: Name, content: bytes | memoryview, into: Buffer | Intake, came_s: float = 0.0) -> None:
        fill(into, content)
        self._outcome(Received(self._peer, *name, came_s))

    def _free(self) -> None:
        """The peer may use the memory of short messages again that are held no more."""
        self._own.store(Word.EAGER_FREED, self._box.freed)
