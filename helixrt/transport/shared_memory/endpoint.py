"""The endpoint for peers on one host: shared memory, and nothing left behind when a process dies.

In: the run's secret. Out: an `Endpoint` (see `contract`). Peers meet over a Unix socket
(`handshake`), then share one segment of memory each way (`segment`) and
exchange messages by its rules (`link`).

All descriptors of an endpoint are in one epoll of its own, so a driver waits for a single one. Linux only. No
resend and no ledger: a ring in memory loses nothing, and when it does, the peer is gone.
"""

from __future__ import annotations

import errno
import json
import math
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from helixrt.errors import Cause, ConfigError, Retryable
from helixrt.protocol.liveness import LOOK
from helixrt.transport.contract import Buffer, Endpoint, Lost, Outcome, Refused, Sink
from helixrt.transport.forking import disown_in_children
from helixrt.transport.intake import Stage
from helixrt.transport.shared_memory.address import (
    SOCKET,
    abstract,
    host_identity,
    listener,
    parse_address,
    unsupported,
)
from helixrt.transport.shared_memory.handshake import (
    Handshake,
    HandshakeError,
    Hello,
    Stale,
    Stranger,
    Terms,
    answer,
    dial,
)
from helixrt.transport.shared_memory.link import SharedMemoryLink, Watch
from helixrt.transport.stopped_processes import StoppedProcesses

RING_BYTES = 1 << 20  # each costs its clearing at every reconfiguration (0.4 ms); larger ones are hardly faster
_HANDSHAKE_S = 5.0  # limit for a new connection to complete its handshake
_DIAL_AGAIN_S = 0.01
_LOOK_S = 0.1  # how often to look whether a peer that has not come still exists
_TURN_S = 0.05  # and whether it runs; also how often signs of life are given and looked for meanwhile
_PARKED = 64  # connections that wait for a later generation
_NO_DESCRIPTORS_S = 0.1  # when a new connection finds none: until the next attempt


class SharedMemoryEndpoint(Endpoint):
    """`secret` is the run's. A peer whose process is stopped is lost within 1.5 `heartbeat_s`; None: only its end is noticed.

    `direct=False` keeps it from reading peers' memory (one copy), and all long messages go through the
    ring (two copies).
    """

    def __init__(
        self, secret: bytes, *, heartbeat_s: float | None = 1.0, ring_bytes: int = RING_BYTES, direct: bool = True
    ) -> None:
        if (reason := unsupported()) is not None:
            raise ConfigError("transport", "shared_memory", reason)
        self._terms = Terms(secret, ring_bytes, direct)
        self._heartbeat_s = heartbeat_s
        name = secrets.token_hex(16)
        self._address = json.dumps({"host": host_identity(), "name": name}).encode()
        self._listener = socket.socket(socket.AF_UNIX, SOCKET)
        self._listener.bind(abstract(name))
        self._listener.listen(512)
        self._watch, self._stage = Watch(), Stage()
        self._epoll = self._watch.epoll
        self._listen()
        self._generation, self._me = -1, -1
        self._begun: dict[int, int] = {}  # operations of this generation, of all links
        self._expected: set[int] = set()  # peers that may still come in this generation
        self._links: dict[int, SharedMemoryLink] = {}
        self._handshakes: dict[int, tuple[Handshake, int]] = {}  # descriptor -> it, and the peer if we dialled
        self._hellos: dict[int, Hello] = {}  # what those who dialled us said
        self._parked: set[int] = set()  # those that wait for a later generation
        self._outcomes: deque[Outcome] = deque()
        self._strangers = self._stale = 0
        self._closed = False
        disown_in_children(self)

    # ---------------------------------------------------------------- meeting

    def address(self) -> bytes:
        return self._address

    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        until = time.monotonic() + deadline_s
        self._end_links(lambda link: link.close())
        self._links.clear()
        self._generation, self._me, self._begun = generation, me, {}
        names: dict[int, str] = {}
        for rank, raw in peers.items():
            try:
                names[rank] = parse_address(raw)[1]
            except ValueError as error:
                what = f"rank {rank} cannot be reached over shared memory: {error}"
                raise Retryable(Cause(what, peers=(rank,))) from None
        self._expected = set(peers)
        try:
            self._meet(names, until, deadline_s, stopped)
        except BaseException:
            self._end_links(lambda link: link.close())
            raise
        finally:
            self._expected.clear()
            for descriptor in [d for d, (_, dialled) in self._handshakes.items() if dialled >= 0]:
                self._drop(descriptor)

    def _meet(self, names: Mapping[int, str], until: float, deadline_s: float, stopped: Callable[[], bool]) -> None:
        for descriptor in [d for d in self._parked if self._hellos[d].generation <= self._generation]:
            self._resume(descriptor)
        to_dial = [peer for peer in names if peer < self._me]  # the higher rank dials
        turn = time.monotonic() + _TURN_S  # most come before that: to ask after them would cost each of them a call, too
        look, processes = turn, dict.fromkeys(names, 0)
        stopped_processes = None if self._heartbeat_s is None else StoppedProcesses(self._heartbeat_s)
        while self._expected:
            now = time.monotonic()
            if now >= until:
                missing = ", ".join(map(str, sorted(self._expected)))
                what = f"rank {missing} did not come within {deadline_s:g} s (generation {self._generation}, this host)"
                raise Retryable(Cause(what, peers=tuple(sorted(self._expected))))
            if stopped():
                raise Retryable("connecting was stopped")
            if now >= look:
                look = now + _LOOK_S
                for peer in self._expected - set(to_dial):
                    process = listener(names[peer])
                    if peer > self._me and process is None:
                        what = f"rank {peer} is gone: no process listens at its address on this host"
                        raise Retryable(Cause(what, peers=(peer,)))
                    processes[peer] = process or 0
            if now >= turn:
                turn = now + (_TURN_S if self._heartbeat_s is None else min(_TURN_S, LOOK * self._heartbeat_s))
                for peer in self._expected:
                    stopped_s = None if stopped_processes is None else stopped_processes.stopped_s(processes[peer], now)
                    if stopped_s is not None:
                        what = f"rank {peer} on this host has been stopped for {stopped_s:.2f} s"
                        raise Retryable(Cause(what, peers=(peer,)))
                self._expire(now)
                if now >= self._listen_s:
                    self._listen()
                for link in self._links.values():
                    link.look(now)
            to_dial = [peer for peer in to_dial if not self._dial(peer, names[peer], now)]
            wait = min(until, look, turn) - now
            for descriptor, _ in self._epoll.poll(min(wait, _DIAL_AGAIN_S) if to_dial else wait):
                if (owner := self._watch.owner(descriptor)) is not None:
                    missing, link = ", ".join(map(str, sorted(self._expected))), owner[0]
                    what = f"rank {link.peer} left again while rank {missing} had not come yet"
                    # One that leaves in order gave up, probably because of those that have not come; else it failed itself.
                    raise Retryable(Cause(what, peers=tuple(sorted(self._expected)) if link.left else (link.peer,)))
                self._serve(descriptor)
            for outcome in self._outcomes:
                if isinstance(outcome, Lost):
                    raise Retryable(replace(outcome.cause, peers=(outcome.peer,)))

    def _dial(self, peer: int, name: str, now: float) -> bool:
        """Whether the call went out; False if there is no room at the peer now."""
        connection = socket.socket(socket.AF_UNIX, SOCKET)
        try:
            connection.connect(abstract(name))
        except BlockingIOError:
            connection.close()
            return False
        except OSError as error:
            connection.close()
            what = f"rank {peer} is gone: its address on this host answers {error.strerror}"
            raise Retryable(Cause(what, peers=(peer,))) from None
        steps = dial(self._terms, self._generation, self._me, peer)
        self._begin(Handshake(connection, steps, float("inf")), peer)
        return True

    def _begin(self, handshake: Handshake, dialled: int) -> None:
        descriptor = handshake.connection.fileno()
        self._handshakes[descriptor] = handshake, dialled
        self._epoll.register(descriptor, select.EPOLLIN)
        self._advance(descriptor, handshake.begin)

    def _listen(self) -> None:
        self._listen_s = math.inf  # when to do so again, after there were no descriptors
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def _serve(self, descriptor: int) -> None:
        """What a descriptor that is no link's asks for."""
        if descriptor in self._handshakes:
            self._advance(descriptor, self._handshakes[descriptor][0].go_on)
        elif descriptor == self._listener.fileno():
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):  # it would be ready again at once, in vain
                        self._epoll.unregister(self._listener.fileno())
                        self._listen_s = time.monotonic() + _NO_DESCRIPTORS_S
                    return
                connection.setblocking(False)
                at = connection.fileno()
                steps = answer(self._terms, partial(self._hellos.__setitem__, at), self._welcomes)
                self._begin(Handshake(connection, steps, time.monotonic() + _HANDSHAKE_S), -1)

    def _welcomes(self, hello: Hello) -> tuple[bool, int]:
        same = hello.generation == self._generation and hello.answerer == self._me
        return same and hello.dialler in self._expected and hello.dialler > self._me, max(self._generation, 0)

    def _advance(self, descriptor: int, step: Callable[[], None]) -> None:
        handshake, dialled = self._handshakes[descriptor]
        try:
            introduced = descriptor in self._hellos
            step()
            if not introduced and descriptor in self._hellos:
                self._park(descriptor)
                return
        except HandshakeError as error:
            self._drop(descriptor)
            if dialled >= 0:
                raise Retryable(Cause(f"no link with rank {dialled}: {error}", peers=(dialled,))) from None
            self._strangers += isinstance(error, Stranger)
            self._stale += isinstance(error, Stale)
            return
        if handshake.joined is not None:
            self._join(descriptor)

    def _park(self, descriptor: int) -> None:
        self._parked.add(descriptor)
        if self._hellos[descriptor].generation <= self._generation:
            self._resume(descriptor)
        elif len(self._parked) > _PARKED:
            self._drop(descriptor)

    def _resume(self, descriptor: int) -> None:
        self._parked.discard(descriptor)
        handshake = self._handshakes[descriptor][0]
        handshake.until_s = time.monotonic() + _HANDSHAKE_S
        self._advance(descriptor, handshake.resume)

    def _join(self, descriptor: int) -> None:
        handshake, dialled = self._handshakes.pop(descriptor)
        hello = self._hellos.pop(descriptor, None)
        self._epoll.unregister(descriptor)
        joined = handshake.joined
        assert joined is not None
        peer = dialled if hello is None else hello.dialler
        if peer not in self._expected or (hello is not None and hello.generation != self._generation):  # too late
            handshake.close()
            self._stale += 1
            return
        self._expected.discard(peer)
        outcome = self._outcomes.append
        link = SharedMemoryLink(
            peer, handshake.connection, joined, self._watch, self._heartbeat_s, outcome, self._stage, begun=self._begun
        )
        self._links[peer] = link

    def _drop(self, descriptor: int) -> None:
        handshake, _ = self._handshakes.pop(descriptor)
        self._hellos.pop(descriptor, None)
        self._parked.discard(descriptor)
        self._epoll.unregister(descriptor)
        handshake.close()

    def _expire(self, now: float) -> None:
        for descriptor, (handshake, _) in list(self._handshakes.items()):
            if handshake.until_s <= now and descriptor not in self._parked:
                self._drop(descriptor)
                self._strangers += 1

    def direct(self, peer: int) -> bool:
        """Whether long messages of `peer` are read straight out of its memory."""
        return self._links[peer].direct

    # ---------------------------------------------------------------- messages

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        self._links[peer].send(op, index, data)

    def receive(self, peer: int, op: int, index: int, into: Buffer | Sink) -> None:
        self._links[peer].receive(op, index, into)

    def forget(self, op: int) -> None:
        for link in self._links.values():
            link.forget(op)

    def lose(self, peer: int, cause: Cause) -> None:
        """End the link with `peer`, because of what was learnt elsewhere; `Lost` follows. Nothing if it has ended."""
        if peer in self._links:
            self._links[peer].lose(cause.what)

    def descriptors(self) -> Mapping[int, int]:
        return {} if self._closed else {self._epoll.fileno(): select.EPOLLIN}

    def progress(self, now: float) -> Sequence[Outcome]:
        if self._closed:
            return ()
        if now >= self._listen_s:
            self._listen()
        shown: dict[SharedMemoryLink, int] = {}
        for descriptor, _ in self._epoll.poll(0):
            owner = self._watch.owner(descriptor)
            if owner is None:
                self._serve(descriptor)
            else:
                link, process = owner
                shown[link] = shown.get(link, 0) | (2 if process else 1)
        if self._handshakes:
            self._expire(now)
        for link in self._links.values():
            seen = shown.get(link, 0)
            if seen or not link.quiet(now):
                link.progress(now, bool(seen & 1), bool(seen & 2))
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    def next_deadline(self) -> float | None:
        if self._closed:
            return None
        deadlines = []
        for link in self._links.values():
            link.arm()
            if (deadline := link.deadline) is not None:
                deadlines.append(deadline)
        if self._outcomes:
            return 0.0
        deadlines += [h.until_s for d, (h, _) in self._handshakes.items() if d not in self._parked]
        if self._listen_s < math.inf:
            deadlines.append(self._listen_s)
        return min(deadlines, default=None)

    # ---------------------------------------------------------------- ends

    def abort(self, cause: Cause) -> None:
        self._end_links(lambda link: link.abort(cause))

    def close(self) -> None:
        if self._closed:
            return
        self._end_links(lambda link: link.close())
        self._closed = True
        for descriptor in list(self._handshakes):
            self._drop(descriptor)
        self._listener.close()
        self._epoll.close()

    def disown(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            link.disown()
        for handshake, _ in self._handshakes.values():
            handshake.close()
        self._handshakes.clear()
        self._listener.close()
        self._epoll.close()

    def refused(self) -> Refused:
        return Refused(self._strangers, self._stale)

    def _end_links(self, end: Callable[[SharedMemoryLink], None]) -> None:
        for link in self._links.values():  # closed links are kept so that late calls are ignored
            end(link)
        self._outcomes.clear()
