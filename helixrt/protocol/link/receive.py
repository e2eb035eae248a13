"""The receiving half of a link: where payloads land, what is held, what was received.

In: names the caller posted, headers and whole payloads in any order and number. Out: `Accept` for every
header, `Received` once per message. Credits it owes the peer are returned to the link, which sends them.

A message is handed on only when it is whole. When a second copy begins while the first is under way (its
rail is slow, or dead without our knowing) the newer one wins, after the older one has let go of the memory.
"""

from __future__ import annotations

from helixrt.protocol.calls import Agreement
from helixrt.protocol.link.frames import EAGER, Frame, FrameError, Name, eager_charge
from helixrt.protocol.link.ledger import Ledger
from helixrt.protocol.link.messages import Accept, Action, Deliver, Discard, Free, Landing, Received
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.rails import Arrival, Rail

MAX_WANTED = 1 << 16  # messages of the peer that wait for their receiver
MAX_AHEAD = 1 << 12  # how far a sequence number may be beyond the first one missing


class Inbox:
    def __init__(self, options: LinkOptions, agreement: Agreement) -> None:
        self.options, self.agreement = options, agreement
        self.ledger = Ledger()
        self.posted: dict[tuple[int, int], int] = {}  # name -> length
        self.held: dict[tuple[int, int], int] = {}
        self.held_bytes = 0  # charged
        self.consumed = 0  # eager memory given back since the link began
        self.wanted: dict[tuple[int, int], int] = {}
        self.answered: set[tuple[int, int]] = set()  # wanted, posted and therefore credited, and not come yet
        self.arriving: dict[tuple[int, int], Rail] = {}  # whose newest copy is under way, and where
        self.forgotten: set[int] = set()  # operations
        self.abandoned: set[tuple[int, int]] = set()  # messages whose deadline passed
        self.duplicates = 0

    # ---- the caller

    def post(self, op: int, index: int, length: int, out: list[Action]) -> Name | None:
        """The caller's memory for a message is there; the credit that the peer should get for it, if it waits for one."""
        if op != self.agreement.latest and (differs := self.agreement.begin(op)):
            raise FrameError(differs)
        name = (op, index)
        held = self.held.get(name)
        if held is not None:
            _agree(name, held, length)
            del self.held[name]
            charge = eager_charge(length)
            self.held_bytes -= charge
            self.consumed += charge
            out.append(Deliver(op, index))
            out.append(Received(op, index))
            return None
        if name in self.posted or op in self.forgotten:
            raise ValueError(f"message ({op}, {index}) was posted before, or its operation is over")
        self.posted[name] = length
        wanted = self.wanted.pop(name, None)
        if wanted is not None:
            _agree(name, wanted, length)
            self.answered.add(name)
        elif length <= self.options.eager_bytes:
            return None  # comes by itself, or as a WANT
        return Name(op, index, length)

    def forget(self, op: int, out: list[Action]) -> None:
        self.forgotten.add(op)
        for table in (self.posted, self.wanted):
            for name in [name for name in table if name[0] == op]:
                del table[name]
        self.answered = {name for name in self.answered if name[0] != op}
        for name in [name for name in self.held if name[0] == op]:
            charge = eager_charge(self.held.pop(name))
            self.held_bytes -= charge
            self.consumed += charge
            out.append(Free(*name))
        for name, rail in self.arriving.items():
            if name[0] == op:
                self._let_go(rail, out)

    def abandon(self, name: tuple[int, int], out: list[Action]) -> bool:
        """Give up on a posted message; False if it is not waited for."""
        if self.posted.pop(name, None) is None:
            return False
        self.abandoned.add(name)
        self.answered.discard(name)
        if name in self.arriving:
            self._let_go(self.arriving[name], out)
        return True

    # ---- the peer

    def want(self, names: list[Name]) -> list[Name]:
        """Short messages wait at the peer, which announces each of them once; the credits for those that are posted."""
        credits = []
        for name in names:
            key = (name.op, name.index)
            if key in self.wanted or key in self.answered:
                raise FrameError(f"message {key} was wanted before")
            posted = self.posted.get(key)
            if posted is not None:
                _agree(key, name.length, posted)
                self.answered.add(key)
                credits.append(name)
            elif name.op not in self.forgotten and key not in self.abandoned:
                if differs := self.agreement.unexpected(name.op):
                    raise FrameError(differs)
                if len(self.wanted) >= MAX_WANTED:
                    raise FrameError(f"more than {MAX_WANTED} messages wait for their receiver")
                self.wanted[key] = name.length
        return credits

    def announce(self, rail: Rail, frame: Frame, current: bool, out: list[Action]) -> None:
        """The header of a DATA frame came on `rail`; not `current`: of an older generation or connection."""
        assert rail.arrival is None, f"a header on rail {rail.number} before the payload of the last one"
        name = (frame.op, frame.index)
        landing, counts = Landing.DROP, False
        if not current:
            pass
        elif self.options.fault_tolerance and frame.sequence in self.ledger:
            self.duplicates += 1
        else:
            self._check_ahead(frame.sequence)
            other = self.arriving.get(name)
            if other is not None:
                assert other.arrival is not None
                if other.arrival.frame.sequence != frame.sequence:
                    raise FrameError(f"message {name} has two sequence numbers")
                self._let_go(other, out)
                other.arrival.counts = False
                self.duplicates += 1
            landing, counts = self._landing(name, frame), True
            self.arriving[name] = rail
        rail.arrival = Arrival(frame, landing, counts)
        out.append(Accept(rail.number, frame.sequence, frame.op, frame.index, landing))

    def take(self, sequence: int) -> bool:
        """Enter a frame that is not DATA; False if it has come before."""
        self._check_ahead(sequence)
        if self.ledger.take(sequence):
            return True
        self.duplicates += 1
        return False

    def whole(self, rail: Rail, sequence: int, out: list[Action]) -> Frame | None:
        """The payload under way on `rail` is complete; its frame if it counts."""
        arrival = rail.arrival
        assert arrival is not None and arrival.frame.sequence == sequence, f"no payload {sequence} on rail {rail.number}"
        rail.arrival = None
        if not arrival.counts:
            return None
        frame = arrival.frame
        name = (frame.op, frame.index)
        del self.arriving[name]
        if self.answered:
            self.answered.discard(name)
        if self.options.fault_tolerance:
            self.ledger.take(sequence)
        landing = arrival.landing
        if landing is Landing.HOLD:
            posted = self.posted.pop(name, None)
            if posted is None:
                self.held[name] = frame.length
                self.held_bytes += eager_charge(frame.length)
                return frame
            _agree(name, frame.length, posted)
            out.append(Deliver(frame.op, frame.index))
            out.append(Received(frame.op, frame.index))
        elif landing is Landing.PLACE:
            del self.posted[name]
            out.append(Received(frame.op, frame.index))
        if frame.flags & EAGER:
            self.consumed += eager_charge(frame.length)
        return frame

    def cut(self, rail: Rail) -> None:
        """`rail` is gone: so is the payload that was under way on it."""
        if rail.arrival is not None and rail.arrival.counts:
            del self.arriving[rail.arrival.frame.op, rail.arrival.frame.index]
        rail.arrival = None

    # ---- decisions

    def _check_ahead(self, sequence: int) -> None:
        """What is beyond the first missing one has to be remembered, whatever its kind."""
        if sequence > self.ledger.floor + MAX_AHEAD and self.options.fault_tolerance:
            raise FrameError(f"sequence {sequence}: {self.ledger.floor + MAX_AHEAD} is the most that may come now")

    def _landing(self, name: tuple[int, int], frame: Frame) -> Landing:
        posted = self.posted.get(name)
        if posted is not None:
            _agree(name, frame.length, posted)
            return Landing.PLACE
        if name[0] in self.forgotten or name in self.abandoned:
            return Landing.DROP
        if differs := self.agreement.unexpected(frame.op):
            raise FrameError(differs)
        if not frame.flags & EAGER or frame.length > self.options.eager_bytes:
            raise FrameError(f"message {name} of {frame.length} bytes came without credit: no receive was posted for it")
        if name in self.held:
            raise FrameError(f"message {name} came twice under different sequence numbers")
        if self.held_bytes + eager_charge(frame.length) > self.options.eager_memory_bytes:
            raise FrameError(
                f"message {name} of {frame.length} bytes: eager memory of {self.options.eager_memory_bytes} is full"
            )
        return Landing.HOLD

    def _let_go(self, rail: Rail, out: list[Action]) -> None:
        assert rail.arrival is not None
        if rail.arrival.landing is not Landing.DROP:
            rail.arrival.landing = Landing.DROP
            out.append(Discard(rail.number))


def _agree(name: tuple[int, int], theirs: int, ours: int) -> None:
    if theirs != ours:
        raise FrameError(f"message {name} has {theirs} bytes at the peer and {ours} here")
