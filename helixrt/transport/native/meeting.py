"""How the ranks of one generation connect, and find each other again when a connection breaks.

In: the peers with their addresses, authenticated connections of the listener, and what the engine asks for and reports. Out:
connected sockets for the engine, or why a peer will not come. The lower rank of a pair dials, one connection per rail; the
higher one waits. If it does not know whether the peer's process listens, it sends a probe: a handshake that leaves no
connection.

Until all have connected, peers are probed. A running peer answers probes in its own thread of `links`. One whose interpreter
lock is held does not answer, but its kernel takes the connection and keeps it open: that counts as alive, too. A peer with
neither is lost after the same time as on a link. The kernel of a stopped process takes connections, too: of a process on this
host its state is looked at; of one on another host only the engine's beats tell, once it is connected.

Everything here runs in the one thread of `links`, but `gathered`, which another thread waits for.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from helixrt.errors import Cause, Retryable
from helixrt.native.engine import Engine, ring_bytes
from helixrt.native.library import Failure as NativeFailure
from helixrt.protocol.link.messages import Failure
from helixrt.protocol.liveness import BEAT, LOOK, Liveness
from helixrt.transport import authentication
from helixrt.transport.native.address import Address, listener, parse_address, shares_memory
from helixrt.transport.native.admission import Accepted
from helixrt.transport.native.causes import parse_cause
from helixrt.transport.native.dial import Dial, Way
from helixrt.transport.native.handshake import Hello, Purpose, Verdict
from helixrt.transport.native.memory import make_memory
from helixrt.transport.native.pairs import NUMBERS_AHEAD, Pair, PairRail, rail_trouble
from helixrt.transport.stopped_processes import StoppedProcesses
from helixrt.transport.tcp import rails as tcp_rails
from helixrt.transport.tcp.rails import SocketTuning, TcpRail
from helixrt.transport.tcp.watch import Timer, Watch

_GONE = (Failure.PEER_GONE, Failure.PROGRAM)
_UNANSWERED = 0.5  # of a period: an unanswered probe is cancelled after so long; the next one tests the kernel again
_PROBES = 5  # attempts if connections are reset at once, as by a process that is ending
_LOOK_S = 0.05  # between two probes of a peer that has not connected
_LOOKS_PER_S = 500  # at all of them together, at most
_REST = 4.0  # times the duration of a probe: until the next one of that peer. On a busy machine probes would delay connecting
_LONGEST_REST_S = 0.5  # without heartbeats; else BEAT of a period
_LONGEST_PAUSE_S = 0.5  # between two attempts to dial a peer that has not come yet
_PROCESS_S = 0.1  # how often to ask which process listens at a local peer's address


@dataclass(frozen=True)
class Means:
    """What every meeting of a rank works with. Times in seconds."""

    engine: Engine
    watch: Watch
    secret: bytes
    protocol: int
    address: Address  # this rank's
    rails: tuple[TcpRail, ...]  # this host's
    tuning: SocketTuning
    missing_rail_s: float
    restore_s: float
    period_s: float | None  # of heartbeats


class Meeting:
    """One generation's. Raises ValueError for ranks that are none."""

    def __init__(self, means: Means, generation: int, me: int, peers: Mapping[int, bytes], until_s: float) -> None:
        if me < 0 or me in peers or min(peers, default=0) < 0:
            raise ValueError(f"rank {me} with peers {sorted(peers)}")
        self.generation, self.me = generation, me
        self.over = False  # no connection is accepted any more
        self.gathered = threading.Event()  # all have come, or `error` says why not
        self.error: Retryable | None = None
        self.pairs: dict[int, Pair] = {}
        self.hopeless: dict[int, str] = {}  # rank -> why it will not come
        self._left: dict[int, str] = {}  # those that gave up themselves, probably because of one that has not come
        self._means, self._watch, self._until_s = means, means.watch, until_s
        self._stopped = None if means.period_s is None else StoppedProcesses(means.period_s)
        self._timers: set[Timer] = set()
        now = time.monotonic()
        for rank, raw in sorted(peers.items()):
            try:
                ways = self._ways(parse_address(raw))
            except ValueError as error:
                self.hopeless[rank] = f"its address is not one: {error}"
                continue
            life = None if means.period_s is None else Liveness(means.period_s, now)
            self.pairs[rank] = Pair(rank, [PairRail(way) for way in ways], life)

    def _ways(self, theirs: Address) -> list[Way]:
        if shares_memory(self._means.address, theirs):
            return [Way(self._means.rails[0], name=theirs.name)]
        return [Way(ours, host, port) for ours, (host, port) in zip(self._means.rails, theirs.rails, strict=False)]

    def rail_counts(self) -> list[int]:
        """Of every rank, from 0."""
        size = 1 + max(self.me, *self.pairs, *self.hopeless, 0)
        return [len(self.pairs[rank].rails) if rank in self.pairs else 0 for rank in range(size)]

    # ---------------------------------------------------------------- gathering

    def begin(self) -> None:
        """The engine is in this generation."""
        now = time.monotonic()
        pause_s = max(_LOOK_S, len(self.pairs) / _LOOKS_PER_S)
        for pair in self.pairs.values():
            for number, rail in enumerate(pair.rails):
                rail.asked = 1
                if self.me < pair.rank:
                    self._dial(pair, number, self._until_s, 0.01)
            self._at(now + pause_s, functools.partial(self._look_again, pair, pause_s))
        self._look()

    def _look(self) -> None:
        """Regularly while peers gather, and in between after what may have changed it."""
        if self.gathered.is_set():
            return
        period_s = self._means.period_s
        self.check()
        if not self.gathered.is_set():
            look_s = 0.1 if period_s is None else min(0.1, LOOK * period_s)
            self._at(time.monotonic() + look_s, self._look)

    def check(self) -> None:
        """Find out whether all have come, or one will not."""
        if self.gathered.is_set():
            return
        now = time.monotonic()
        for pair in self.pairs.values():
            if pair.came_s is None and pair.rank not in self.hopeless and (why := self._silent(pair, now)):
                self.hopeless[pair.rank] = why
        if self.hopeless or self._left or now >= self._until_s:
            self._fail()
        elif not any(self._misses(pair, now) for pair in self.pairs.values()):
            for pair in self.pairs.values():
                for number, rail in enumerate(pair.rails):
                    if not rail.number:
                        rail.stop()
                        self._down(pair, number, Failure.PATH, "it did not connect at the beginning")
            self.gathered.set()

    def _silent(self, pair: Pair, now: float) -> str:
        if pair.life is not None and pair.life.silent(now):
            return f"no sign of life for {now - pair.life.heard_s:.2f} s"
        if self._stopped is not None and (stopped_s := self._stopped.stopped_s(pair.process, now)) is not None:
            return f"its process on this host has been stopped for {stopped_s:.2f} s"
        return ""

    def _misses(self, pair: Pair, now: float) -> bool:
        if pair.complete:
            return False
        return pair.came_s is None or now < pair.came_s + self._means.missing_rail_s

    def _fail(self) -> None:
        late = [rank for rank, pair in self.pairs.items() if pair.came_s is None and rank not in self.hopeless]
        problems = [f"rank {rank}: {why}" for rank, why in sorted({**self._left, **self.hopeless}.items())]
        if late:
            problems.append(f"rank {', '.join(map(str, sorted(late)))} had not come")
        # One that gave up did so because of another, probably of one that has not come; what is known to be gone comes first.
        over = time.monotonic() >= self._until_s
        named = {*self.hopeless, *late} if over else set(self.hopeless) or set(late)
        peers = tuple(sorted(named or self._left))
        what = f"generation {self.generation} is not complete: {'; '.join(problems)}"
        cause = Cause(what, f"rank {self.me}", peers=peers)
        missed = [self.pairs[rank] for rank in peers if rank in self.pairs]
        own = next(filter(None, (pair.own_trouble() for pair in missed)), "")
        self.give_up(with_own_trouble(cause, own) if own else cause)

    def give_up(self, cause: Cause) -> None:
        """End the gathering without success."""
        if not self.gathered.is_set():
            self.error = Retryable(cause)
            self.stop()
            self.gathered.set()

    def _look_again(self, pair: Pair, pause_s: float) -> None:
        """The peer has not connected yet: it is late, does not respond, or has ended."""
        if self.gathered.is_set() or pair.came_s is not None:
            return
        now = time.monotonic()
        if not pair.probes and now >= pair.resting_s:
            self._probe(pair, 0, _PROBES)
        if pair.local and not pair.process:
            pair.process = listener(pair.rails[0].way.name) or 0
        self._at(now + pause_s, functools.partial(self._look_again, pair, pause_s))

    # ---------------------------------------------------------------- what the engine reports

    def ended(self, rank: int, text: str) -> None:
        """The engine's generation is over, because of that rank (-1: of none)."""
        if not self.gathered.is_set():
            said = parse_cause(text)
            (self.hopeless if said is None else self._left)[rank] = said.what if said else text
            self._fail()
        self.stop()

    def closed(self, rank: int) -> None:
        """It closed in order."""
        pair = self.pairs.get(rank)
        if pair is not None:
            pair.stop()
        if not self.gathered.is_set():
            self._left[rank] = "it closed"
            self._fail()

    def restore(self, rank: int, number: int, connection: int) -> None:
        """Bring a rail back as its connection of that number, in one attempt; the engine hears how it ends."""
        pair = self.pairs.get(rank)
        if self.over or pair is None or pair.rails[number].number >= connection:
            return
        rail, expires_s = pair.rails[number], time.monotonic() + self._means.restore_s
        rail.stop()
        rail.asked = connection
        if self.me < rank:
            self._dial(pair, number, expires_s, 0.002)
            return
        over = functools.partial(self._down, pair, number, Failure.PATH, "the peer did not connect again")
        rail.wait = self._at(expires_s, over)
        self._probe(pair, number, _PROBES)  # if no process listens, that is known at once

    def _down(self, pair: Pair, number: int, failure: Failure, reason: str) -> None:
        """The answer to what the engine asked for."""
        rail = pair.rails[number]
        rail.stop()
        if not rail.asked or self.over:
            return
        rail.asked = 0
        if failure is Failure.PATH and (own := rail_trouble(rail)):
            failure, reason = Failure.DEVICE, f"{reason}; here, {own}"
        with suppress(Retryable):  # the generation has ended; the event is on its way
            self._means.engine.rail_down(pair.rank, number, NativeFailure[failure.name], reason)

    def _up(self, pair: Pair, number: int, connection: int, sock: socket.socket, memory: int, first: bool) -> None:
        rail = pair.rails[number]
        if connection >= rail.asked:
            rail.asked = 0
            rail.stop()
        rail.number = max(rail.number, connection)
        if pair.came_s is None:
            pair.came_s = time.monotonic()
        with suppress(Retryable):  # the generation has ended; the event is on its way
            if memory < 0:
                self._means.engine.rail_up(pair.rank, number, connection, sock)
            else:
                self._means.engine.rail_up_memory(pair.rank, number, connection, sock, memory, first)
        self.check()

    # ---------------------------------------------------------------- those who come

    def verdict(self, hello: Hello) -> Verdict:
        """The answer to an authenticated connection of this generation or another; for a later one only probes ask."""
        if hello.generation > self.generation:
            return Verdict.WELCOME
        if hello.generation < self.generation:
            return Verdict.STALE
        if self.over:
            return Verdict.ENDED
        pair = self.pairs.get(hello.sender)
        if pair is None or hello.receiver != self.me or hello.rail >= len(pair.rails):
            return Verdict.UNKNOWN
        if hello.purpose is Purpose.PROBE:
            return Verdict.WELCOME
        known = pair.rails[hello.rail].number
        if hello.sender > self.me or hello.memory != pair.local or hello.number > known + NUMBERS_AHEAD:
            return Verdict.UNKNOWN
        return Verdict.WELCOME

    def welcome(self, accepted: Accepted) -> None:
        """A rail of this generation, which `verdict` welcomed: say so and take it."""
        hello = accepted.hello
        assert hello is not None
        memory = -1
        try:
            if hello.memory:
                memory = make_memory(ring_bytes())
            said = accepted.verdict(Verdict.WELCOME, self.generation, memory)
        except OSError:  # no descriptors or memory: the peer dials again
            said = False
        if said:
            self._up(self.pairs[hello.sender], hello.rail, hello.number, accepted.sock, memory, False)
        else:
            accepted.sock.close()
        if memory >= 0:
            os.close(memory)

    # ---------------------------------------------------------------- dialling

    def _dial(self, pair: Pair, number: int, expires_s: float, pause_s: float) -> None:
        """Connect to the peer, until the time is over; `pause_s` before the attempt that follows a failure."""
        rail = pair.rails[number]
        if self.over or rail.dial is not None or not rail.asked:
            return
        rail.wait = None  # a pause that is over
        connection = rail.asked

        def welcomed(dial: Dial, sock: socket.socket, memory: int) -> None:
            rail.dial = None
            self._up(pair, number, connection, sock, memory, True)
            if memory >= 0:
                os.close(memory)

        def failed(dial: Dial, failure: Failure, reason: str) -> None:
            rail.dial = None
            # Reset before the proof: the process is ending, or has too many half-open connections. Then try again at once.
            self._dial_failed(pair, number, expires_s, pause_s, failure, reason, again=dial.reset)

        sock, code = rail.way.dial(self._means.tuning)
        if sock is None:
            reason = f"cannot connect: {os.strerror(code)}"
            self._dial_failed(pair, number, expires_s, pause_s, tcp_rails.failure_of(code), reason, again=pair.local)
            return
        hello = self._hello(pair, Purpose.RAIL, number, connection)
        rail.dial = self._begin_dial(sock, hello, expires_s, welcomed, failed)

    def _begin_dial(
        self,
        sock: socket.socket,
        hello: Hello,
        expires_s: float,
        welcomed: Callable[[Dial, socket.socket, int], None],
        failed: Callable[[Dial, Failure, str], None],
    ) -> Dial:
        means = self._means
        size = ring_bytes() if hello.memory else 0
        return Dial(self._watch, sock, means.secret, means.protocol, hello, expires_s, size, welcomed, failed)

    def _dial_failed(
        self, pair: Pair, number: int, expires_s: float, pause_s: float, failure: Failure, reason: str, again: bool
    ) -> None:
        now, rail = time.monotonic(), pair.rails[number]
        if self.over:
            return
        first = not self.gathered.is_set() and not rail.number
        if first and failure in _GONE:
            self.hopeless.setdefault(pair.rank, reason)
            self._at(now, self.check)  # not within the caller's loop over all peers
        elif failure not in _GONE and (first or again) and now + pause_s < expires_s:
            retry = functools.partial(self._dial, pair, number, expires_s, min(_LONGEST_PAUSE_S, 2 * pause_s))
            rail.wait = self._at(now + pause_s, retry)
        elif not first:
            self._down(pair, number, failure, reason)

    def _hello(self, pair: Pair, purpose: Purpose, rail: int, connection: int) -> Hello:
        return Hello(purpose, pair.local, self.generation, self.me, pair.rank, rail, connection, authentication.nonce())

    # ---------------------------------------------------------------- probing

    def _probe(self, pair: Pair, number: int, times: int) -> None:
        if self.over:
            return
        sock, code = pair.rails[number].way.dial(self._means.tuning)
        begun_s = time.monotonic()
        if sock is None:
            if pair.local and code == socket.EWOULDBLOCK:
                self._heard(pair, begun_s)  # its queue of connections is full
            self._nobody(pair, number, tcp_rails.failure_of(code), f"cannot connect: {os.strerror(code)}")
            return

        def rest(dial: Dial) -> float:
            now = time.monotonic()
            pair.probes.discard(dial)
            pair.resting_s = now + min(_REST * (now - begun_s), self._longest_rest_s)
            return now

        def failed(dial: Dial, failure: Failure, reason: str) -> None:
            now = rest(dial)
            if dial.open:  # its kernel took the connection, its process has not run
                self._heard(pair, dial.open_s)
            if dial.reset and times > 1:
                again = functools.partial(self._probe, pair, number, times - 1)
                self._at(now + 0.002 * 2 ** (_PROBES - times), again)
            else:
                self._nobody(pair, number, failure, reason)

        def answered(dial: Dial, sock: socket.socket, memory: int) -> None:
            sock.close()
            self._heard(pair, rest(dial))

        expires_s = begun_s + self._means.restore_s
        if not self.gathered.is_set() and self._means.period_s is not None:
            expires_s = min(expires_s, begun_s + _UNANSWERED * self._means.period_s)
        pair.probes.add(self._begin_dial(sock, self._hello(pair, Purpose.PROBE, number, 0), expires_s, answered, failed))

    @property
    def _longest_rest_s(self) -> float:
        period_s = self._means.period_s
        return _LONGEST_REST_S if period_s is None else BEAT * period_s

    @staticmethod
    def _heard(pair: Pair, at_s: float) -> None:
        if pair.life is not None:
            pair.life.heard(at_s)

    def _nobody(self, pair: Pair, number: int, failure: Failure, reason: str) -> None:
        """No process listens (PEER_GONE), or it is done with this generation (PROGRAM)."""
        if failure not in _GONE or self.over:
            return
        if not self.gathered.is_set() and pair.came_s is None:
            self.hopeless.setdefault(pair.rank, reason)
            self._at(time.monotonic(), self.check)
        else:
            self._down(pair, number, failure, reason)

    # ---------------------------------------------------------------- time and ends

    def _at(self, when_s: float, call: Callable[[], None]) -> Timer:
        """Unless this meeting is over by then."""

        def due() -> None:
            self._timers.discard(timer)
            if not self.over:
                call()

        timer = self._watch.at(when_s, due)
        self._timers.add(timer)
        return timer

    def stop(self) -> None:
        """Cancel all connection attempts, probes and waits; nothing is accepted any more."""
        self.over = True
        for pair in self.pairs.values():
            pair.stop()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


def with_own_trouble(cause: Cause, trouble: str) -> Cause:
    """The cause of a failure that this host's own network device explains."""
    return replace(cause, what=f"{cause.what}; here, {trouble}", own_device=True)
