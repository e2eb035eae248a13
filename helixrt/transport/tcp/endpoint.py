"""An endpoint over TCP: one or several rails to every peer, all driven by the caller of `progress`.

In: the run's secret and this host's rails. Out: an `Endpoint` (`contract.py`). The lower rank of a pair dials, one
connection per rail and one more for the reason of an end, which so never queues behind data (`meeting`). What
arrives, breaks or is due goes to the pair's `Link` machine (`peer`); connections before they count are
`admission`'s.

How failures are distinguished (SHIFT section 4.3 uses the NIC's completion codes):

- The other end's kernel closed the connection: it is dialled or probed at once. If no process listens there: the
  peer's process has ended, which is known after a round trip. Else only the connection broke.
- No route, no acknowledgement (TCP_USER_TIMEOUT), nothing received on one rail but on others: the path.
- No acknowledgement on any: the peer's host or all paths to it failed (`protocol/liveness.py`). The endpoint sends probes for
  that, and asks its kernel for acknowledgements, unless it has no period. A peer whose process does not run its own code for
  a while is acknowledged all the same, so it is not lost; its monitor reports whether the process is stopped (`monitor`).

An authenticated connection of a newer generation is parked until this end connects to that generation too. A process
that is forked while an endpoint exists keeps its connections open: then only the peer's monitor detects the end of a process.
"""

from __future__ import annotations

import functools
import math
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from helixrt.errors import Cause, ConfigError, Retryable
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.record import FlightRecord
from helixrt.transport import path_history
from helixrt.transport.contract import Buffer, Endpoint, Outcome, Refused, Sink
from helixrt.transport.copies import CopyMemory
from helixrt.transport.forking import disown_in_children
from helixrt.transport.intake import Stage
from helixrt.transport.rail_connection import RailConnection
from helixrt.transport.tcp import rails as tcp_rails
from helixrt.transport.tcp.admission import Accepted, Listener, PendingConnections
from helixrt.transport.tcp.handshake import Purpose, Verdict
from helixrt.transport.tcp.meeting import Means, Meeting
from helixrt.transport.tcp.peer import SETTLE, Peer
from helixrt.transport.tcp.rails import MAX_RAILS, SocketTuning, TcpRail
from helixrt.transport.tcp.watch import ENDED, READ, WRITE, Watch

EAGER_BYTES = 512 << 10  # copying a message costs less than waiting for a credit and an acknowledgement
_ROUNDS = 4  # in one `progress`, as long as there is nothing to report
_SETTLE_S = 1e-3  # who calls `progress` without a pause has the deadlines looked at that often


@dataclass(frozen=True, kw_only=True)
class TcpOptions:
    """The settings of a TCP endpoint. Times in seconds."""

    period_s: float | None = 1.0  # of liveness; None: a path that fails is noticed by `sockets.user_timeout_s` alone
    link: LinkOptions = field(default_factory=lambda: LinkOptions(eager_bytes=EAGER_BYTES))  # its period is the one above
    sockets: SocketTuning = field(default_factory=SocketTuning)
    read_bytes: int = 2 << 20  # of one connection in one `progress`, about
    write_bytes: int = 2 << 20
    missing_rail_s: float = 1.0  # `connect` waits so long for the other rails of a peer that came on one
    restore_s: float = 2.0  # one attempt to restore a rail
    linger_s: float = 1.0  # `close` waits at most so long until the last bytes are out
    record: FlightRecord | None = None  # gets the history of rails and paths

    def __post_init__(self) -> None:
        if self.period_s is not None and not self.period_s > 0:
            raise ConfigError("period_s", self.period_s, "must be more than 0, or None for no heartbeats")


class TcpEndpoint(Endpoint):
    """`rails`: this host's; rail k of one rank is connected to rail k of the other, as many as both have.

    Raises ConfigError when a rail's address is not this host's.
    """

    _batched = True  # its links get messages in batches, which `flush` ends

    def __init__(self, secret: bytes, rails: Sequence[TcpRail] = (TcpRail(),), options: TcpOptions | None = None) -> None:
        if not isinstance(secret, bytes) or not secret:
            raise ConfigError("secret", "...", "must be the run's secret: bytes, not empty")
        if not 1 <= len(rails) <= MAX_RAILS:
            raise ConfigError("rails", len(rails), f"must be 1 to {MAX_RAILS}")
        self.options = options or TcpOptions()
        period = self.options.period_s
        self._link_options = replace(self.options.link, period_s=math.inf if period is None else period, batched=self._batched)
        tuning = replace(self.options.sockets, user_timeout_s=max(self.options.sockets.user_timeout_s, 2 * (period or 0.0)))
        self.now = time.monotonic()
        self.stage, self.copies = Stage(), CopyMemory()
        listeners = []
        try:
            for rail in rails:
                listeners.append(tcp_rails.listen(rail, tuning))
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self._rails = tuple(rails)
        self._address = tcp_rails.pack_address(listeners)
        self._watch = Watch()
        self._descriptors = {self._watch.descriptor: READ}
        self._listener, self._waiting = Listener(self._watch, listeners, secret, self._proved), PendingConnections(self._watch)
        self._means = Means(self._watch, secret, tuning, self.options.missing_rail_s, self.options.restore_s, period)
        self._meeting = Meeting(self, self._means, -1, -1)
        self._peers = self._meeting.peers
        self._closed = False
        self._outcomes: list[Outcome] = []
        self._writers: dict[RailConnection, None] = {}
        self._touched: list[Peer] = []
        self._dues: dict[int, float] = {}
        self._due = math.inf
        self._settled_s = -math.inf
        self._stale = 0
        self._draw = random.Random()  # of the links, for the paths they try
        self._begun: dict[int, int] = {}  # operations of this generation, of all links
        disown_in_children(self)

    # ---------------------------------------------------------------- what a communicator calls

    def address(self) -> bytes:
        return self._address

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        self._peer(peer).submit(m.Submit(op, index, len(data)), data)

    def receive(self, peer: int, op: int, index: int, into: Buffer | Sink) -> None:
        self._peer(peer).post(m.Post(op, index, len(into)), into)

    def _peer(self, rank: int) -> Peer:
        peer = self._peers.get(rank)
        if peer is None:
            raise ValueError(f"rank {rank} is no peer of this generation, or the generation is over")
        return peer

    def forget(self, op: int) -> None:
        for peer in list(self._peers.values()):
            peer.forget(op)

    def lose(self, peer: int, cause: Cause) -> None:
        """End the link with `peer`, because of what was learnt elsewhere; `Lost` follows. Nothing if it has ended."""
        known = self._peers.get(peer)
        if known is not None and not known.ended and not known.left:
            known.lose(cause)

    def descriptors(self) -> Mapping[int, int]:
        return self._descriptors

    def progress(self, now: float) -> Sequence[Outcome]:
        if self._closed:
            return ()
        self.now = now
        self.flush()
        if self._touched and now > self._settled_s + _SETTLE_S:
            self._settle()
        for _ in range(_ROUNDS):  # what comes meanwhile is cheaper to take now than after another wait
            if not self._watch.dispatch():
                break
            if self._outcomes:
                break  # their messages are sent together with those of this turn
            self.flush()
        if now >= self._due or now >= self._watch.due:
            self._tick()
        if not self._outcomes:
            return ()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def flush(self) -> None:
        for peer in self._touched:
            if peer.link.unsettled:
                peer.tell(SETTLE)
        if self._writers:
            self._write()

    def next_deadline(self) -> float | None:
        if self._closed:
            return None
        self.flush()
        if self._outcomes or self._writers:
            return self.now
        self._settle()
        due = min(self._due, self._watch.due)
        return None if due == math.inf else due

    def refused(self) -> Refused:
        return Refused(self._listener.strangers, self._stale + sum(peer.link.stale for peer in self._peers.values()))

    def abort(self, cause: Cause) -> None:
        self._leave(cause)
        self._outcomes.clear()

    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        until = time.monotonic() + deadline_s
        if self._closed:
            raise Retryable("this endpoint was closed")
        if generation < self._meeting.generation:
            raise ValueError(f"generation {generation}: this endpoint was in {self._meeting.generation} already")
        self._leave(Cause("it went on to another generation", f"rank {me}"))
        self._outcomes.clear()
        self._begun = {}
        meeting = self._meeting = Meeting(self, self._means, generation, me)
        self._peers = meeting.peers
        for rank, raw in peers.items():
            try:
                self._peers[rank] = self._new_peer(generation, rank, raw)
            except ValueError as error:
                meeting.hopeless[rank] = f"its address is not one: {error}"
        try:
            self.now = time.monotonic()
            for accepted in self._waiting.leave(generation):
                self._proved(accepted)
            meeting.gather(until, stopped)
        except BaseException as error:
            self._leave(Cause(str(error), f"rank {me}"))
            raise

    def _new_peer(self, generation: int, rank: int, raw: bytes) -> Peer:
        """Raises ValueError when its address is none."""
        addresses = tcp_rails.parse_address(raw)[: len(self._rails)]
        link = Link(generation, rank, len(addresses), self._link_options, self._draw, self._begun)
        return Peer(self, rank, link, addresses, self._rails)

    def close(self) -> None:
        if self._closed:
            return
        until = time.monotonic() + self.options.linger_s
        self.flush()
        while any(peer.unsaid() for peer in self._living()) and time.monotonic() < until:
            self.turn(until)
        for peer in self._living():
            peer.tell(m.Close())
        self._linger(until)
        self._leave(None)
        self._closed, self._descriptors = True, {}
        self._waiting.close()
        self._listener.close()
        self._give_up()
        self._watch.close()

    def _give_up(self) -> None:
        """What an endpoint has beside connections; no peer uses it any more."""

    # ---------------------------------------------------------------- peers and incoming connections

    def turn(self, until: float) -> None:
        """Wait for something to do, at most until then, and do it; outcomes are kept."""
        self.now = time.monotonic()
        self.flush()
        self._settle()
        wake = min(until, self._due, self._watch.due)
        self._watch.dispatch(max(0.0, wake - self.now))
        self.now = time.monotonic()
        self.flush()
        self._settle()
        self._tick()

    def joined(self, peer: Peer, sock: socket.socket, rail: int, incarnation: int, dialled: bool) -> None:
        peer.adopt(sock, rail, incarnation)

    def _proved(self, accepted: Accepted) -> None:
        """Handle an authenticated incoming connection: accept, park or reject it."""
        hello, meeting = accepted.hello, self._meeting
        assert hello is not None
        probes = hello.purpose is Purpose.PROBE
        if hello.generation > meeting.generation and not probes:
            self._waiting.enter(accepted)
            return
        verdict = meeting.verdict(hello)
        self._stale += verdict is Verdict.STALE
        if accepted.verdict(verdict, max(0, meeting.generation)) and verdict is Verdict.WELCOME and not probes:
            meeting.welcome(accepted.sock, hello)
        else:
            accepted.sock.close()

    # ---------------------------------------------------------------- what peers call (`peer.Host`)

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def failed(self, peer: Peer, event: m.Failed) -> None:
        raise AssertionError(f"{event}: the contract has no deadline for one message")

    def touched(self, peer: Peer) -> None:
        self._touched.append(peer)

    def note(self, peer: Peer, event: m.ForTheRecord) -> None:
        if self.options.record is not None:
            path_history.write(self.options.record, peer.rank, event)

    def has_frames(self, connection: RailConnection) -> None:
        if not connection.blocked:
            self._writers[connection] = None

    def watch(self, connection: RailConnection) -> None:
        self._watch.add(connection.sock, READ, functools.partial(self._ready, connection))

    def unwatch(self, connection: RailConnection) -> None:
        self._watch.remove(connection.sock)
        self._writers.pop(connection, None)

    def restore(self, peer: Peer, rail: int) -> None:
        self._meeting.restore(peer, rail)

    def look_for(self, peer: Peer, rail: int) -> None:
        self._meeting.look_for(peer, rail)

    # ---------------------------------------------------------------- moving bytes

    def _ready(self, connection: RailConnection, mask: int) -> None:
        if mask & (READ | ENDED):
            peer = self._peers.get(connection.peer)
            assert peer is not None
            peer.read(connection, self.options.read_bytes)
        if mask & WRITE and not connection.closed:
            connection.blocked = False
            self._writers[connection] = None

    def _write(self) -> None:
        """Each connection that has frames sends its share; the rest is sent in the next turn, when the socket is writable."""
        while self._writers:
            self._watch.look_first()  # nothing is to be handed to what has failed
            connection = next(iter(self._writers), None)
            if connection is None:
                return
            del self._writers[connection]
            connection.write(self.options.write_bytes)
            if not connection.closed and connection.idle == connection.watches_writing:
                connection.watches_writing = not connection.idle
                self._watch.change(connection.sock, READ if connection.idle else READ | WRITE)
            if not connection.idle:
                connection.blocked = True  # its turn is over

    def _tick(self) -> None:
        """Whatever is due now; all that had arrived was read."""
        for rank, due in list(self._dues.items()):
            if due <= self.now and rank in self._peers:
                self._peers[rank].tick()
        self._watch.run_timers(self.now)
        self.flush()
        self._settle()

    def _settle(self) -> None:
        """Read the deadlines of the links that got events."""
        if not self._touched:
            return
        self._settled_s = self.now
        for peer in self._touched:
            peer.settle()
            peer.is_touched = False
            self._dues[peer.rank] = peer.link.deadline
        self._touched.clear()
        self._due = min(self._dues.values(), default=math.inf)

    # ---------------------------------------------------------------- ends

    def _living(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if not peer.ended and not peer.left]

    def _linger(self, until: float) -> None:
        """Until the kernel has what was written, and the peers' kernels too, or the time is over."""
        while time.monotonic() < until:
            self.flush()
            if all(c is None or c.emptied() for peer in self._peers.values() for c in peer.rails):
                return
            self._watch.dispatch(0.001)

    def disown(self) -> None:
        self._closed, self._descriptors = True, {}
        self._watch.disown()

    def _leave(self, cause: Cause | None) -> None:
        """End the generation here; living peers get the cause if there is one."""
        self._meeting.over = True
        self._meeting.stop_looking()
        for peer in self._peers.values():
            if cause is not None and not peer.ended and not peer.left:
                peer.say_why(peer.link.first.settle(cause))
            peer.end_quietly()
            self._stale += peer.link.stale
        self._peers.clear()
        self._touched.clear()
        self._dues.clear()
        self._writers.clear()
        self._due = math.inf
