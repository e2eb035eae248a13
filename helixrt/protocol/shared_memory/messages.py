"""How messages travel through shared memory: what each half of one end of a link decides. Pure.

In: names and lengths of messages, frames that came, how far a read got. Out: frames to put in the ring, where what comes
goes, which offers are withdrawn. Memory itself is the driver's (`transport/shared_memory/messages.py`).

A short message (at most EAGER_BYTES) is a frame in the ring. Until its receiver is ready it is kept in memory of the receiving
end; the sender lets no more than EAGER_BUDGET bytes of them wait there.

Any other is offered: a small frame with its name, length and address. When its receiver is ready, it reads the bytes
directly from the sender's memory (one copy) and sends TAKEN; or, where that is not permitted, asks for them (PULL) and gets
them through the ring in pieces (two copies).

So no message waits for anything but its own receiver. A sender that takes memory back (`forget`) first takes the offer out
of its segment's table, and a reader looks there once it has read: bytes that may have changed meanwhile are never delivered,
and the receive continues to wait (for BYE, or the end of its operation). The peer's frames are checked: SegmentError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from helixrt.protocol.calls import Agreement
from helixrt.protocol.shared_memory.frames import OFFERS, Frame, Kind, SegmentError, charge

EAGER_BYTES = 64 << 10
EAGER_BUDGET = 4 << 20  # bytes of short messages that may wait for their receivers, per direction
PIECE_BYTES = 128 << 10
OFFERS_WAITING = 1 << 16  # more unanswered offers than any plan makes: the peer is wrong

Name = tuple[int, int]  # (op, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Both ends of a link have the same. In bytes."""

    eager: int = EAGER_BYTES  # of a short message
    budget: int = EAGER_BUDGET
    piece: int = PIECE_BYTES


LIMITS = Limits()


@dataclass(slots=True)
class Offered:
    """A message of ours that waits in the caller's memory."""

    length: int
    ticket: int = 0  # in the table of offers; 0: it is not there, and can only travel through the ring
    done: int = -1  # bytes put in the ring; -1 until it was asked for

    @property
    def slot(self) -> int:
        return self.ticket % OFFERS


class Outbox:
    """The messages of ours that are not sent yet. `forgotten` is shared with the receiving half.

    `waiting` are frames for which the ring had no room; nothing overtakes them.
    """

    def __init__(self, forgotten: set[int], ring_most: int, limits: Limits = LIMITS) -> None:
        """`ring_most`: the longest payload that always finds room in the ring in the end."""
        self.forgotten, self._budget = forgotten, limits.budget
        self.short = min(limits.eager, ring_most)  # the longest message that is sent at once
        self.most = min(limits.piece, ring_most)
        self.offered: dict[Name, Offered] = {}
        self.waiting: deque[Frame] = deque()
        self.asked: deque[Name] = deque()  # offered messages to go through the ring
        self.eager = self.freed = 0  # bytes of short messages sent, and of those the peer has freed
        self._slots, self._tickets = list(range(OFFERS)), 0

    @property
    def blocked(self) -> bool:
        """Whether something waits for room in the ring."""
        return bool(self.waiting or self.asked)

    def peer_freed(self, freed: int) -> None:
        """The peer has reported how many bytes of short messages it has freed."""
        if not self.freed <= freed <= self.eager:
            raise SegmentError(f"{freed} bytes of short messages freed: must be {self.freed} to {self.eager}")
        self.freed = freed

    def send(self, name: Name, length: int, freed: Callable[[], int]) -> Frame:
        """What to put in the ring: the message, or an offer, whose ticket must stand in the table before. `freed` tells what
        the peer says of the short messages it has freed; it is asked when they seem to be too many."""
        op, index = name
        if length <= self.short:
            after = self.eager + charge(length)
            if after - self.freed > self._budget:
                self.peer_freed(freed())
            if after - self.freed <= self._budget:
                self.eager = after
                return Frame(Kind.EAGER, index, op, length, 0, 0, length)
        offered = self.offered[name] = Offered(length)
        if self._slots:
            self._tickets += 1
            offered.ticket = self._tickets * OFFERS + self._slots.pop()
        return Frame(Kind.OFFER, index, op, length, ticket=offered.ticket)

    def pulled(self, frame: Frame) -> None:
        name = (frame.op, frame.index)
        offered = self.offered.get(name)
        if offered is not None and offered.done < 0:
            offered.done = 0
            self.asked.append(name)
        elif frame.op not in self.forgotten:
            raise SegmentError(f"it asks for message {name}, which was not offered")

    def taken(self, frame: Frame) -> Offered | None:
        """The peer has read the message; the offer that ends so, if it stood."""
        name = (frame.op, frame.index)
        offered = self.offered.get(name)
        if offered is not None and offered.done < 0 and offered.ticket:
            return self.end(name)
        if frame.op not in self.forgotten:
            raise SegmentError(f"it has taken message {name}, which was not offered")
        return None

    def piece(self) -> Frame:
        """The next piece of what was asked for first."""
        op, index = name = self.asked[0]
        offered = self.offered[name]
        size = min(offered.length - offered.done, self.most)
        return Frame(Kind.PIECE, index, op, offered.length, offered.done, size=size)

    def gave(self, piece: Frame) -> Offered | None:
        """The piece is in the ring; the offer, if that was its last one."""
        name = (piece.op, piece.index)
        offered = self.offered[name]
        offered.done += piece.size
        if offered.done < offered.length:
            return None
        self.asked.popleft()
        return self.end(name)

    def end(self, name: Name) -> Offered:
        """The offer is over: its place in the table is to be cleared, if it has one, before anything else is offered."""
        offered = self.offered.pop(name)
        if offered.ticket:
            self._slots.append(offered.slot)
        return offered

    def forget(self, op: int) -> list[Offered]:
        """Nothing of `op` is put in the ring any more; the offers that are withdrawn so."""
        withdrawn = [self.end(name) for name in [name for name in self.offered if name[0] == op]]
        keep: deque[Frame] = deque()
        for frame in self.waiting:
            if frame.op != op or frame.kind not in (Kind.EAGER, Kind.OFFER):
                keep.append(frame)
            elif frame.kind == Kind.EAGER:
                self.eager -= charge(frame.size)
        self.waiting = keep
        self.asked = deque(name for name in self.asked if name[0] != op)
        return withdrawn


class Way(Enum):
    """What becomes of a message, or of a frame, that comes."""

    WAIT = "wait"  # nothing has come yet
    DELIVER = "deliver"  # all of it is here: into the memory that waits for it
    HOLD = "hold"  # a copy of it is kept until its receiver is ready
    DROP = "drop"  # it is not needed any more
    READ = "read"  # out of the peer's memory
    PULL = "pull"  # it is to be asked for, and comes through the ring


# An enum's members are found slowly, and one is returned for each message.
_WAIT, _DELIVER, _HOLD, _DROP, _READ, _PULL = Way


@dataclass(slots=True)
class Coming:
    """A message of the peer's that is on its way in."""

    length: int
    done: int = 0  # bytes that have come
    address: int = 0  # its address in the peer's memory
    ticket: int = 0


class Inbox:
    """The messages of the peer that are not received yet. `direct`: the peer's memory may be read."""

    def __init__(self, direct: bool, forgotten: set[int], agreement: Agreement, limits: Limits = LIMITS) -> None:
        self._direct, self._forgotten, self._agreement = direct, forgotten, agreement
        self._short, self._budget = limits.eager, limits.budget
        self.posted: dict[Name, int] = {}  # name -> length
        self.held: dict[Name, int] = {}  # short ones that came before their receiver
        self.offers: dict[Name, Frame] = {}  # long ones whose receiver is not ready
        self.reading: dict[Name, Coming] = {}  # out of the peer's memory
        self.pulling: dict[Name, Coming] = {}  # through the ring
        self.came = self.freed = 0  # bytes of short messages, and of those that are not held any more

    def awaited(self) -> Name | None:
        """A message that is still to come."""
        return next(iter((*self.posted, *self.reading, *self.pulling)), None)

    def receive(self, name: Name, length: int) -> Way:
        """There is memory for a message: WAIT, DELIVER what was held, READ or PULL."""
        assert name not in self.posted and name not in self.reading and name not in self.pulling, name
        held = self.held.pop(name, None)
        if held is not None:
            self._agreed(name, held, length)
            self.freed += charge(held)
            return _DELIVER
        offer = self.offers.pop(name, None)
        if offer is not None:
            return self._begin(name, offer, length)
        self.posted[name] = length
        return _WAIT

    def eager(self, frame: Frame) -> Way:
        """A short message came: DELIVER, HOLD or DROP."""
        name, size = (frame.op, frame.index), frame.size
        if size != frame.length or size > self._short:
            raise SegmentError(f"a short message of {frame.length} bytes in a frame of {size}")
        cost = charge(size)
        self.came += cost
        if self.came - self.freed > self._budget:
            raise SegmentError(f"{self.came - self.freed} bytes of short messages that no receive waits for")
        posted = self.posted.pop(name, None)
        if posted is None and frame.op not in self._forgotten:
            self._new(name)
            self.held[name] = size
            return _HOLD
        self.freed += cost
        if posted is None:
            return _DROP
        self._agreed(name, size, posted)
        return _DELIVER

    def offer(self, frame: Frame) -> Way:
        """A long message waits at the peer: READ, PULL, or it is to WAIT (or to DROP)."""
        name = (frame.op, frame.index)
        if frame.op in self._forgotten:
            return _DROP
        posted = self.posted.pop(name, None)
        if posted is not None:
            return self._begin(name, frame, posted)
        self._new(name)
        if len(self.offers) >= OFFERS_WAITING:
            raise SegmentError(f"more than {OFFERS_WAITING} offers that no receive waits for")
        self.offers[name] = frame
        return _WAIT

    def piece(self, frame: Frame) -> Coming | None:
        """A piece came, for the bytes up to `done`; None: it is not needed. The message is complete if not `pulling`."""
        name = (frame.op, frame.index)
        coming = self.pulling.get(name)
        if coming is None:
            if frame.op in self._forgotten:
                return None
            raise SegmentError(f"a piece of message {name}, which was not requested")
        end, size = coming.done + frame.size, coming.length
        if frame.where != coming.done or end > size or (frame.size == 0) != (size == 0):
            raise SegmentError(
                f"bytes {frame.where} to {frame.where + frame.size} of message {name}: must begin at {coming.done}, "
                f"end at most at {size}"
            )
        coming.done = end
        if end == size:
            del self.pulling[name]
        return coming

    def unreadable(self, name: Name) -> None:
        """The peer's memory cannot be read there: the message is to be asked for."""
        coming = self.reading.pop(name)
        self.pulling[name] = Coming(coming.length)

    def was_read(self, name: Name, stands: bool, alive: bool) -> bool:
        """All of it was read. It counts only if its offer still stands, and the process is still the one that made it;
        else it goes back to the posted ones: its sender may have written there."""
        coming = self.reading.pop(name)
        if stands and alive:
            return True
        self.posted[name] = coming.length
        return False

    def forget(self, op: int) -> list[Name]:
        """Nothing of `op` is wanted any more; the held ones that are free so."""
        freed = [name for name in self.held if name[0] == op]
        for name in freed:
            self.freed += charge(self.held.pop(name))
        tables: tuple[dict[Name, int] | dict[Name, Frame] | dict[Name, Coming], ...]
        tables = (self.posted, self.offers, self.reading, self.pulling)
        for table in tables:
            for name in [name for name in table if name[0] == op]:
                del table[name]
        return freed

    def end(self) -> None:
        for table in (self.posted, self.held, self.offers, self.reading, self.pulling):
            table.clear()

    def _begin(self, name: Name, offer: Frame, length: int) -> Way:
        self._agreed(name, offer.length, length)
        if self._direct and offer.ticket and length:
            self.reading[name] = Coming(length, 0, offer.where, offer.ticket)
            return _READ
        self.pulling[name] = Coming(length)
        return _PULL

    def _new(self, name: Name) -> None:
        if differs := self._agreement.unexpected(name[0]):
            raise SegmentError(differs)
        if name in self.held or name in self.offers or name in self.reading or name in self.pulling:
            raise SegmentError(f"message {name} twice")

    def _agreed(self, name: Name, came: int, posted: int) -> None:
        if came != posted:
            raise SegmentError(f"message {name} has {came} bytes, agreed were {posted}")
