"""How a link's rails fail and return: fallback, probe, fenced fail-back (SHIFT sections 4.3.2 and 4.3.3).

In: what happens to rails, handshake frames of the peer, time. Out: handshakes, probes, `ResetRail` and
`RestoreRail`; which rails carry new traffic. `machine.py` describes how the parts work together.

Every step may be interrupted by another failure of any rail: a rail's way always starts over in FALLBACK,
and all that is remembered of the old one is `unresolved`, the connection whose end the peer has yet to confirm.
"""

from __future__ import annotations

import math

from helixrt.errors import Cause
from helixrt.protocol.link.frames import ANSWER, Frame, FrameError, Kind
from helixrt.protocol.link.messages import Action, Failure, RailBack, RailLeft, ResetRail, RestoreRail
from helixrt.protocol.link.rails import Rail, ReceiveState, SendState, rest_s
from helixrt.protocol.link.wire import Broken, Wire

SHORTEST_PAUSE = 0.2  # of `retry_s`: between an attempt that failed and the next


class Failover:
    def __init__(self, wire: Wire) -> None:
        self.wire, self.options = wire, wire.options
        self.rails, self.outbox = wire.rails, wire.outbox
        self.carriers: list[Rail] = []  # new traffic goes on these
        self.recovering = True  # some rail is not usable
        self.failovers = self.failbacks = 0
        self._probes = 0

    # ---- what happens to rails

    def up(self, rail: Rail, incarnation: int, now: float, out: list[Action]) -> None:
        if incarnation <= rail.incarnation:
            if not rail.up:  # the peer has left this connection before we detected the failure
                out.append(ResetRail(rail.number))
                rail.wake_s = now + self.options.retry_s
            return
        if rail.up:
            self.fail(rail, Failure.PATH, "connected anew", now, out)
        rail.up, rail.incarnation, rail.arrival = True, incarnation, None
        rail.heard_s = rail.spoke_s = rail.unanswered_s = now
        if rail.fresh:
            rail.receive = ReceiveState.DEFAULT
        plain = self.options.striped or not any(other.flights for other in self.rails)
        if (rail.fresh and plain) or not self.options.fault_tolerance:
            rail.send, rail.default_s, rail.wake_s = SendState.DEFAULT, now, math.inf
        else:
            rail.fresh, rail.wake_s = False, now  # to be probed
        self.recount()

    def down(self, rail: Rail, failure: Failure, reason: str, now: float, out: list[Action]) -> None:
        if rail.up:
            self.fail(rail, failure, reason, now, out)
        elif failure is Failure.PROGRAM:
            raise Broken(failure, reason)
        elif failure is not Failure.CASCADE:  # its restoration failed
            rail.fresh, rail.failure, rail.reason = False, failure, reason
            rail.wake_s = self._again_s(rail, now)
            self._check_gone(rail)

    def slow(self, rail: Rail, now: float, out: list[Action]) -> None:
        """Leave a working rail, unless it is the last one."""
        if self._may_leave(rail):
            rail.leaving, rail.fresh, rail.reason = True, False, "left as slow"
            self._flaps(rail, now)
            self.recount()
            out.append(RailLeft(rail.number, None, rail.reason, self._usable()))

    def _may_leave(self, rail: Rail) -> bool:
        others = any(other.usable for other in self.rails if other is not rail)
        return others and rail.usable and self.options.fault_tolerance

    def mended(self, rail: Rail, now: float) -> None:
        """The rail is reported as repaired. A running attempt may have begun too early: then another one follows at once."""
        if not rail.up:
            rail.mended = True
            if rail.wake_s != math.inf:
                rail.wake_s = self._again_s(rail, now)

    def _again_s(self, rail: Rail, now: float) -> float:
        """When to restore a rail that could not be brought back.

        Counted from the beginning of the attempt before: one that takes long, because no failure is reported, has had its
        pause. For a rail that is said to be whole there is none, but the shortest, which keeps hints from making it a loop.
        """
        retry_s = self.options.retry_s
        shortest_s = retry_s * SHORTEST_PAUSE
        if rail.mended:
            return max(rail.tried_s + shortest_s, rail.rested_s, now)
        return max(rail.tried_s + retry_s, now + shortest_s, rail.rested_s)

    def leave(self, rail: Rail, reason: str, now: float, out: list[Action]) -> None:
        """We found out ourselves that the rail does not work: its path has failed, and the driver closes it."""
        out.append(ResetRail(rail.number))
        self.fail(rail, Failure.PATH, reason, now, out)

    def fail(self, rail: Rail, failure: Failure, reason: str, now: float, out: list[Action]) -> None:
        """Fence `rail`: nothing more of this connection counts. Raises Broken if nothing can come after that."""
        options = self.options
        self.wire.inbox.cut(rail)
        again_s, carried = self._again_s(rail, now), rail.usable
        if rail.send is SendState.DEFAULT:
            self.failovers += 1
            if not rail.leaving:
                self._flaps(rail, now)
            rail.mended = False
            again_s = rail.rested_s = now + rest_s(rail.flaps, options.rest_s, options.longest_rest_s)
            if failure is Failure.DEVICE:
                again_s = max(again_s, now + options.retry_s)
        rail.failure, rail.reason = failure, reason
        rail.up = rail.fresh = rail.leaving = False
        rail.send, rail.receive = SendState.FALLBACK, ReceiveState.FALLBACK
        rail.probe = rail.switch = 0
        rail.unresolved, rail.via, rail.wake_s = rail.incarnation, (-1, 0), again_s
        if failure is Failure.PROGRAM or not options.fault_tolerance:
            raise Broken(failure, reason)
        self.recount()
        self._check_gone(rail)
        if carried:
            out.append(RailLeft(rail.number, failure, reason, self._usable()))

    def _flaps(self, rail: Rail, now: float) -> None:
        """It was in service and is no more."""
        rail.flaps = 1 if now - rail.default_s >= self.options.steady_s else rail.flaps + 1

    def _usable(self) -> int:
        return sum(rail.usable for rail in self.rails)

    def _check_gone(self, rail: Rail) -> None:
        if rail.failure is Failure.PEER_GONE and not any(other.up for other in self.rails):
            raise Broken(Failure.PEER_GONE, rail.reason)

    def recount(self) -> None:
        """Which rails carry new traffic now."""
        usable = [rail for rail in self.rails if rail.usable]
        self.recovering = len(usable) < len(self.rails)
        if not self.options.striped and usable:
            first = usable[0].number
            switching = any(
                rail.leaving
                or (rail.unresolved and rail.flights)
                or (rail.send is SendState.WAIT_DRAINED and rail.number < first)
                for rail in self.rails
            )
            usable = [] if switching else usable[:1]  # withheld, so that order is kept across the switch
        self.carriers = usable

    # ---- frames of the peer

    def resume(self, rail: Rail, frame: Frame, now: float, out: list[Action]) -> None:
        """The peer has fenced a rail; its counters were taken in already."""
        if frame.index >= len(self.rails) or frame.op < 1:
            raise FrameError(f"RESUME of rail {frame.index}, incarnation {frame.op}: there are {len(self.rails)} rails")
        failed, incarnation = self.rails[frame.index], frame.op
        if failed.up and failed.incarnation <= incarnation:
            if failed is rail:
                raise FrameError(f"RESUME of rail {failed.number} came on that very connection, {incarnation}")
            self.leave(failed, "the peer left it", now, out)
        failed.incarnation = max(failed.incarnation, incarnation)
        failed.fresh = False  # the peer waits for a SWITCH, also where this end has not had that connection yet
        if failed.unresolved and failed.unresolved <= incarnation:
            # The peer fenced before it counted: what it does not have by now it never takes from that connection.
            failed.unresolved = 0
            self.outbox.resolve(failed, Cause(f"rail {failed.number} failed: {failed.reason}"), out)
            self.recount()
        if not frame.flags & ANSWER:
            body = self.wire.counters()
            self.wire.say(rail, now, out, Kind.RESUME, op=incarnation, index=failed.number, flags=ANSWER, body=body)

    def probed(self, rail: Rail, number: int) -> None:
        if rail.probe and number == rail.probe:
            rail.probe, rail.send, rail.wake_s = 0, SendState.WAIT_SIGNALED, math.inf
            rail.fence = self.outbox.newest

    def switched_by_peer(self, rail: Rail, frame: Frame) -> None:
        if (frame.index, frame.op) == (rail.number, rail.incarnation):
            rail.receive = ReceiveState.DEFAULT
        self.wire.prompt = rail

    def acknowledged(self, now: float, out: list[Action]) -> None:
        """Acknowledgements came in while some rail was not usable: it may have been a SWITCH's."""
        for rail in self.rails:
            if rail.switch and rail.switch not in self.outbox.flights:
                rail.switch, rail.send, rail.default_s, rail.wake_s = 0, SendState.DEFAULT, now, math.inf
                self.failbacks += 1
                self.recount()
                out.append(RailBack(rail.number, self._usable()))

    # ---- recovery

    def recover(self, now: float, out: list[Action]) -> None:
        """The next steps of all rails that are not in plain use, as far as it is time for them."""
        for rail in self.rails:
            if rail.unresolved:
                self._handshake(rail, now, out)
            if rail.usable:
                continue
            if not rail.up:
                if now >= rail.wake_s:
                    rail.wake_s, rail.tried_s, rail.mended = math.inf, now, False
                    out.append(RestoreRail(rail.number))
            elif rail.leaving:
                if not rail.flights:
                    rail.leaving, rail.send = False, SendState.FALLBACK
                    rest = rest_s(rail.flaps, self.options.rest_s, self.options.longest_rest_s)
                    rail.wake_s = rail.rested_s = now + max(self.options.retry_s, rest)
                    self.recount()
            else:
                self._return(rail, now, out)

    def due_s(self) -> float:
        """When `recover` can do more than now, if nothing else happens."""
        due = math.inf
        for rail in self.rails:
            if not rail.unresolved or not rail.up:
                due = min(due, rail.wake_s)
            if rail.unresolved and rail.via[0] >= 0 and self.rails[rail.via[0]].up:
                due = min(due, rail.asked_s + self.options.probe_s)
        return due

    def _handshake(self, rail: Rail, now: float, out: list[Action]) -> None:
        """Ask the peer to confirm the end of `rail`, and again when the question was lost."""
        number, incarnation = rail.via
        if number >= 0:
            asked = self.rails[number]
            if asked.up and asked.incarnation == incarnation and now < rail.asked_s + self.options.probe_s:
                return
        talker = self.wire.talker()
        if talker is not None:
            rail.via, rail.asked_s = (talker.number, talker.incarnation), now
            body = self.wire.counters()
            self.wire.say(talker, now, out, Kind.RESUME, op=rail.unresolved, index=rail.number, body=body)

    def _return(self, rail: Rail, now: float, out: list[Action]) -> None:
        """A rail that is up again, on its way back to DEFAULT."""
        outbox = self.outbox
        if rail.send is SendState.FALLBACK:
            if rail.probe:
                if self._unanswered(rail, now):
                    self.leave(rail, "no answer to a probe", now, out)
            elif not rail.unresolved and (now >= rail.wake_s or not self.carriers):
                self._probes += 1
                rail.probe, rail.probed_s, rail.wake_s = self._probes, now, now + self.options.answer_s
                self.wire.say(rail, now, out, Kind.PROBE, op=rail.probe)
            return
        # Every frame of ours is acknowledged, so the next one serves as fence; the newest if none is to come.
        if rail.send is SendState.WAIT_SIGNALED and (outbox.newest > rail.fence or not outbox.busy or not self.carriers):
            rail.send, rail.fence = SendState.WAIT_DRAINED, outbox.newest
            self.recount()
        if rail.send is SendState.WAIT_DRAINED:
            if rail.switch:
                if self._unanswered(rail, now):
                    self.leave(rail, "no answer to a switch", now, out)
            elif self._drained(rail):
                flight = outbox.numbered(Kind.SWITCH, b"")
                rail.switch, rail.probed_s, rail.wake_s = flight.sequence, now, now + self.options.answer_s
                self.wire.give(flight, rail, now, out)

    def _unanswered(self, rail: Rail, now: float) -> bool:
        """Is it time to give up a rail on which a probe or SWITCH waits for its answer?

        While the peer's kernel acknowledges what is sent there, the rail works and the peer's process is stopped: then it may
        be the only rail that still shows that the peer is alive. `attempt_s` bounds that, as for every frame.
        """
        if now < rail.wake_s:
            return False
        if rail.acknowledged_s < rail.wake_s - self.options.answer_s or now >= rail.probed_s + self.options.attempt_s:
            return True
        rail.wake_s = now + self.options.answer_s
        return False

    def _drained(self, rail: Rail) -> bool:
        """All frames up to the fence on other working rails are acknowledged."""
        others = (other.flights for other in self.rails if other is not rail and other.up)
        return all(min(flights, default=math.inf) > rail.fence for flights in others)
