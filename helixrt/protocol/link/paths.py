"""A link whose rails are paths: each new message goes on the path that a policy chooses (`hopping`).

In: rails, and the results of the messages on them. Out: the rail for the next message, PROBE frames to other paths, and
for the flight record `Hopped` and `PathProbed`. A path is a rail: a NIC of its own, or one more connection of the same
NIC, whose local port sends it another way through the network.

- RTTs are taken from messages that are acknowledged at once, those above the eager limit: from when one was handed to
  the rail, or the one before it was acknowledged if that came later, until its own acknowledgement.
- A path is given `depth_bytes` at a time, so that little is lost to one that turns out slow. What a path has it keeps:
  a switch moves new messages only, which costs the receiver's ledger nothing and needs no fence.
- Short messages, credits and acknowledgements go where they wait least.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from helixrt.protocol.hopping import messages as h
from helixrt.protocol.hopping.messages import HoppingOptions
from helixrt.protocol.hopping.policies import policy_of
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import MAX_BODY_BYTES, MORE, Kind
from helixrt.protocol.link.rails import Flight, Rail
from helixrt.protocol.link.wire import Wire

_PADDING = bytes(MAX_BODY_BYTES)


class Paths:
    def __init__(self, wire: Wire, options: HoppingOptions, draw: random.Random) -> None:
        self.wire, self.options, self.rails = wire, options, wire.rails
        self.policy = policy_of(options, len(self.rails), draw)
        self._carriers: Sequence[Rail] = ()
        self._usable = set(range(len(self.rails)))
        self._coming = self._usable  # not connected for the first time yet: not lost either, or the first to come got all
        self._acknowledged_s = [-math.inf] * len(self.rails)
        self._told_s = -math.inf  # when messages in flight were last reported to the policy
        self._from_s = -math.inf  # long messages wait until then
        self._probes: dict[int, tuple[int, int, float]] = {}  # number -> path, its incarnation, when
        self._number = 0
        self._now = -math.inf
        self._started = False

    # ---- which rail

    def attend(self, carriers: Sequence[Rail], now: float, out: list[m.Action]) -> None:
        """Something may be sent over `carriers`."""
        self._now = now
        if carriers is not self._carriers or self._coming:
            self._carriers = carriers
            self._coming = {rail.number for rail in self.rails if rail.fresh and not rail.up}
            usable = {rail.number for rail in carriers} | self._coming
            in_use = self.policy.path  # reported last, so that no other lost path replaces it
            for path in sorted(self._usable - usable, key=lambda path: (path == in_use, path)):
                self._tell(h.PathLost(path), now, out)
            for path in sorted(usable - self._usable):
                self._tell(h.PathBack(path), now, out)
            self._usable = usable
        if not self._started and carriers and self._waits():
            self._started = True
            self._tell(h.Starting(), now, out)

    def room(self, length: int) -> bool:
        """Whether a message may go now."""
        if length <= self.wire.options.eager_bytes:
            return True
        if self.policy.looking or self._now < self._from_s:
            return False
        used = self.rails[self.policy.path].bytes
        return not used or (self.policy.proven and used + length <= self.options.depth_bytes)

    def rail_for(self, flight: Flight, carriers: Sequence[Rail], now: float, out: list[m.Action]) -> Rail:
        """Where `flight` goes, one of `carriers`."""
        rail = self.rails[self.policy.path]
        if not self._long(flight) or rail not in carriers:
            return min(carriers, key=_load)
        self._tell(h.Begun(rail.number), now, out)
        return rail

    def for_acknowledgement(self, rail: Rail) -> Rail:
        """Of what came on `rail`: not behind our own messages to the peer, or they would count in its RTT."""
        return min(self._carriers, key=_load) if rail.bytes and self._carriers else rail

    def _waits(self) -> bool:
        ready = self.wire.outbox.ready
        return bool(ready) and ready[0].length > self.wire.options.eager_bytes

    def _long(self, flight: Flight) -> bool:
        return flight.bytes > self.wire.options.eager_bytes

    # ---- what is measured

    def acknowledged(self, now: float, out: list[m.Action]) -> None:
        """Acknowledgements came in; what they freed is counted at the rails."""
        for rail in self.rails:
            if not rail.delivered:
                continue
            begun_s = max(rail.begun_s, self._acknowledged_s[rail.number])
            length, count = rail.delivered, rail.delivered_messages
            rail.delivered, rail.delivered_messages, rail.begun_s = 0, 0, math.inf
            self._acknowledged_s[rail.number] = now
            for _ in range(count):
                self._tell(h.Ended(rail.number), now, out)
            if rail.number in self._usable:
                self._tell(h.Measured(rail.number, self._equal_sized(now - begun_s, length)), now, out)

    def answered(self, number: int, now: float, out: list[m.Action]) -> None:
        """The peer has the probe `number`."""
        asked = self._probes.pop(number, None)
        if asked is None:
            return
        path, incarnation, at_s = asked
        if self.rails[path].incarnation == incarnation:
            rtt_s = self._equal_sized(now - at_s, self.options.probe_bytes)
            out.append(m.PathProbed(path, rtt_s))
            self._tell(h.Answered(path, rtt_s), now, out)

    def tick(self, now: float, out: list[m.Action]) -> None:
        """Report the age of messages in flight to the policy."""
        if now >= self._from_s:
            self._from_s = -math.inf
        if now >= self.policy.deadline:
            self._tell(h.Tick(), now, out)
        if now < self._pending_due_s():
            return
        self._told_s = now
        for rail in self.rails:
            oldest = self._oldest(rail)
            if oldest is not None:
                age_s = now - self._since(rail, oldest)
                self._tell(h.Pending(rail.number, self._equal_sized(age_s, oldest.bytes)), now, out)

    @property
    def due_s(self) -> float:
        """Time of the next tick that it needs; inf: none."""
        return min(self.policy.deadline, self._pending_due_s(), self._from_s if self._from_s > -math.inf else math.inf)

    def _pending_due_s(self) -> float:
        rail = self.rails[self.policy.path]
        patience_s = self.policy.patience_s
        if patience_s == math.inf or not rail.bytes:
            return math.inf
        oldest = self._oldest(rail)
        if oldest is None:
            return math.inf
        in_proportion = self.options.unloaded.of(oldest.bytes) / self.options.base_s
        due_s = self._since(rail, oldest) + patience_s * in_proportion
        return max(due_s, self._told_s + self.options.base_s)

    def _oldest(self, rail: Rail) -> Flight | None:
        """The long message that `rail` works on."""
        return next((flight for flight in rail.flights.values() if self._long(flight)), None)

    def _since(self, rail: Rail, flight: Flight) -> float:
        return max(flight.at_s, self._acknowledged_s[rail.number])

    def _equal_sized(self, took_s: float, length: int) -> float:
        return self.options.unloaded.equal_sized(took_s, length, self.options.message_bytes)

    # ---- the policy

    def _tell(self, event: h.Event, now: float, out: list[m.Action]) -> None:
        for action in self.policy.on(event, now):
            match action:
                case h.Probe(paths):
                    for path in paths:
                        self._probe(self.rails[path], now, out)
                case h.Switch(old, path, at_s, reason, old_rtt_s, rtt_s):
                    self._from_s = at_s if at_s > now else -math.inf
                    out.append(m.Hopped(old, path, reason, old_rtt_s, rtt_s))

    def _probe(self, rail: Rail, now: float, out: list[m.Action]) -> None:
        """As many frames as make `probe_bytes`; the last one is answered."""
        if not rail.up:
            return  # it is reported to the policy afterwards
        self._number += 1
        self._probes[self._number] = (rail.number, rail.incarnation, now)
        for old in [number for number in self._probes if number <= self._number - 4 * len(self.rails)]:
            del self._probes[old]  # it will not be answered any more
        left = self.options.probe_bytes
        while left > 0:
            body = _PADDING[:left]
            left -= len(body)
            self.wire.say(rail, now, out, Kind.PROBE, op=-self._number, flags=MORE if left > 0 else 0, body=body)


def _load(rail: Rail) -> int:
    return rail.bytes
