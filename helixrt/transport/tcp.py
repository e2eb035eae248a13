"""An endpoint over TCP: one or several rails to every peer, all driven by whoever calls `progress`.

In: the run's secret and this host's rails. Out: an `Endpoint` (`contract.py`). The lower rank of a pair dials, one
connection per rail and one more for the reason of an end, which so never queues behind data. What arrives, breaks or
is due goes to the pair's `Link` machine (`tcp_peer`); connections before they count are `tcp_admission`'s.

How failures are told apart (SHIFT section 4.3 leaves that to the NIC's completion codes):

- The other end's kernel closed the connection: it is dialled or knocked at once. Nobody listens there any more: the
  peer's process is gone, and that is known in a round trip. Somebody does: the connection alone broke.
- No route, no acknowledgement (TCP_USER_TIMEOUT), silence on one rail while others speak: the path.
- Silence on all: heartbeats (`protocol/liveness.py`), which the endpoint sends and checks, unless it has no period.

A peer whose generation is newer stays in the door, proved, until this end connects to that generation too. A process
that is forked off while an endpoint lives holds its connections open: then only heartbeats tell of a death.
"""

from __future__ import annotations

import functools
import math
import os
import random
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from helixrt.errors import Cause, ConfigError, Retryable
from helixrt.protocol import link_messages as m
from helixrt.protocol.link import Link
from helixrt.protocol.link_messages import Failure, LinkOptions
from helixrt.record import FlightRecord
from helixrt.transport import authentication, path_history, tcp_rails
from helixrt.transport.contract import Buffer, Endpoint, Outcome, Refused
from helixrt.transport.tcp_admission import Accepted, Dial, Door
from helixrt.transport.tcp_connection import Connection
from helixrt.transport.tcp_handshake import Hello, Purpose, Verdict
from helixrt.transport.tcp_peer import CONTROL, Peer
from helixrt.transport.tcp_rails import MAX_RAILS, SocketTuning, TcpRail
from helixrt.transport.tcp_watch import ENDED, READ, WRITE, Timer, Watch

_MAX_PARKED = 1024
_ROUNDS = 4  # in one `progress`, as long as there is nothing to report
_SETTLE_S = 1e-3  # who calls `progress` without a pause has the deadlines looked at that often
_KNOCKS = 5  # at a door that opens and shuts at once, as that of a dying process does


@dataclass(frozen=True, kw_only=True)
class TcpOptions:
    """The settings of a TCP endpoint. Times in seconds."""

    period_s: float | None = 1.0  # of heartbeats; None: none, and a peer that falls silent is not noticed
    link: LinkOptions = field(default_factory=LinkOptions)  # its period is the one above
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

    def __init__(self, secret: bytes, rails: Sequence[TcpRail] = (TcpRail(),), options: TcpOptions | None = None) -> None:
        if not isinstance(secret, bytes) or not secret:
            raise ConfigError("secret", "...", "must be the run's secret: bytes, not empty")
        if not 1 <= len(rails) <= MAX_RAILS:
            raise ConfigError("rails", len(rails), f"must be 1 to {MAX_RAILS}")
        self.options = options or TcpOptions()
        period = self.options.period_s
        self._link_options = replace(self.options.link, period_s=math.inf if period is None else period)
        self._tuning = replace(
            self.options.sockets, user_timeout_s=max(self.options.sockets.user_timeout_s, 2 * (period or 0.0))
        )
        self.now = time.monotonic()
        self._secret, self._rails = secret, tuple(rails)
        self._listeners = []
        try:
            for rail in self._rails:
                self._listeners.append(tcp_rails.listen(rail, self._tuning))
        except BaseException:
            for listener in self._listeners:
                listener.close()
            raise
        _call_in_forked_children()
        _living.add(self)
        self._address = tcp_rails.pack_address(self._listeners)
        self._watch = Watch()
        self._descriptors = {self._watch.descriptor: READ}
        self._door = Door(self._watch, self._listeners, secret, self._proved)
        self._parked: dict[tuple[int, int, int], Accepted] = {}  # (sender, rail, purpose)

        self._generation, self._me = -1, -1
        self._over = self._closed = False  # over: this generation has ended here
        self._connecting = False
        self._peers: dict[int, Peer] = {}
        self._dials: dict[tuple[int, int], Dial] = {}  # (rank, rail)
        self._knocks: set[Dial] = set()
        self._waits: dict[tuple[int, int], Timer] = {}  # for a rail to be restored from the other side
        self._hopeless: dict[int, str] = {}  # while connecting: rank -> why it will not come
        self._outcomes: list[Outcome] = []
        self._writers: dict[Connection, None] = {}
        self._touched: list[Peer] = []
        self._dues: dict[int, float] = {}
        self._due = math.inf
        self._settled_s = -math.inf
        self._stale = 0
        self._draw = random.Random()  # of the links, for the paths they try

    # ---------------------------------------------------------------- what a communicator calls

    def address(self) -> bytes:
        return self._address

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        self._peer(peer).send(op, index, data)

    def receive(self, peer: int, op: int, index: int, into: Buffer) -> None:
        self._peer(peer).receive(op, index, into)

    def _peer(self, rank: int) -> Peer:
        peer = self._peers.get(rank)
        if peer is None:
            raise ValueError(f"rank {rank} is no peer of this generation, or the generation is over")
        return peer

    def forget(self, op: int) -> None:
        for peer in list(self._peers.values()):
            peer.forget(op)

    def descriptors(self) -> Mapping[int, int]:
        return self._descriptors

    def progress(self, now: float) -> Sequence[Outcome]:
        if self._closed:
            return ()
        self.now = now
        if self._writers:
            self._write()
        for _ in range(_ROUNDS):  # what comes meanwhile is cheaper to take now than after another wait
            if not self._watch.dispatch():
                break
            if self._writers:
                self._write()
            if self._outcomes:
                break
        if self._touched and now > self._settled_s + _SETTLE_S:
            self._settle()
        if now >= self._due or now >= self._watch.due:
            self._tick()
        if not self._outcomes:
            return ()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def next_deadline(self) -> float | None:
        if self._closed:
            return None
        if self._outcomes or self._writers:
            return self.now
        self._settle()
        due = min(self._due, self._watch.due)
        return None if due == math.inf else due

    def refused(self) -> Refused:
        return Refused(self._door.strangers, self._stale + sum(peer.link.stale for peer in self._peers.values()))

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
        if generation < self._generation:
            raise ValueError(f"generation {generation}: this endpoint was in {self._generation} already")
        self._leave(Cause("it went on to another generation", f"rank {me}"))
        self._outcomes.clear()
        self._generation, self._me, self._over, self._connecting = generation, me, False, True
        self._hopeless = {}
        for rank, raw in peers.items():
            try:
                addresses = tcp_rails.parse_address(raw)[: len(self._rails)]
            except ValueError as error:
                self._hopeless[rank] = f"its address is not one: {error}"
                continue
            link = Link(generation, rank, len(addresses), self._link_options, self._draw)
            self._peers[rank] = Peer(self, rank, link, addresses)
        try:
            self._meet(until, stopped)
        except BaseException as error:
            self._leave(Cause(str(error), f"rank {me}"))
            raise
        finally:
            self._connecting = False

    def close(self) -> None:
        if self._closed:
            return
        until = time.monotonic() + self.options.linger_s
        while any(peer.unsaid() for peer in self._living()) and time.monotonic() < until:
            self._turn(until)
        for peer in self._living():
            peer.tell(m.Close())
        self._linger(until)
        self._leave(None)
        self._closed, self._descriptors = True, {}
        for accepted in self._parked.values():
            accepted.sock.close()
        self._parked.clear()
        self._door.close()
        self._watch.close()

    # ---------------------------------------------------------------- meeting the peers

    def _meet(self, until: float, stopped: Callable[[], bool]) -> None:
        self.now = time.monotonic()
        for key in [key for key, accepted in self._parked.items() if _generation(accepted) <= self._generation]:
            accepted = self._parked.pop(key)
            self._watch.remove(accepted.sock)
            self._proved(accepted)
        for peer in list(self._peers.values()):
            if self._me < peer.rank:
                for rail in (CONTROL, *range(len(peer.rails))):
                    self._dial(peer, rail, until, 0.01)
            else:
                self._watch.at(self.now + 0.2, functools.partial(self._look_again, peer, 0.2))
        came: dict[int, float] = {}
        while True:
            self.now = time.monotonic()
            for rank, peer in self._peers.items():
                if any(peer.rails):
                    came.setdefault(rank, self.now)
                if peer.ended or peer.left:
                    self._hopeless.setdefault(rank, peer.cause.what if peer.cause else "it closed")
            if not any(self._misses(peer, came) for peer in self._peers.values()) or self._hopeless:
                break
            if self.now >= until:
                break
            if stopped():
                raise Retryable(Cause("connecting was stopped", f"rank {self._me}"))
            self._turn(min(until, self.now + 0.1))
        late = [rank for rank in self._peers if rank not in came and rank not in self._hopeless]
        if late or self._hopeless:
            problems = [f"rank {rank}: {why}" for rank, why in sorted(self._hopeless.items())]
            if late:
                problems.append(f"rank {', '.join(map(str, sorted(late)))} had not come")
            what = f"generation {self._generation} is not complete: {'; '.join(problems)}"
            raise Retryable(Cause(what, f"rank {self._me}"))
        for peer in self._peers.values():
            for rail, connection in enumerate(peer.rails):
                if connection is None and peer.link.rails[rail].fresh:
                    self._cancel_dial(peer, rail)
                    peer.tell(m.RailDown(rail, Failure.PATH, "it did not connect at the beginning"))

    def _misses(self, peer: Peer, came: Mapping[int, float]) -> bool:
        if peer.connected():
            return False
        return peer.rank not in came or self.now < came[peer.rank] + self.options.missing_rail_s

    def _look_again(self, peer: Peer, pause_s: float) -> None:
        """Nobody dialled yet: the peer is late, or dead."""
        if self._connecting and not any(peer.rails) and not peer.ended:
            self.look_for(peer, 0)
            self._watch.at(self.now + pause_s, functools.partial(self._look_again, peer, min(2.0, 2 * pause_s)))

    def _turn(self, until: float) -> None:
        """Wait for something to do, at most until then, and do it; outcomes are kept."""
        self.now = time.monotonic()
        self._write()
        self._settle()
        wake = min(until, self._due, self._watch.due)
        self._watch.dispatch(max(0.0, wake - self.now))
        self.now = time.monotonic()
        self._write()
        self._settle()
        self._tick()

    def _proved(self, accepted: Accepted) -> None:
        """Who stands in the door knows the secret: what now?"""
        hello = accepted.hello
        assert hello is not None
        if hello.generation > self._generation:
            if hello.purpose is not Purpose.KNOCK:
                self._park(accepted, hello)
                return
            accepted.verdict(Verdict.WELCOME, self._generation)
            accepted.sock.close()
            return
        rail = CONTROL if hello.purpose is Purpose.CONTROL else hello.rail
        peer = self._peers.get(hello.sender)
        if hello.generation < self._generation:
            verdict = Verdict.STALE
            self._stale += 1
        elif self._over:
            verdict = Verdict.ENDED
        elif peer is None or hello.receiver != self._me or rail >= len(peer.rails):
            verdict = Verdict.UNKNOWN
        elif hello.sender > self._me and hello.purpose is not Purpose.KNOCK:
            verdict = Verdict.UNKNOWN
        else:
            verdict = Verdict.ENDED if peer.ended or peer.left else Verdict.WELCOME
        said = accepted.verdict(verdict, self._generation)
        if not said or verdict is not Verdict.WELCOME or hello.purpose is Purpose.KNOCK:
            accepted.sock.close()
            return
        assert peer is not None
        self._cancel_wait(peer, rail)
        peer.adopt(accepted.sock, rail, hello.incarnation)

    def _park(self, accepted: Accepted, hello: Hello) -> None:
        """It is ahead: it waits without a verdict until this end is there too."""
        key = (hello.sender, hello.rail, int(hello.purpose))
        if key not in self._parked and len(self._parked) >= _MAX_PARKED:
            key_of_oldest = next(iter(self._parked))
            self._unpark(key_of_oldest, self._parked[key_of_oldest])
        if key in self._parked:
            self._unpark(key, self._parked[key])
        self._parked[key] = accepted
        self._watch.add(accepted.sock, READ, lambda mask: self._unpark(key, accepted))

    def _unpark(self, key: tuple[int, int, int], accepted: Accepted) -> None:
        """It went away (or says more than it should)."""
        del self._parked[key]
        self._watch.remove(accepted.sock)
        accepted.sock.close()

    # ---------------------------------------------------------------- dialling

    def _dial(self, peer: Peer, rail: int, expires_s: float, pause_s: float) -> None:
        """Connect to the peer; `pause_s` before the attempt that follows a failure."""
        if (peer.rank, rail) in self._dials or peer.ended or peer.left:
            return
        incarnation = peer.link.rails[rail].incarnation + 1 if rail != CONTROL else 1
        purpose = Purpose.CONTROL if rail == CONTROL else Purpose.RAIL
        hello = self._hello(peer, purpose, rail, incarnation)
        ours = next((n for n, one in enumerate(peer.rails) if one is not None), 0) if rail == CONTROL else rail
        sock, code = tcp_rails.dial(self._rails[ours], self._tuning, *peer.addresses[ours])
        if sock is None:
            self._dial_failed(
                peer, rail, expires_s, pause_s, tcp_rails.failure_of(code), f"cannot connect: {os.strerror(code)}", None
            )
            return

        def welcomed(dial: Dial, sock: socket.socket) -> None:
            del self._dials[peer.rank, rail]
            if peer.ended or peer.left:
                sock.close()
                return
            peer.adopt(sock, rail, incarnation)
            if rail != CONTROL and peer.control is None and not self._connecting:
                self._dial(peer, CONTROL, self.now + self.options.restore_s, math.inf)

        def failed(dial: Dial, failure: Failure, reason: str, verdict: Verdict | None) -> None:
            del self._dials[peer.rank, rail]
            # Reset before the proof: the door of a dying process, or too many before it. Then at once again.
            self._dial_failed(peer, rail, expires_s, pause_s, failure, reason, verdict, again=dial.reset)

        self._dials[peer.rank, rail] = Dial(self._watch, sock, self._secret, hello, expires_s, welcomed, failed)

    def _dial_failed(
        self,
        peer: Peer,
        rail: int,
        expires_s: float,
        pause_s: float,
        failure: Failure,
        reason: str,
        verdict: Verdict | None,
        again: bool = False,
    ) -> None:
        if peer.ended or peer.left:
            return
        first = self._connecting and (rail == CONTROL or peer.link.rails[rail].fresh)
        if first and (verdict is not None or failure is Failure.PEER_GONE):
            self._hopeless.setdefault(peer.rank, reason)
        elif (first or again) and self.now + pause_s < expires_s:
            retry = functools.partial(self._dial, peer, rail, expires_s, min(0.5, 2 * pause_s))
            self._watch.at(self.now + pause_s, retry)
        elif rail != CONTROL and not first:
            peer.tell(m.RailDown(rail, failure, reason))

    def _hello(self, peer: Peer, purpose: Purpose, rail: int, incarnation: int) -> Hello:
        number = 0 if rail == CONTROL else rail
        return Hello(purpose, self._generation, self._me, peer.rank, number, incarnation, authentication.nonce())

    def restore(self, peer: Peer, rail: int) -> None:
        expires_s = self.now + self.options.restore_s
        if self._me < peer.rank:
            self._dial(peer, rail, expires_s, 0.002)
            return
        self._cancel_wait(peer, rail)
        gone = m.RailDown(rail, Failure.PATH, "the peer did not connect again")

        def over() -> None:
            self._waits.pop((peer.rank, rail), None)
            peer.tell(gone)

        self._waits[peer.rank, rail] = self._watch.at(expires_s, over)

    def look_for(self, peer: Peer, rail: int) -> None:
        if (peer.rank, rail) not in self._dials:
            self._knock(peer, rail, _KNOCKS)

    def _knock(self, peer: Peer, rail: int, times: int) -> None:
        if peer.ended or peer.left:
            return
        sock, code = tcp_rails.dial(self._rails[rail], self._tuning, *peer.addresses[rail])
        if sock is None:
            self._nobody(peer, rail, tcp_rails.failure_of(code), f"cannot connect: {os.strerror(code)}")
            return

        def failed(dial: Dial, failure: Failure, reason: str, verdict: Verdict | None) -> None:
            self._knocks.discard(dial)
            if dial.reset and times > 1:
                self._watch.at(self.now + 0.002 * 2 ** (_KNOCKS - times), functools.partial(self._knock, peer, rail, times - 1))
            else:
                self._nobody(peer, rail, failure, reason)

        def answered(dial: Dial, sock: socket.socket) -> None:
            self._knocks.discard(dial)
            sock.close()

        hello = self._hello(peer, Purpose.KNOCK, rail, 0)
        expires_s = self.now + self.options.restore_s
        self._knocks.add(Dial(self._watch, sock, self._secret, hello, expires_s, answered, failed))

    def _nobody(self, peer: Peer, rail: int, failure: Failure, reason: str) -> None:
        """Nobody there for us: no process (PEER_GONE), or one that is done with this generation (PROGRAM)."""
        if failure not in (Failure.PEER_GONE, Failure.PROGRAM) or peer.ended or peer.left:
            return
        if self._connecting and not any(peer.rails):
            self._hopeless.setdefault(peer.rank, reason)
        elif peer.rails[rail] is None:
            peer.tell(m.RailDown(rail, failure, reason))

    def _cancel_dial(self, peer: Peer, rail: int) -> None:
        dial = self._dials.pop((peer.rank, rail), None)
        if dial is not None:
            dial.cancel()

    def _cancel_wait(self, peer: Peer, rail: int) -> None:
        wait = self._waits.pop((peer.rank, rail), None)
        if wait is not None:
            wait.cancel()

    # ---------------------------------------------------------------- what peers call (`tcp_peer.Host`)

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def touched(self, peer: Peer) -> None:
        self._touched.append(peer)

    def note(self, peer: Peer, event: m.ForTheRecord) -> None:
        if self.options.record is not None:
            path_history.write(self.options.record, peer.rank, event)

    def has_frames(self, connection: Connection) -> None:
        if not connection.blocked:
            self._writers[connection] = None

    def watch(self, connection: Connection) -> None:
        self._watch.add(connection.sock, READ, functools.partial(self._ready, connection))

    def unwatch(self, connection: Connection) -> None:
        self._watch.remove(connection.sock)
        self._writers.pop(connection, None)

    # ---------------------------------------------------------------- moving bytes

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & (READ | ENDED):
            peer = self._peers.get(connection.peer)
            assert peer is not None
            peer.read(connection, self.options.read_bytes)
        if mask & WRITE and not connection.closed:
            connection.blocked = False
            self._writers[connection] = None

    def _write(self) -> None:
        """Each connection that has frames gets its share; the rest goes when the kernel says so, in the next turn."""
        while self._writers:
            connection = next(iter(self._writers))
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
        self._write()
        self._settle()

    def _settle(self) -> None:
        """Learn the deadlines of the links that heard something."""
        if not self._touched:
            return
        self._settled_s = self.now
        for peer in self._touched:
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
            self._write()
            if all(c is None or c.emptied() for peer in self._peers.values() for c in peer.rails):
                return
            self._watch.dispatch(0.001)

    def _disown(self) -> None:
        """In a forked child: the sockets are the parent's."""
        self._closed, self._descriptors = True, {}
        self._watch.disown()

    def _leave(self, cause: Cause | None) -> None:
        """End the generation here; living peers get the cause if there is one."""
        for dial in (*self._dials.values(), *self._knocks):
            dial.cancel()
        for wait in self._waits.values():
            wait.cancel()
        self._dials.clear()
        self._knocks.clear()
        self._waits.clear()
        for peer in self._peers.values():
            if cause is not None and not peer.ended and not peer.left:
                peer.say_why(peer.link.first.settle(cause))
            peer.end_quietly()
            self._stale += peer.link.stale
        self._peers, self._over = {}, True
        self._touched.clear()
        self._dues.clear()
        self._writers.clear()
        self._due = math.inf


_living: weakref.WeakSet[TcpEndpoint] = weakref.WeakSet()


@functools.cache
def _call_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for endpoint in list(_living):
        endpoint._disown()


def _generation(accepted: Accepted) -> int:
    assert accepted.hello is not None
    return accepted.hello.generation
