"""The link: one rank's pair with one peer in one generation, over several rails, as a machine without I/O.

    link = Link(generation, peer, rails, options)
    actions = link.on(event, now)          # link_messages.py; wake it with Tick at `link.deadline`
    link.unsettled                         # with `LinkOptions.batched`: `Settle` is due

In: what to send and receive, what came on each rail, how rails fail and return. Out: what to
write where, where payloads land, and per message `Sent`, `Received` or `Failed`; at the end `Lost`. It
keeps four guarantees, whatever rails do (lose a suffix, duplicate, reorder, stop, return):

- Every message is received exactly once, whole, in the memory posted for it: sequence numbers and the
  receiver's ledger, over all rails of a generation; older generations are dropped and counted.
- No message waits for another one's receiver: long ones wait at the sender for a credit, short ones
  travel at once into bounded memory of the receiver, and wait for a credit when that is full.
- What must not be repeated is not: it raises `Failed` if its rail fails before it is acknowledged.
- Every failure is reported in time: rails by probes, missing answers and software deadlines; to the peer by
  liveness (`liveness.py`), or by `connect_s` if no rail ever came; the caller by `Lost`, with the first cause;
  to the code that runs the job by `RailLeft` and `RailBack`, as long as the link exists.

Failover follows SHIFT section 4.3, per rail and direction (`rails.SendState`, `ReceiveState`):

              fails, or is slow and drained
    send      DEFAULT ---------------------> FALLBACK <--------------------------------------.
                 ^                              | rest, RESUME answered, up, PROBED          | fails
                 | SWITCH acknowledged          v              fence sent                    |
                 '-------- WAIT_DRAINED <---------------- WAIT_SIGNALED ---------------------+
                                '------------------------------------------------------------'
    receive   DEFAULT -- fenced by us or the peer's RESUME --> FALLBACK -- SWITCH arrives --> DEFAULT

    fallback    rail k fails at one end. That end fences it (nothing more of this connection counts) and sends
                RESUME(k, incarnation, what I received) on another rail; the peer fences k as well and answers
                with its own counters. What they show as received is done; the rest is sent again elsewhere.
    fail-back   after a rest that grows with every flap (no hint shortens it) the driver restores k, again and again; PROBE,
                PROBED on k (FALLBACK);
                the newest frame on the other rails is the fence (WAIT_SIGNALED); when all up to it is
                acknowledged (WAIT_DRAINED) SWITCH goes out on k, and with its acknowledgement k is DEFAULT.
    slow rail   leaves the same way: nothing new goes on it, it drains, rests, is probed.

A second failure at any point starts that rail's part over; RESUME is idempotent and repeated until answered,
so any end may ask at any time. A striped link spreads messages over all DEFAULT rails, or gives each to the one its
path policy chose (`paths`), and never stops for one of them. One that is not striped uses the lowest-numbered,
withholds new frames while it switches, and so the frames of one direction arrive in their order, over rails that
keep it, whatever fails.

Where SHIFT counts receive completions, the counters here are the ledger itself, so order between rails is
free. Its "next signaled WR" is the next frame, as every one of ours is acknowledged; and its omitted last
acknowledgement is that of SWITCH.

Cost, CPython 3.11 on one core of a shared cloud machine: 1 to 4 microseconds per call; 3.5 (sender) and 4 (receiver)
per short message, 10 and 11 per long one, of which its credit and its acknowledgement are about half.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from helixrt.errors import Cause
from helixrt.protocol.hopping.hopper import Policy
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.failover import Failover
from helixrt.protocol.link.frames import EAGER, LAST_SEQUENCED, MORE, Frame, FrameError, Kind
from helixrt.protocol.link.messages import Action, Event, Failure
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.paths import Paths
from helixrt.protocol.link.rails import Rail, ReceiveState
from helixrt.protocol.link.times import Times
from helixrt.protocol.link.wire import Broken, Wire
from helixrt.protocol.liveness import FirstReason

_BATCHED = frozenset({m.Submit, m.Post, m.FrameArrived, m.PayloadArrived})


class Link:
    """`peer` is for messages only; `rails` is their number, the same at both ends."""

    def __init__(
        self,
        generation: int,
        peer: int,
        rails: int,
        options: LinkOptions | None = None,
        draw: random.Random | None = None,
        begun: dict[int, int] | None = None,
    ) -> None:
        """`begun`: operations of this rank, to be shared by its links of this generation (`protocol.calls.Agreement`)."""
        assert rails > 0
        self.generation, self.peer, self.options = generation, peer, options or LinkOptions()
        self.first = FirstReason()
        self.closed = self.unsettled = False
        self._batched = self.options.batched
        self.stale = 0  # frames of an older generation or connection that were dropped
        self._wire = Wire(generation, rails, self.options, begun)
        self._failover = Failover(self._wire)
        self._inbox, self._outbox, self.rails = self._wire.inbox, self._wire.outbox, self._wire.rails
        self._paths: Paths | None = None
        if self.options.hopping is not None and rails > 1:
            self._paths = Paths(self._wire, self.options.hopping, draw or random.Random(0))
            self._outbox.room = self._paths.room
        self._times = Times(self._wire, self._failover)
        self._farewell: int | None = None  # the peer closes, and this was its newest sequence number
        self._farewells: set[int] = set()  # rails on which it said so
        self._handlers: dict[type, Callable[[Any, float, list[Action]], None]] = {
            m.Submit: self._submit,
            m.Post: self._post,
            m.RailUp: self._rail_up,
            m.RailDown: self._rail_down,
            m.RailSlow: self._rail_slow,
            m.RailMended: self._rail_mended,
            m.FrameArrived: self._frame_arrived,
            m.PayloadArrived: self._payload_arrived,
            m.Heard: self._heard,
            m.Acknowledged: self._acknowledged_by_kernel,
            m.FrameSent: self._frame_sent,
            m.Settle: self._nothing,
            m.Tick: self._tick,
            m.Forget: self._forget,
            m.Abort: self._abort,
            m.Close: self._close,
        }

    # ---- what a driver calls

    def on(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`, at monotonic time `now`. Raises ValueError when the caller uses a name twice."""
        out: list[Action] = []
        if self.closed:
            return out
        if self._times.connect_by == -math.inf:
            self._times.connect_by = now + self.options.connect_s
        try:
            kind = type(event)
            self._handlers[kind](event, now, out)
            if self._batched and kind in _BATCHED:
                self.unsettled = True
            elif not self.closed:
                self.unsettled = False
                self._settle(now, out)
        except FrameError as error:
            self._lose(Failure.PROGRAM, str(error), out)
        except Broken as broken:
            self._lose(broken.failure, broken.reason, out)
        return out

    @property
    def deadline(self) -> float:
        """Latest time of the next `Tick`; inf: none is needed, -inf: at once, because nothing was received yet."""
        if self.closed:
            return math.inf
        due = self._times.due_s()
        if self._paths is not None:
            due = min(due, self._paths.due_s)
        return min(due, self._failover.due_s()) if self._failover.recovering else due

    @property
    def policy(self) -> Policy | None:
        """Who chooses the path of a message, for those who look on."""
        return None if self._paths is None else self._paths.policy

    @property
    def resent(self) -> int:
        """Frames that went over a second rail after the first had failed."""
        return self._outbox.resent

    @property
    def duplicates(self) -> int:
        """Frames that came more than once and were dropped."""
        return self._inbox.duplicates

    @property
    def failovers(self) -> int:
        """Failures of rails that carried traffic."""
        return self._failover.failovers

    @property
    def failbacks(self) -> int:
        """Rails that carry traffic again."""
        return self._failover.failbacks

    # ---- the caller

    def _submit(self, event: m.Submit, now: float, out: list[Action]) -> None:
        self._outbox.submit(event, out)
        if event.deadline != math.inf:
            self._times.limit(event.deadline, True, event.op, event.index)

    def _post(self, event: m.Post, now: float, out: list[Action]) -> None:
        credit = self._inbox.post(event.op, event.index, event.length, out)
        if credit is not None:
            self._outbox.control.append((Kind.CREDIT, credit))
        if event.deadline != math.inf:
            self._times.limit(event.deadline, False, event.op, event.index)

    def _forget(self, event: m.Forget, now: float, out: list[Action]) -> None:
        self._outbox.forget(event.op, out)
        self._inbox.forget(event.op, out)

    def _abort(self, event: m.Abort, now: float, out: list[Action]) -> None:
        body = frames.cause_body(self.first.settle(event.cause))
        self._last_words(Kind.ABORT, now, out, body=body)

    def _close(self, event: m.Close, now: float, out: list[Action]) -> None:
        self._last_words(Kind.BYE, now, out, op=self._outbox.newest)

    # ---- rails

    def _rail_up(self, event: m.RailUp, now: float, out: list[Action]) -> None:
        self._times.rail_up(event.crossed, now)
        self._failover.up(self.rails[event.rail], event.incarnation, now, out)

    def _rail_down(self, event: m.RailDown, now: float, out: list[Action]) -> None:
        self._failover.down(self.rails[event.rail], event.failure, event.reason, now, out)

    def _rail_slow(self, event: m.RailSlow, now: float, out: list[Action]) -> None:
        self._failover.slow(self.rails[event.rail], now, out)

    def _rail_mended(self, event: m.RailMended, now: float, out: list[Action]) -> None:
        self._failover.mended(self.rails[event.rail], now)

    # ---- what arrives

    def _frame_arrived(self, event: m.FrameArrived, now: float, out: list[Action]) -> None:
        rail, frame = self.rails[event.rail], event.frame
        kind = frame.kind
        if frame.generation != self.generation or not rail.up:
            if frame.generation > self.generation:
                raise FrameError(f"{kind.name} of generation {frame.generation}: this link is of {self.generation}")
            self.stale += 1
            if kind is Kind.DATA:
                self._inbox.announce(rail, frame, False, out)
            return
        self._times.alive(rail, now)
        tolerant = self.options.fault_tolerance
        if tolerant and frame.acknowledged > self._outbox.acknowledged:
            self._acknowledged(frame.acknowledged, (), now, out)
        if kind is Kind.DATA:
            rail.receive = ReceiveState.DEFAULT  # the peer uses it, even if its SWITCH was lost
            self._inbox.announce(rail, frame, True, out)
            return
        if tolerant and kind <= LAST_SEQUENCED:
            if not self._inbox.take(frame.sequence):
                return
            self._wire.owed += 1
        self._hear(kind, rail, frame, now, out)

    def _hear(self, kind: Kind, rail: Rail, frame: Frame, now: float, out: list[Action]) -> None:
        match kind:
            case Kind.ACK:
                self._take_counters(frame, now, out)
            case Kind.CREDIT:
                self._outbox.credit(frames.names(frame))
            case Kind.WANT:
                credits = self._inbox.want(frames.names(frame))
                self._outbox.control.extend((Kind.CREDIT, name) for name in credits)
            case Kind.SKIP:
                self._inbox.consumed += frame.index
            case Kind.RESUME:
                self._take_counters(frame, now, out)
                self._failover.resume(rail, frame, now, out)
            case Kind.PROBE:
                if not frame.flags & MORE:
                    self._wire.say(rail, now, out, Kind.PROBED, op=frame.op)
            case Kind.PROBED:
                if frame.op < 0 and self._paths is not None:
                    self._paths.answered(-frame.op, now, out)
                else:
                    self._failover.probed(rail, frame.op)
            case Kind.SWITCH:
                self._failover.switched_by_peer(rail, frame)
            case Kind.ABORT:
                out.append(m.PeerAborted(self.first.settle(frames.cause(frame))))
                self._shut(out)
            case Kind.BYE:
                self._farewell = frame.op
                self._farewells.add(rail.number)
            case _:
                assert kind is Kind.BEAT  # heard already
                if differs := self._wire.agreement.unexpected(frame.op):
                    raise FrameError(differs)

    def _take_counters(self, frame: Frame, now: float, out: list[Action]) -> None:
        counters, box = frames.counters(frame), self._outbox
        if counters.consumed > box.eager_out:
            raise FrameError(f"{counters.consumed} eager bytes given back: {box.eager_out} were sent")
        box.eager_back = max(box.eager_back, counters.consumed)
        if self.options.fault_tolerance:
            self._acknowledged(counters.floor, counters.ranges, now, out)

    def _acknowledged(self, floor: int, ranges: tuple[tuple[int, int], ...], now: float, out: list[Action]) -> None:
        self._outbox.acknowledge(floor, ranges, out)
        if self._paths is not None:
            self._paths.acknowledged(now, out)
        if self._failover.recovering:
            self._failover.acknowledged(now, out)

    def _payload_arrived(self, event: m.PayloadArrived, now: float, out: list[Action]) -> None:
        rail = self.rails[event.rail]
        self._times.alive(rail, now)
        frame = self._inbox.whole(rail, event.sequence, out)
        if frame is not None and self.options.fault_tolerance:
            self._wire.owed += 1
            if not frame.flags & EAGER or frame.length > self.options.keep_bytes:
                # the sender waits for it, with its memory
                self._wire.prompt = rail if self._paths is None else self._paths.for_acknowledgement(rail)

    def _heard(self, event: m.Heard, now: float, out: list[Action]) -> None:
        self._times.alive(self.rails[event.rail], now)

    def _acknowledged_by_kernel(self, event: m.Acknowledged, now: float, out: list[Action]) -> None:
        rail = self.rails[event.rail]
        if not rail.up:
            return
        at_s = min(event.at_s, now)
        rail.acknowledged_s = max(rail.acknowledged_s, at_s)
        if at_s > rail.heard_s:
            self._times.alive(rail, at_s)

    def _frame_sent(self, event: m.FrameSent, now: float, out: list[Action]) -> None:
        if not self.options.fault_tolerance:
            self._outbox.handed(event.sequence, out)

    def _nothing(self, event: m.Settle, now: float, out: list[Action]) -> None:
        """What every event is followed by is all."""

    # ---- time

    def _tick(self, event: m.Tick, now: float, out: list[Action]) -> None:
        if now >= self._wire.acknowledge_at:
            self._wire.acknowledge_at = math.inf
            self._wire.prompt = self._wire.talker()
        if self._paths is not None:
            self._paths.tick(now, out)
        self._times.tick(self.peer, now, out)

    # ---- after every event

    def _settle(self, now: float, out: list[Action]) -> None:
        outbox, failover, wire = self._outbox, self._failover, self._wire
        if outbox.ready or outbox.again or outbox.control:
            self._pump(now, out)
        if failover.recovering:
            failover.recover(now, out)
            self._pump(now, out)
        if wire.owed or self._inbox.consumed != wire.told:
            wire.acknowledge(now, out)
        if self._farewell is not None and self._all_came():
            out.append(m.PeerClosed())
            self._shut(out)

    def _pump(self, now: float, out: list[Action]) -> None:
        """Send what may go, each frame on the rail with the least on its way."""
        carriers, paths = self._failover.carriers, self._paths
        if paths is not None:
            paths.attend(carriers, now, out)
        while carriers:
            flight = self._outbox.next()
            if flight is None:
                return
            if paths is not None:
                rail = paths.rail_for(flight, carriers, now, out)
            else:
                rail = carriers[0] if len(carriers) == 1 else min(carriers, key=_load)
            self._wire.give(flight, rail, now, out)

    def _all_came(self) -> bool:
        """The peer has sent BYE, and nothing that it sent before is missing."""
        if self.options.fault_tolerance:
            return self._farewell is not None and self._inbox.ledger.floor >= self._farewell
        return all(rail.number in self._farewells for rail in self.rails if rail.up)

    # ---- the end

    def _last_words(self, kind: Kind, now: float, out: list[Action], op: int = 0, body: bytes = b"") -> None:
        for rail in self.rails:
            if rail.up:
                self._wire.say(rail, now, out, kind, op=op, body=body)
        self.closed = True

    def _lose(self, failure: Failure, reason: str, out: list[Action]) -> None:
        others = "; ".join(f"rail {rail.number}: {rail.reason}" for rail in self.rails if rail.reason not in ("", reason))
        cause = Cause(f"lost rank {self.peer}: {reason}" + (f" ({others})" if others else ""), f"rank {self.peer}")
        out.append(m.Lost(self.first.settle(cause), failure))
        self._shut(out)

    def _shut(self, out: list[Action]) -> None:
        self.closed = True
        for rail in self.rails:
            if rail.up:
                rail.up = False
                out.append(m.ResetRail(rail.number))


def _load(rail: Rail) -> int:
    return rail.bytes
