"""What both parts of a link write with: frames on rails, with the acknowledgements they carry.

In: what to say. Out: `SendFrame` and `SendData`, and `ACK` frames: at once where the sender waits for one,
else along with other traffic or a little later.
"""

from __future__ import annotations

import math

from helixrt.protocol.calls import Agreement
from helixrt.protocol.link.frames import EAGER, Counters, Frame, Kind, counters_body, eager_charge
from helixrt.protocol.link.messages import Action, Failure, SendData, SendFrame
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.rails import Flight, Rail
from helixrt.protocol.link.receive import Inbox
from helixrt.protocol.link.send import Outbox

OWED = 32  # frames that may wait for an acknowledgement at the most


class Broken(Exception):
    """The link cannot go on; raised and caught inside the machine."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure, self.reason = failure, reason


class Wire:
    def __init__(self, generation: int, rails: int, options: LinkOptions, begun: dict[int, int] | None = None) -> None:
        self.generation, self.options = generation, options
        self.rails = [Rail(number) for number in range(rails)]
        agreement = self.agreement = Agreement(begun)
        self.inbox = Inbox(options, agreement)
        self.outbox = Outbox(options, self.rails, agreement)
        self.owed = 0  # sequenced frames received since the last acknowledgement
        self.told = 0  # of `inbox.consumed`
        self.prompt: Rail | None = None  # an acknowledgement is due now, on this rail if it can be
        self.acknowledge_at = math.inf

    def give(self, flight: Flight, rail: Rail, now: float, out: list[Action]) -> None:
        """Send a frame that has a sequence number, for the first time or again."""
        self.outbox.place(flight, rail, now)
        rail.spoke(now)
        kind, message, floor = flight.kind, flight.message, self.inbox.ledger.floor
        if kind is Kind.DATA:
            assert message is not None
            flags = EAGER if message.eager else 0
            length = message.length
            frame = Frame(kind, self.generation, flight.sequence, message.op, message.index, length, floor, flags)
            out.append(SendData(rail.number, frame))
        else:
            op = index = 0
            body = b""
            if kind is Kind.SWITCH:
                op, index = rail.incarnation, rail.number
            elif kind is not Kind.SKIP:
                body = flight.body
            elif message is not None and message.eager:
                index = eager_charge(message.length)
            frame = Frame(kind, self.generation, flight.sequence, op, index, len(body), floor, 0, body)
            out.append(SendFrame(rail.number, frame))
        self._acknowledged()

    def say(
        self,
        rail: Rail,
        now: float,
        out: list[Action],
        kind: Kind,
        *,
        op: int = 0,
        index: int = 0,
        flags: int = 0,
        body: bytes = b"",
    ) -> None:
        """Send a frame that needs no sequence number."""
        rail.spoke(now)
        floor = self.inbox.ledger.floor
        out.append(SendFrame(rail.number, Frame(kind, self.generation, 0, op, index, len(body), floor, flags, body)))
        self._acknowledged()

    def talker(self, rail: Rail | None = None) -> Rail | None:
        """A rail for what needs no sequence number: `rail` if it is up, else the best that is."""
        if rail is not None and rail.up:
            return rail
        up = [rail for rail in self.rails if rail.up]
        return next((rail for rail in up if rail.usable), up[0] if up else None)

    def counters(self) -> bytes:
        inbox = self.inbox
        return counters_body(Counters(inbox.ledger.floor, inbox.consumed, inbox.ledger.ranges()))

    def must_acknowledge(self, now: float) -> bool:
        """Whether an acknowledgement is due. If it is due later, its time is set."""
        lag = self.inbox.consumed - self.told
        if self.prompt is not None or self.owed >= OWED or lag * 2 >= self.options.eager_memory_bytes:
            return True
        if self.acknowledge_at == math.inf and (self.owed or lag):
            self.acknowledge_at = now + self.options.acknowledge_s
        return False

    def acknowledge(self, now: float, out: list[Action]) -> None:
        """Send an acknowledgement if it is due; else set the time for it."""
        if not self.must_acknowledge(now):
            return
        rail = self.talker(self.prompt)
        self.prompt, self.acknowledge_at = None, math.inf
        if rail is None:
            return  # the handshake with the next rail contains it
        self.say(rail, now, out, Kind.ACK, body=self.counters())
        self.owed, self.told = 0, self.inbox.consumed

    def _acknowledged(self) -> None:
        """The header just made acknowledges all that was received, unless there is a gap."""
        if self.owed and not self.inbox.ledger.above:
            self.owed, self.prompt = 0, None
            if self.inbox.consumed == self.told:
                self.acknowledge_at = math.inf
