"""How the ranks of one generation come together over TCP, and find each other again when a connection breaks.

In: the peers with their addresses, and authenticated connections of the listener. Out: connections for the peers to adopt, or
why a peer will not come. The lower rank of a pair dials, one connection per rail and the control connection; the higher one
waits. If either does not know whether the peer's process listens, it sends a probe: a handshake that leaves no connection.

A peer that has not connected yet is probed. A running peer answers probes also while it is busy otherwise (behind, or
waiting for others). One whose process does not run its own code for a while (it holds its interpreter lock) does not answer,
but its kernel accepts the connection and keeps it open: that counts as alive, too. A peer with neither is declared lost after
the same time as on a link. The kernel of a stopped process accepts, too; its monitor process reports it (`transport/monitor`).
"""

from __future__ import annotations

import functools
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from helixrt.errors import Cause, Retryable
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.messages import Failure
from helixrt.protocol.liveness import BEAT, Liveness
from helixrt.transport import authentication
from helixrt.transport.tcp import rails as tcp_rails
from helixrt.transport.tcp.admission import Dial
from helixrt.transport.tcp.handshake import Hello, Purpose, Verdict
from helixrt.transport.tcp.interfaces import trouble_of_all
from helixrt.transport.tcp.peer import CONTROL, Peer, with_own_trouble
from helixrt.transport.tcp.rails import SocketTuning
from helixrt.transport.tcp.watch import Timer, Watch

_UNANSWERED = 0.5  # of a period: an unanswered probe is cancelled after so long; the next one tests the kernel again
_PROBES = 5  # attempts if connections are reset at once, as by a process that is ending
_LOOK_S = 0.05  # between two probes of a peer that has not connected
_LOOKS_PER_S = 500  # at all of them together, at most
_REST = 4.0  # times the duration of a probe: until the next one of that peer. On a busy machine probes would delay connecting
_LONGEST_REST_S = 0.5  # without heartbeats; else BEAT of a period


@dataclass(frozen=True)
class Means:
    """What every meeting of an endpoint works with. Times in seconds."""

    watch: Watch
    secret: bytes
    tuning: SocketTuning
    missing_rail_s: float
    restore_s: float
    period_s: float | None = None  # of heartbeats


class Host(Protocol):
    """What a meeting needs of its endpoint."""

    now: float

    def turn(self, until: float) -> None:
        """Wait for something to do, at most until then, and do it."""

    def joined(self, peer: Peer, sock: socket.socket, rail: int, incarnation: int, dialled: bool) -> None:
        """A proved connection, for the peer to have."""


class Meeting:
    """One generation's: `peers` must be added before `gather`. When it is `over`, no connection is accepted any more."""

    def __init__(self, host: Host, means: Means, generation: int, me: int) -> None:
        self.generation, self.me = generation, me
        self.peers: dict[int, Peer] = {}
        self.hopeless: dict[int, str] = {}  # rank -> why it will not come
        self.over, self._gathering = False, True  # gathering: from the beginning until `gather` has ended
        self._host, self._means, self._watch = host, means, means.watch
        self._dials: dict[tuple[int, int], Dial] = {}  # (rank, rail)
        self._probes: set[Dial] = set()
        self._waits: dict[tuple[int, int], Timer] = {}  # for a rail to be restored from the other side
        self._lives: dict[int, Liveness] = {}  # of peers that have not come yet
        self._resting: dict[int, float] = {}  # rank -> until when it is not probed again

    # ---------------------------------------------------------------- gathering

    def gather(self, until: float, stopped: Callable[[], bool]) -> None:
        """Reach all peers. Raises Retryable, which names those that did not come until then, or when `stopped()`."""
        try:
            self._gather(until, stopped)
        finally:
            self._gathering = False

    def _gather(self, until: float, stopped: Callable[[], bool]) -> None:
        period_s, pause_s = self._means.period_s, max(_LOOK_S, len(self.peers) / _LOOKS_PER_S)
        for peer in list(self.peers.values()):
            if self.me < peer.rank:
                for rail in (CONTROL, *range(len(peer.rails))):
                    self._dial(peer, rail, until, 0.01)
            if period_s is not None:
                self._lives[peer.rank] = Liveness(period_s, self._host.now)
            self._watch.at(self._host.now + pause_s, functools.partial(self._look_again, peer, pause_s))
        look_s = 0.1 if period_s is None else min(0.1, BEAT * period_s)
        came: dict[int, float] = {}
        while True:
            now = self._host.now = time.monotonic()
            for rank, peer in self.peers.items():
                if any(peer.rails):
                    came.setdefault(rank, now)
                elif rank in self._lives and self._lives[rank].silent(now):
                    silence_s = now - self._lives[rank].heard_s
                    self.hopeless.setdefault(rank, f"no sign of life for {silence_s:.2f} s")
                if peer.ended or peer.left:
                    self.hopeless.setdefault(rank, peer.cause.what if peer.cause else "it closed")
            if not any(self._misses(peer, came) for peer in self.peers.values()) or self.hopeless:
                break
            if now >= until:
                break
            if stopped():
                raise Retryable(Cause("connecting was stopped", f"rank {self.me}"))
            self._host.turn(min(until, now + look_s))
        late = [rank for rank in self.peers if rank not in came and rank not in self.hopeless]
        if late or self.hopeless:
            problems = [f"rank {rank}: {why}" for rank, why in sorted(self.hopeless.items())]
            if late:
                problems.append(f"rank {', '.join(map(str, sorted(late)))} had not come")
            what = f"generation {self.generation} is not complete: {'; '.join(problems)}"
            cause = Cause(what, f"rank {self.me}", peers=tuple(sorted({*late, *self.hopeless})))
            missed = [self.peers[rank] for rank in cause.peers if rank in self.peers]  # else its address was no address
            own = next(filter(None, (trouble_of_all(peer.ways) or peer.own_trouble() for peer in missed)), "")
            raise Retryable(with_own_trouble(cause, own) if own else cause)
        for peer in self.peers.values():
            for rail in range(len(peer.rails)):
                if peer.never_came(rail):
                    self._cancel_dial(peer, rail)
                    peer.tell(m.RailDown(rail, Failure.PATH, "it did not connect at the beginning"))

    def _misses(self, peer: Peer, came: Mapping[int, float]) -> bool:
        if peer.connected():
            return False
        return peer.rank not in came or self._host.now < came[peer.rank] + self._means.missing_rail_s

    def _look_again(self, peer: Peer, pause_s: float) -> None:
        """The peer has not connected yet: it is late, does not respond, or has ended."""
        if self._gathering and not any(peer.rails) and not peer.ended:
            under_way = any(dial.hello.receiver == peer.rank for dial in self._probes)
            if not under_way and self._host.now >= self._resting.get(peer.rank, -math.inf):
                self._probe(peer, 0, _PROBES)
            self._watch.at(self._host.now + pause_s, functools.partial(self._look_again, peer, pause_s))

    @property
    def _longest_rest_s(self) -> float:
        period_s = self._means.period_s
        return _LONGEST_REST_S if period_s is None else BEAT * period_s

    # ---------------------------------------------------------------- those who come

    def verdict(self, hello: Hello) -> Verdict:
        """The answer to an authenticated connection, of this generation or another; for a later one only probes ask."""
        if hello.generation > self.generation:
            return Verdict.WELCOME
        if hello.generation < self.generation:
            return Verdict.STALE
        if self.over:
            return Verdict.ENDED
        peer, probes = self.peers.get(hello.sender), hello.purpose is Purpose.PROBE
        if peer is None or hello.receiver != self.me or _rail(hello) >= len(peer.rails):
            return Verdict.UNKNOWN
        if hello.sender > self.me and not probes:
            return Verdict.UNKNOWN
        return Verdict.ENDED if peer.ended or peer.left else Verdict.WELCOME

    def welcome(self, sock: socket.socket, hello: Hello) -> None:
        """The connection is to be kept; the verdict WELCOME was sent."""
        peer, rail = self.peers[hello.sender], _rail(hello)
        self._cancel_wait(peer, rail)
        self._host.joined(peer, sock, rail, hello.incarnation, False)

    # ---------------------------------------------------------------- dialling

    def _dial(self, peer: Peer, rail: int, expires_s: float, pause_s: float) -> None:
        """Connect to the peer; `pause_s` before the attempt that follows a failure."""
        if (peer.rank, rail) in self._dials or peer.ended or peer.left:
            return
        incarnation = peer.link.rails[rail].incarnation + 1 if rail != CONTROL else 1
        purpose = Purpose.CONTROL if rail == CONTROL else Purpose.RAIL
        hello = self._hello(peer, purpose, rail, incarnation)
        ours = next((n for n, one in enumerate(peer.rails) if one is not None), 0) if rail == CONTROL else rail
        sock, code = tcp_rails.dial(peer.ways[ours], self._means.tuning, *peer.addresses[ours])
        if sock is None:
            reason = f"cannot connect: {os.strerror(code)}"
            self._dial_failed(peer, rail, expires_s, pause_s, tcp_rails.failure_of(code), reason, None)
            return

        def welcomed(dial: Dial, sock: socket.socket) -> None:
            del self._dials[peer.rank, rail]
            if peer.ended or peer.left:
                sock.close()
                return
            self._host.joined(peer, sock, rail, incarnation, True)
            if rail != CONTROL and peer.control is None and not self._gathering:
                self._dial(peer, CONTROL, self._host.now + self._means.restore_s, math.inf)

        def failed(dial: Dial, failure: Failure, reason: str, verdict: Verdict | None) -> None:
            del self._dials[peer.rank, rail]
            # Reset before the proof: the process is ending, or has too many half-open connections. Then try again at once.
            self._dial_failed(peer, rail, expires_s, pause_s, failure, reason, verdict, again=dial.reset)

        self._dials[peer.rank, rail] = Dial(self._watch, sock, self._means.secret, hello, expires_s, welcomed, failed)

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
        now = self._host.now
        first = self._gathering and (rail == CONTROL or peer.link.rails[rail].fresh)
        if first and (verdict is not None or failure is Failure.PEER_GONE):
            self.hopeless.setdefault(peer.rank, reason)
        elif (first or again) and now + pause_s < expires_s:
            retry = functools.partial(self._dial, peer, rail, expires_s, min(0.5, 2 * pause_s))
            self._watch.at(now + pause_s, retry)
        elif rail != CONTROL and not first:
            peer.tell(m.RailDown(rail, failure, reason))

    def _hello(self, peer: Peer, purpose: Purpose, rail: int, incarnation: int) -> Hello:
        number = 0 if rail == CONTROL else rail
        return Hello(purpose, self.generation, self.me, peer.rank, number, incarnation, authentication.nonce())

    def restore(self, peer: Peer, rail: int) -> None:
        """Bring a rail back, in one attempt; the machine hears how that ends."""
        expires_s = self._host.now + self._means.restore_s
        if self.me < peer.rank:
            self._dial(peer, rail, expires_s, 0.002)
            return
        self._cancel_wait(peer, rail)
        gone = m.RailDown(rail, Failure.PATH, "the peer did not connect again")

        def over() -> None:
            self._waits.pop((peer.rank, rail), None)
            peer.tell(gone)

        self._waits[peer.rank, rail] = self._watch.at(expires_s, over)

    # ---------------------------------------------------------------- probing

    def look_for(self, peer: Peer, rail: int) -> None:
        """Probe whether a process listens there. If none does, the machine gets an event."""
        if (peer.rank, rail) not in self._dials:
            self._probe(peer, rail, _PROBES)

    def _probe(self, peer: Peer, rail: int, times: int) -> None:
        if peer.ended or peer.left:
            return
        sock, code = tcp_rails.dial(peer.ways[rail], self._means.tuning, *peer.addresses[rail])
        if sock is None:
            self._nobody(peer, rail, tcp_rails.failure_of(code), f"cannot connect: {os.strerror(code)}")
            return

        begun_s = self._host.now

        def rest(dial: Dial) -> None:
            self._probes.discard(dial)
            self._resting[peer.rank] = self._host.now + min(_REST * (self._host.now - begun_s), self._longest_rest_s)

        def failed(dial: Dial, failure: Failure, reason: str, verdict: Verdict | None) -> None:
            rest(dial)
            if dial.open and verdict is None and peer.rank in self._lives:  # its kernel accepted, its process has not run
                self._lives[peer.rank].heard(dial.open_s)
            if dial.reset and times > 1:
                again = functools.partial(self._probe, peer, rail, times - 1)
                self._watch.at(self._host.now + 0.002 * 2 ** (_PROBES - times), again)
            else:
                self._nobody(peer, rail, failure, reason)

        def answered(dial: Dial, sock: socket.socket) -> None:
            sock.close()
            rest(dial)
            if peer.rank in self._lives:
                self._lives[peer.rank].heard(self._host.now)

        hello = self._hello(peer, Purpose.PROBE, rail, 0)
        expires_s = self._host.now + self._means.restore_s
        if self._gathering and self._means.period_s is not None:
            expires_s = min(expires_s, self._host.now + _UNANSWERED * self._means.period_s)
        self._probes.add(Dial(self._watch, sock, self._means.secret, hello, expires_s, answered, failed))

    def _nobody(self, peer: Peer, rail: int, failure: Failure, reason: str) -> None:
        """No process listens (PEER_GONE), or it is done with this generation (PROGRAM)."""
        if failure not in (Failure.PEER_GONE, Failure.PROGRAM) or peer.ended or peer.left:
            return
        if self._gathering and not any(peer.rails):
            self.hopeless.setdefault(peer.rank, reason)
        else:
            peer.nobody(rail, failure, reason)

    # ---------------------------------------------------------------- ends

    def _cancel_dial(self, peer: Peer, rail: int) -> None:
        dial = self._dials.pop((peer.rank, rail), None)
        if dial is not None:
            dial.cancel()

    def _cancel_wait(self, peer: Peer, rail: int) -> None:
        wait = self._waits.pop((peer.rank, rail), None)
        if wait is not None:
            wait.cancel()

    def stop_looking(self) -> None:
        """Cancel all connection attempts, probes and waits."""
        for dial in (*self._dials.values(), *self._probes):
            dial.cancel()
        for wait in self._waits.values():
            wait.cancel()
        self._dials.clear()
        self._probes.clear()
        self._waits.clear()


def _rail(hello: Hello) -> int:
    return CONTROL if hello.purpose is Purpose.CONTROL else hello.rail
