"""One peer of a TCP endpoint: drives its `Link` machine over the connections there are.

In: the caller's messages, frames and failures of connections. Out: outcomes, frames to write, rails to restore.
Only maps: every decision is the machine's (`protocol/link/machine.py`). Holds the memory the machine talks about by name:
the caller's own for what is sent and received, copies of short messages until they are acknowledged (`kept`),
and short messages that came before their receiver (`held`).
"""

from __future__ import annotations

import dataclasses
import math
import socket
import time

from helixrt.errors import Cause
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.messages import Failure, Landing
from helixrt.protocol.liveness import BEAT, acknowledged_s
from helixrt.transport.contract import Buffer, Lost, PeerAborted, Received, Sent, Sink
from helixrt.transport.intake import Intake, fill
from helixrt.transport.rail_connection import RailConnection
from helixrt.transport.tcp.connection import Connection
from helixrt.transport.tcp.interfaces import trouble_of_all
from helixrt.transport.tcp.peer_host import Host
from helixrt.transport.tcp.rails import TcpRail

CONTROL = -1  # number of the connection that only carries the reason of an end
_TICK, SETTLE = m.Tick(), m.Settle()
_HEARD = 1 / 16  # of a period: interval at which the machine is informed of received bytes of a long payload


class Peer:
    """A `Carrier` for all connections to one rank in one generation."""

    def __init__(self, host: Host, rank: int, link: Link, addresses: list[tuple[str, int]], ways: tuple[TcpRail, ...]) -> None:
        """Per rail: where the peer listens, and the way out of this host to there."""
        self.rank, self.link, self.addresses, self.ways = rank, link, addresses, ways
        self.rails: list[RailConnection | None] = [None] * len(link.rails)
        self.control: RailConnection | None = None
        self.ended = self.left = False  # left: it said goodbye
        self.cause: Cause | None = None  # of the end
        self.is_touched = False
        self._host = host
        self._heard = False  # the machine was informed of what was read
        self._later: list[m.Action] | None = None  # what is being carried out: more may be added at its end
        self._probed_s = 0.0  # when the control connection last carried a probe
        self._sending: dict[tuple[int, int], Buffer] = {}
        self._receiving: dict[tuple[int, int], Buffer | Intake] = {}
        self._kept: dict[tuple[int, int], Buffer] = {}
        self._held: dict[tuple[int, int], Buffer] = {}
        self._came_s: dict[tuple[int, int], float] = {}  # what is, or was until it was asked for, in `_held`
        self._unsaid: set[tuple[int, int]] = set()  # kept, and no rail has them yet

    # ---- the caller

    def submit(self, event: m.Submit, data: Buffer) -> None:
        if self.left:
            self._end(Lost(self.rank, Cause("it had closed before a message to it began", f"rank {self.rank}")))
        if self.ended:
            return
        name = (event.op, event.index)
        if name in self._sending:
            raise ValueError(f"message {name} was begun before")
        self._sending[name] = data
        try:
            self.tell(event)
        except ValueError:
            del self._sending[name]
            raise

    def post(self, event: m.Post, into: Buffer | Sink) -> None:
        target = into if isinstance(into, memoryview) else Intake(into, self._host.stage)
        if self.left:
            self._receive_of_the_left(event.op, event.index, target)
            return
        if self.ended:
            return
        name = (event.op, event.index)
        if name in self._receiving:
            raise ValueError(f"message {name} was begun before")
        self._receiving[name] = target
        try:
            self.tell(event)
        except ValueError:
            del self._receiving[name]
            raise

    def _receive_of_the_left(self, op: int, index: int, into: Buffer | Intake) -> None:
        held = self._held.pop((op, index), None)
        if held is not None and len(held) == len(into):
            fill(into, held)
            self._host.add(Received(self.rank, op, index, self._came_s.pop((op, index))))
        else:
            self._end(Lost(self.rank, Cause("it closed without sending a message", f"rank {self.rank}")))

    def forget(self, op: int) -> None:
        self.tell(m.Forget(op))
        for table in (self._sending, self._receiving, self._held, self._came_s):
            for name in [name for name in table if name[0] == op]:
                del table[name]

    # ---------------------------------------------------------------- connections

    def adopt(self, sock: socket.socket, rail: int, incarnation: int) -> None:
        """A proved socket becomes rail `rail`, or the control connection."""
        connection = Connection(sock, self, self.rank, rail)
        if rail == CONTROL:
            self._host.watch(connection)
            self._drop(self.control)
            self.control = connection
        else:
            self.put_in_service(connection, incarnation)

    def put_in_service(self, connection: RailConnection, incarnation: int) -> None:
        """Both ends of it are ready: it is its rail from now on."""
        rail = connection.number
        self._host.watch(connection)
        self._drop(self.rails[rail])
        self.rails[rail] = connection
        self.tell(m.RailUp(rail, incarnation, self.was_crossed(rail)))

    def was_crossed(self, rail: int) -> bool:
        """Whether both ends spoke over the rail itself when it was set up."""
        return True

    def connected(self) -> bool:
        """By everything it should have."""
        return self.control is not None and all(self.rails)

    def never_came(self, rail: int) -> bool:
        """It has not been up yet, and nothing is under way that would bring it up."""
        return self.rails[rail] is None and self.link.rails[rail].fresh

    def nobody(self, rail: int, failure: Failure, reason: str) -> None:
        """No process listens at the peer's address for `rail`, or it has left this generation."""
        if self.rails[rail] is None:
            self.tell(m.RailDown(rail, failure, reason))

    def read(self, connection: RailConnection, budget: int) -> None:
        self._heard = False
        if connection.read(budget) and not self._heard and connection.number >= 0 and not connection.closed:
            if self._host.now > self.link.rails[connection.number].heard_s + _HEARD * self.link.options.period_s:
                self.tell(m.Heard(connection.number))

    def frame_came(self, connection: RailConnection, frame: Frame) -> None:
        self._heard = True
        if connection.number == CONTROL:
            self._control_came(frame)
        else:
            self.tell(m.FrameArrived(connection.number, frame))

    def _control_came(self, frame: Frame) -> None:
        if frame.kind is Kind.BEAT:
            return  # sent to be acknowledged by this kernel
        if frame.kind is not Kind.ABORT:
            raise frames.FrameError(f"{frame.kind.name} on the control connection: only ABORT and BEAT go there")
        if frame.generation == self.link.generation and not self.ended and not self.left:
            cause = self.link.first.settle(frames.cause(frame))
            self.link.closed = True
            self._end(PeerAborted(self.rank, cause))

    def payload_came(self, connection: RailConnection, sequence: int) -> None:
        self._heard = True
        self.tell(m.PayloadArrived(connection.number, sequence))

    def frame_left(self, connection: RailConnection, sequence: int) -> None:
        if not self.link.options.fault_tolerance:
            self.tell(m.FrameSent(connection.number, sequence))

    def broke(self, connection: RailConnection, failure: Failure, reason: str) -> None:
        number = connection.number
        self._drop(connection)
        if number == CONTROL:
            self.control = None
            return
        if self.rails[number] is not connection:
            return
        self.rails[number] = None
        if self.control is not None and failure is not Failure.DEVICE:
            self.read(self.control, frames.MAX_BODY_BYTES)  # if the peer said why, that is the cause
        if self.ended or self.left or self.link.closed:
            return
        self.tell(m.RailDown(number, failure, reason))
        if failure is Failure.PATH and not self.ended:
            self._host.look_for(self, number)

    def _drop(self, connection: RailConnection | None) -> None:
        if connection is not None and not connection.closed:
            self._host.unwatch(connection)
            connection.close()

    # ---------------------------------------------------------------- the machine

    def tick(self) -> None:
        if not self.ended and not self.left and self.link.options.period_s < math.inf:
            self._hear_acknowledgements()
        self.tell(_TICK)

    def _hear_acknowledgements(self) -> None:
        """Tell the machine what the peer's kernel acknowledged: a sign of life that needs nothing of the peer's process."""
        now = self._host.now
        control = None if self.control is None else self.control.acknowledgements(now)
        full = False
        for number, connection in enumerate(self.rails):
            view = None if connection is None else connection.acknowledgements(now)
            if view is not None:
                full = full or view.full
                self.tell(m.Acknowledged(number, acknowledged_s(view, control)))
        if full and self.control is not None and self.control.idle and control is not None and not control.full:
            self._probe_by_control(now)

    def _probe_by_control(self, now: float) -> None:
        """A rail is full, so nothing more can be acknowledged on it."""
        if now >= self._probed_s + BEAT * self.link.options.period_s and self.control is not None:
            self._probed_s = now
            self.control.put(frames.pack(Frame(Kind.BEAT, self.link.generation)))
            self._host.has_frames(self.control)

    def tell(self, event: m.Event) -> None:
        """Pass `event` to the machine and carry out its actions; within an action, after all earlier actions."""
        if self.ended or self.left:
            return
        if not self.is_touched:
            self._touch()
        actions = self.link.on(event, self._host.now)
        if not actions:
            return
        if self._later is not None:
            self._later.extend(actions)
            return
        self._later = actions
        try:
            for action in actions:  # and what is added meanwhile
                if self.ended:
                    return
                self._carry_out(action)
        finally:
            self._later = None

    def settle(self) -> None:
        """Before the host writes or waits: what a batch of events has given to send is sent."""
        if self.link.unsettled:
            self.tell(SETTLE)

    def _touch(self) -> None:
        if not self.is_touched:
            self.is_touched = True
            self._host.touched(self)

    def _carry_out(self, action: m.Action) -> None:
        # What every message brings, first; asking for the type alone is three times as fast as matching.
        if type(action) is m.SendData:
            self._write_data(action.rail, action.frame)
        elif type(action) is m.Accept:
            connection = self.rails[action.rail]
            assert connection is not None
            connection.landing = self._landing((action.op, action.index), action.landing, connection.length)
        elif type(action) is m.Received:
            del self._receiving[action.op, action.index]
            self._host.add(Received(self.rank, action.op, action.index, self._came_s.pop((action.op, action.index), 0.0)))
        elif type(action) is m.Sent:
            self._sending.pop((action.op, action.index), None)
            self._host.add(Sent(self.rank, action.op, action.index))
        elif type(action) is m.Keep:
            name = (action.op, action.index)
            self._kept[name] = self._host.copies.copy(self._sending.pop(name))
            self._unsaid.add(name)
        elif type(action) is m.Release:
            name = (action.op, action.index)
            self._host.copies.give(self._kept.pop(name))
            self._unsaid.discard(name)
        elif type(action) is m.SendFrame:
            connection = self.rails[action.rail]
            if connection is not None:
                connection.put(frames.pack(action.frame))
                self._host.has_frames(connection)
        elif type(action) is m.Deliver:
            name = (action.op, action.index)
            held = self._held.pop(name)
            fill(self._receiving[name], held)
            self._host.copies.give(held)
        else:
            self._carry_out_rare(action)

    def _write_data(self, rail: int, frame: Frame) -> None:
        connection, name = self.rails[rail], (frame.op, frame.index)
        if connection is None:
            return
        data = self._kept.get(name)
        if data is None:
            data = self._sending[name]
        else:
            self._unsaid.discard(name)
        connection.put(frames.pack(frame), data if frame.length else None, name, frame.sequence)
        self._host.has_frames(connection)

    def _carry_out_rare(self, action: m.Action) -> None:
        match action:
            case m.Free(op, index):
                self._host.copies.give(self._held.pop((op, index)))
                del self._came_s[op, index]
            case m.Detach(op, index):
                for each in filter(None, self.rails):
                    each.detach((op, index))
            case m.Discard(rail):
                connection = self.rails[rail]
                if connection is not None:
                    connection.landing = None
            case m.ResetRail(rail):
                self._drop(self.rails[rail])
                self.rails[rail] = None
            case m.RestoreRail(rail):
                self._host.restore(self, rail)
            case m.RailLeft() | m.RailBack() | m.Hopped() | m.PathProbed():
                self._host.note(self, action)
            case m.Lost(cause, failure):
                self._end(Lost(self.rank, dataclasses.replace(cause, own_device=failure is Failure.DEVICE)))
            case m.PeerAborted(cause):
                self._end(PeerAborted(self.rank, cause))
            case m.PeerClosed():
                self._leave()
            case m.Failed(op, index, sending, _):
                (self._sending if sending else self._receiving).pop((op, index))
                self._host.failed(self, action)

    def _landing(self, name: tuple[int, int], landing: Landing, length: int) -> Buffer | Intake | None:
        if landing is Landing.PLACE:
            target = self._receiving[name]
            if isinstance(target, Intake):
                target.restart()
            return target
        if landing is Landing.DROP:
            return None
        held = self._held[name] = self._host.copies.take(length)
        self._came_s[name] = time.monotonic()
        return held

    # ---------------------------------------------------------------- ends

    def _leave(self) -> None:
        """The peer has sent BYE: no failure, unless a message from it is awaited."""
        self.left = True
        self._touch()
        if waits := len(self._sending) + len(self._receiving):
            self._end(Lost(self.rank, Cause(f"it closed while {waits} messages with it were not done", f"rank {self.rank}")))
        else:
            self._close_connections()

    def own_trouble(self) -> str:
        """What of this host alone keeps all connections to the peer from working; empty if there is no such thing."""
        return trouble_of_all(self.ways)

    def _end(self, outcome: Lost | PeerAborted) -> None:
        if own := self.own_trouble():  # the peer may have noticed it first
            outcome = dataclasses.replace(outcome, cause=with_own_trouble(outcome.cause, own))
        self.cause = outcome.cause
        if isinstance(outcome, Lost) and not self.left:
            self.say_why(Cause(f"it lost the link: {outcome.cause.what}", outcome.cause.rank, outcome.cause.log))
        self.ended, self.left = True, False
        self.link.closed = True
        self._touch()
        self._close_connections()
        for table in (self._sending, self._receiving, self._kept, self._held, self._came_s, self._unsaid):
            table.clear()
        self._host.add(outcome)

    def lose(self, cause: Cause) -> None:
        self._end(Lost(self.rank, self.link.first.settle(cause)))

    def say_why(self, cause: Cause) -> None:
        """Tell the peer the reason of the end, as far as that goes without blocking."""
        word = frames.pack(
            frames.Frame(Kind.ABORT, self.link.generation, body=(body := frames.cause_body(cause)), length=len(body))
        )
        for connection in (self.control, *self.rails):
            if connection is not None:
                connection.say_last(word)

    def unsaid(self) -> bool:
        """Something that counts as sent has yet to be handed to a rail."""
        return bool(self._unsaid)

    def end_quietly(self) -> None:
        """The generation is over at this end: no further outcomes are reported."""
        self.ended = self.link.closed = True
        self._close_connections()

    def _close_connections(self) -> None:
        for connection in (self.control, *self.rails):
            self._drop(connection)
        self.control, self.rails = None, [None] * len(self.rails)


def with_own_trouble(cause: Cause, trouble: str) -> Cause:
    """The cause of a failure that this host's own network device explains."""
    return dataclasses.replace(cause, what=f"{cause.what}; here, {trouble}", own_device=True)
