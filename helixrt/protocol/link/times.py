"""When a link's time is over: of messages with a deadline, of silent rails, of the peer, of a peer that never came.

In: deadlines of messages, signs of life, the time. Out: `Failed` messages, rails that are left, beats on those on which nothing
was said for a while; Broken when the peer is lost.
"""

from __future__ import annotations

import heapq
import math

from helixrt.errors import Cause
from helixrt.protocol.calls import awaited
from helixrt.protocol.link.failover import Failover
from helixrt.protocol.link.frames import Kind
from helixrt.protocol.link.messages import Action, Failed, Failure
from helixrt.protocol.link.rails import Rail
from helixrt.protocol.link.wire import Broken, Wire
from helixrt.protocol.liveness import Liveness

RAIL_SILENCE = 0.75  # of a period: a rail this much longer silent than the peer's others has failed,
UNANSWERED = 0.4  # if what was sent on it has had no answer for so long: we may not have sent anything for a while


class Times:
    def __init__(self, wire: Wire, failover: Failover) -> None:
        self.connect_by = -math.inf  # when a rail must be up; a link begins with its first event
        self._wire, self._failover, self._options = wire, failover, wire.options
        self._liveness: Liveness | None = None  # from the first rail on
        self._deadlines: list[tuple[float, bool, int, int]] = []  # of messages: when, sends, op, index

    def limit(self, deadline: float, sending: bool, op: int, index: int) -> None:
        """A message fails at `deadline`, unless it is done."""
        heapq.heappush(self._deadlines, (deadline, sending, op, index))

    def rail_up(self, crossed: bool, now: float) -> None:
        if self._liveness is None:
            self._liveness = Liveness(self._options.period_s, now)
        if crossed:
            self._liveness.heard(now)

    def alive(self, rail: Rail, now: float) -> None:
        """Something was received on `rail`."""
        if rail.up:
            rail.heard_s = now
            assert self._liveness is not None
            self._liveness.heard(now)

    def due_s(self) -> float:
        """When `tick` is wanted; `Failover` and `Paths` have times of their own."""
        due = self._wire.acknowledge_at
        if self._deadlines:
            due = min(due, self._deadlines[0][0])
        live = self._liveness
        if live is None:
            return min(due, self.connect_by)
        if self._options.fault_tolerance:
            due = min(due, live.deadline_s)
            for rail in self._wire.rails:
                if rail.up and rail.spoke_s + live.beat_s < due:
                    due = rail.spoke_s + live.beat_s
        return due

    def tick(self, peer: int, now: float, out: list[Action]) -> None:
        """Raises Broken when no rail came up in time, or the peer gives no sign of life."""
        self._expire(peer, now, out)
        live, options = self._liveness, self._options
        if live is None:
            if now >= self.connect_by:
                raise Broken(Failure.PATH, f"no rail came up in {options.connect_s:g} s")
            return
        if not options.fault_tolerance:
            return
        period_s, wire = options.period_s, self._wire
        for rail in wire.rails:
            if not rail.up:
                continue
            if live.heard_s - rail.heard_s > RAIL_SILENCE * period_s and rail.silent(UNANSWERED * period_s, now):
                self._failover.leave(rail, f"silent for {now - rail.heard_s:.2f} s", now, out)
            elif rail.flights and not rail.unresolved and now - next(iter(rail.flights.values())).at_s > options.attempt_s:
                self._failover.leave(rail, f"nothing acknowledged for {options.attempt_s} s", now, out)
            elif now >= rail.spoke_s + live.beat_s:
                wire.say(rail, now, out, Kind.BEAT, op=awaited((*wire.outbox.stuck(), *wire.inbox.posted)))
        if live.silent(now):
            raise Broken(Failure.PEER_GONE, f"no sign of life for {now - live.heard_s:.2f} s")

    def _expire(self, peer: int, now: float, out: list[Action]) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sending, op, index = heapq.heappop(self._deadlines)
            if sending:
                message = self._wire.outbox.unsettled((op, index))
                if message is None:
                    continue
                self._wire.outbox.drop(message, out)
            elif not self._wire.inbox.abandon((op, index), out):
                continue
            out.append(Failed(op, index, sending, Cause("deadline passed", f"rank {peer}")))
