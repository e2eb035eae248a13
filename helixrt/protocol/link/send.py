"""The sending half of a link: what waits for credit, what is ready, what is on the rails.

In: messages the caller submitted, credits and acknowledgements of the peer. Out: the next frame to send,
whenever the link has a rail for one; `Sent` and `Release`.

A long message waits for its receiver; a short one goes at once as long as the peer has eager memory for
it, else it asks for a credit (WANT), as do messages that must not be repeated, whatever their length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from helixrt.errors import Cause
from helixrt.protocol.calls import Agreement
from helixrt.protocol.link.frames import MAX_NAMES, FrameError, Kind, Name, eager_charge, names_body
from helixrt.protocol.link.messages import Action, Detach, Failed, Keep, Release, Sent, Submit
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.rails import Flight, Outgoing, Rail

MAX_CREDITS = 1 << 16  # of messages that this end has not submitted yet
SPREAD = 1 << 10  # newest sequence number less the first unacknowledged: what the receiver must store


class Outbox:
    def __init__(self, options: LinkOptions, rails: Sequence[Rail], agreement: Agreement) -> None:
        self.options, self.rails, self.agreement = options, rails, agreement
        self.messages: dict[tuple[int, int], Outgoing] = {}  # submitted and not done
        self.credits: dict[tuple[int, int], int] = {}  # of messages yet to be submitted: name -> length
        self.ready: deque[Outgoing] = deque()
        self.again: deque[Flight] = deque()  # of failed rails, to be sent on others
        self.control: deque[tuple[Kind, Name]] = deque()
        self.flights: dict[int, Flight] = {}  # unacknowledged, on whatever rail or in `again`
        self.bytes = 0  # of the messages of `flights`
        self.newest = 0  # sequence number
        self.acknowledged = 0  # all up to it
        self.eager_out = 0  # eager memory of the peer that was used, in total
        self.eager_back = 0  # and that it gave back
        self.forgotten: set[int] = set()
        self.resent = 0
        self.room: Callable[[int], bool] | None = None  # whether the chosen path takes a message of this length now

    @property
    def busy(self) -> bool:
        return bool(self.again or self.control or self.ready)

    # ---- the caller

    def submit(self, event: Submit, out: list[Action]) -> None:
        op, index, length = event.op, event.index, event.length
        name = (op, index)
        if name in self.messages or op in self.forgotten:
            raise ValueError(f"message {name} was submitted before, or its operation is over")
        if op != self.agreement.latest and (differs := self.agreement.begin(op)):
            raise FrameError(differs)
        message = self.messages[name] = Outgoing(op, index, length, event.repeatable)
        if length <= self.options.eager_bytes and event.repeatable:
            charge = eager_charge(length)
            if self.eager_out - self.eager_back + charge <= self.options.eager_memory_bytes:
                self.eager_out += charge
                message.eager = True
                if self.options.fault_tolerance and length <= self.options.keep_bytes:
                    message.kept = True
                    out.append(Keep(op, index))
                    out.append(Sent(op, index))
                self.ready.append(message)
                return
        elif length > self.options.eager_bytes:
            credit = self.credits.pop(name, None)
            if credit is not None:
                self._grant(message, credit)
            return
        self.control.append((Kind.WANT, Name(op, index, length)))

    def forget(self, op: int, out: list[Action]) -> None:
        self.forgotten.add(op)
        for name in [name for name in self.credits if name[0] == op]:
            del self.credits[name]
        for message in [message for name, message in self.messages.items() if name[0] == op]:
            self.drop(message, out)

    def drop(self, message: Outgoing, out: list[Action]) -> None:
        """The caller takes the memory back. What has a sequence number is acknowledged or skipped in time."""
        message.forgotten = True
        if message.flight is None:
            del self.messages[message.op, message.index]
            if message.kept:
                out.append(Release(message.op, message.index))
            if message.eager:
                self.eager_out -= eager_charge(message.length)
        elif not message.kept:
            del self.messages[message.op, message.index]
            if message.flight.rail >= 0 and self.rails[message.flight.rail].up:
                out.append(Detach(message.op, message.index))

    def unsettled(self, name: tuple[int, int]) -> Outgoing | None:
        """The message if the caller still waits for its `Sent`."""
        message = self.messages.get(name)
        return None if message is None or message.kept or message.forgotten else message

    def stuck(self) -> Iterator[tuple[int, int]]:
        """Messages that wait for a credit."""
        return (name for name, message in self.messages.items() if not (message.granted or message.eager))

    # ---- the peer

    def credit(self, names: list[Name]) -> None:
        for name in names:
            key = (name.op, name.index)
            message = self.messages.get(key)
            if message is not None:
                if message.granted or message.eager:
                    raise FrameError(f"message {key} was given a credit it does not need")
                self._grant(message, name.length)
            elif name.op not in self.forgotten:
                if differs := self.agreement.unexpected(name.op):
                    raise FrameError(differs)
                if len(self.credits) >= MAX_CREDITS:
                    raise FrameError(f"more than {MAX_CREDITS} credits for messages that were not submitted")
                self.credits[key] = name.length

    def acknowledge(self, floor: int, ranges: Sequence[tuple[int, int]], out: list[Action]) -> None:
        """The peer has all up to `floor`, and `ranges` above."""
        if floor > self.newest or (ranges and ranges[-1][1] > self.newest):
            raise FrameError(f"acknowledgement of {floor} {ranges}: the newest sequence number is {self.newest}")
        for sequence in range(self.acknowledged + 1, floor + 1):
            flight = self.flights.pop(sequence, None)
            if flight is not None:
                self._done(flight, out)
        if floor > self.acknowledged:
            self.acknowledged = floor
        for first, last in ranges:
            for sequence in range(first, last + 1):
                flight = self.flights.pop(sequence, None)
                if flight is not None:
                    self._done(flight, out)

    def handed(self, sequence: int, out: list[Action]) -> None:
        """Without fault tolerance: the frame left its memory, and that is all that is asked."""
        flight = self.flights.pop(sequence, None)
        if flight is not None:
            self._done(flight, out)

    # ---- the rails

    def next(self) -> Flight | None:
        """What to send next, with its sequence number; None if nothing may go now. `place` must follow."""
        while self.again:
            flight = self.again.popleft()
            if flight.sequence not in self.flights:
                continue  # acknowledged meanwhile
            if flight.message is not None and flight.message.forgotten:
                flight.kind = Kind.SKIP
            return flight
        many = len(self.flights)
        if many >= 2 * self.options.window_frames or self.newest - self.acknowledged >= 2 * SPREAD:
            return None
        if self.control:
            kind = self.control[0][0]
            names: list[Name] = []
            while self.control and self.control[0][0] is kind and len(names) < MAX_NAMES:
                names.append(self.control.popleft()[1])
            return self.numbered(kind, names_body(names))
        while self.ready:
            message = self.ready[0]
            if message.forgotten:
                self.ready.popleft()
                continue
            full = many >= self.options.window_frames or self.newest - self.acknowledged >= SPREAD
            if full or (self.bytes and self.bytes + message.length > self.options.window_bytes):
                return None
            if self.room is not None and not self.room(message.length):
                return None
            self.ready.popleft()
            flight = message.flight = self.numbered(Kind.DATA, b"")
            flight.message = message
            self.bytes += message.length
            return flight
        return None

    def numbered(self, kind: Kind, body: bytes) -> Flight:
        self.newest += 1
        flight = Flight(self.newest, kind, body)
        if self.options.fault_tolerance:
            self.flights[self.newest] = flight
        else:  # DATA until it is `handed`; nothing is acknowledged
            self.acknowledged = self.newest
            if kind is Kind.DATA:
                self.flights[self.newest] = flight
        return flight

    def place(self, flight: Flight, rail: Rail, now: float) -> None:
        """`flight` goes on `rail`."""
        flight.rail, flight.at_s = rail.number, now
        if flight.sequence in self.flights:
            rail.flights[flight.sequence] = flight
            rail.bytes += flight.bytes

    def resolve(self, rail: Rail, why: Cause, out: list[Action]) -> None:
        """The peer will take nothing more of what `rail` carried before it failed, and has acknowledged what it took."""
        flights, rail.flights, rail.bytes = rail.flights, {}, 0
        for flight in flights.values():
            flight.rail = -1
            message = flight.message
            if flight.kind is Kind.SWITCH:
                flight.kind = Kind.SKIP
            elif message is not None and not message.forgotten:
                if message.repeatable:
                    self.resent += 1
                else:
                    message.forgotten = True
                    del self.messages[message.op, message.index]
                    out.append(Failed(message.op, message.index, True, why))
            self.again.append(flight)

    # ---- inside

    def _grant(self, message: Outgoing, length: int) -> None:
        if message.length != length:
            raise FrameError(
                f"message ({message.op}, {message.index}) has {message.length} bytes here and {length} at the peer"
            )
        message.granted = True
        self.ready.append(message)

    def _done(self, flight: Flight, out: list[Action]) -> None:
        message = flight.message
        if flight.rail >= 0:
            rail = self.rails[flight.rail]
            del rail.flights[flight.sequence]
            rail.bytes -= flight.bytes
            if self.room is not None and flight.bytes > self.options.eager_bytes:
                rail.delivered += flight.bytes
                rail.delivered_messages += 1
                rail.begun_s = min(rail.begun_s, flight.at_s)
        if message is None:
            return
        message.flight = flight.message = None  # no work for the garbage collector
        self.bytes -= message.length
        if message.kept:
            del self.messages[message.op, message.index]
            out.append(Release(message.op, message.index))
        elif not message.forgotten:
            del self.messages[message.op, message.index]
            out.append(Sent(message.op, message.index))
