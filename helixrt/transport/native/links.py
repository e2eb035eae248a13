"""A rank's links: the native engine, and the thread that accepts, authenticates, dials and restores its connections.

In: the run's secret, this host's rails, and the peers' addresses of each generation. Out: an engine whose rails are connected,
and its events. Connections of newer generations are parked until this rank connects to that generation, after they have proved
the secret.

`Links` starts one thread, which `close` ends; all state of connections is the thread's, other threads hand it calls. The
engine's own thread moves bytes meanwhile, so only connecting waits for a process that holds its interpreter lock.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from helixrt.errors import Cause, ConfigError, HelixError, Retryable
from helixrt.native.engine import Engine, EngineEvent, Options
from helixrt.native.library import EventKind, library
from helixrt.transport.contract import Refused
from helixrt.transport.native.address import (
    Address,
    addresses_of,
    listen_locally,
    memory_unsupported,
    this_host,
)
from helixrt.transport.native.admission import Accepted, Listener, Parked
from helixrt.transport.native.causes import pack_cause
from helixrt.transport.native.handshake import MAX_GENERATION, Purpose, Verdict
from helixrt.transport.native.meeting import Means, Meeting
from helixrt.transport.tcp import rails as tcp_rails
from helixrt.transport.tcp.rails import MAX_RAILS, SocketTuning, TcpRail
from helixrt.transport.tcp.watch import READ, Watch

COPIED_BYTES = 512 << 10  # the engine copies a single message up to here itself, at once
_CONNECT_S = 1e6  # the links wait for the first connection with a peer, not the engine
_STOPPED_S = 0.05  # how often `connect` asks whether it is to stop
_ANSWER_S = 30.0  # for a call that the thread is handed: each of its turns is short
_IDLE_S = 60.0  # the thread waits at most so long for something to do

_log = logging.getLogger("helixrt.transport")


@dataclass(frozen=True, kw_only=True)
class LinksOptions:
    """The settings of connections. Times in seconds."""

    period_s: float | None = 1.0  # of liveness; None: only the end of a connection is noticed
    sockets: SocketTuning = field(default_factory=SocketTuning)
    shared_memory: bool = True  # with peers on this host
    missing_rail_s: float = 1.0  # `connect` waits so long for the other rails of a peer that came on one
    restore_s: float = 2.0  # one attempt to restore a rail
    linger_s: float = 1.0  # `close` waits at most so long until the last bytes are out

    def __post_init__(self) -> None:
        if self.period_s is not None and not self.period_s > 0:
            raise ConfigError("period_s", self.period_s, "must be more than 0, or None for no heartbeats")


def new_engine(options: LinksOptions) -> Engine:
    """As links with these options need it. Raises what `Engine` does."""
    return Engine(Options(period_s=options.period_s or -1, connect_s=_CONNECT_S, keep_bytes=COPIED_BYTES))


class Links:
    """`rails`: this host's; rail k of one rank is connected to rail k of the other, as many as both have. Peers on this host
    have one, in shared memory.

    `heard` gets the engine's events but RESTORE, in the thread of the links; between a call of `leave` or `connect` and its
    return none of an earlier generation comes any more. `protocol`: the number of the frames, the library's
    if it is not given.
    Raises ConfigError when a rail's address is not this host's.
    """

    def __init__(
        self,
        engine: Engine,
        secret: bytes,
        rails: Sequence[TcpRail],
        options: LinksOptions,
        heard: Callable[[EngineEvent], None],
        protocol: int | None = None,
    ) -> None:
        if not isinstance(secret, bytes) or not secret:
            raise ConfigError("secret", "...", "must be the run's secret: bytes, not empty")
        if not 1 <= len(rails) <= MAX_RAILS:
            raise ConfigError("rails", len(rails), f"must be 1 to {MAX_RAILS}")
        self.engine, self.options, self._heard = engine, options, heard
        protocol = int(library().hx_protocol()) if protocol is None else protocol
        period = options.period_s
        tuning = SocketTuning(
            options.sockets.send_bytes,
            options.sockets.receive_bytes,
            options.sockets.local_congestion,
            max(options.sockets.user_timeout_s, 2 * (period or 0.0)),
        )
        listeners: list[socket.socket] = []
        try:
            for rail in rails:
                listeners.append(tcp_rails.listen(rail, tuning))
            address = Address(addresses_of(listeners))
            if options.shared_memory and memory_unsupported() is None:
                address = Address(address.rails, this_host(), secrets.token_hex(16))
                listeners.append(listen_locally(address.name))
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self.address = address
        self._watch = Watch()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._means = Means(
            engine,
            self._watch,
            secret,
            protocol,
            address,
            tuple(rails),
            tuning,
            options.missing_rail_s,
            options.restore_s,
            period,
        )
        self._listener = Listener(self._watch, listeners, secret, protocol, self._proved)
        self._parked = Parked(self._watch)
        self._meeting: Meeting | None = None
        self._generation = -1
        self._stale = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._failed: BaseException | None = None  # what ended the thread
        self._passing = False  # events of the engine are of the present generation
        self._ending = self._closed = False
        self._watch.add(_Descriptor(self._wake), READ, lambda mask: self._woken())
        self._watch.add(_Descriptor(engine.event_fd()), READ, lambda mask: self._take_events())
        self._thread = threading.Thread(target=self._run, name="helixrt-links", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- what other threads call

    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """As `contract.Endpoint.connect`. The engine then is in the generation, numbered by its lower 32 bits in its frames."""
        until_s = time.monotonic() + deadline_s
        if self._closed:
            raise Retryable("this endpoint was closed")
        if not max(0, self._generation) <= generation <= MAX_GENERATION:
            raise ValueError(f"generation {generation}: this endpoint was in {self._generation} already")
        self.leave(Cause("it went on to another generation", f"rank {me}"))
        meeting = self._ask(lambda: self._begin(generation, me, peers, until_s))
        try:
            while not meeting.gathered.wait(_STOPPED_S):
                if self._failed is not None:
                    raise Retryable(f"the thread that connects ended: {self._failed!r}")
                if stopped():
                    raise Retryable(Cause("connecting was stopped", f"rank {me}"))
        except BaseException as error:
            self.leave(Cause(str(error), f"rank {me}"))
            raise
        if meeting.error is not None:
            self.leave(meeting.error.cause)
            raise meeting.error

    def leave(self, cause: Cause) -> None:
        """End the generation here; living peers get the cause, as far as that goes without blocking."""
        self.engine.abort(pack_cause(cause))
        self._ask(self._leave)

    def own_trouble(self, peer: int) -> str:
        """What of this host alone keeps all rails to the peer from working; empty if there is no such thing."""
        meeting = self._meeting
        pair = None if meeting is None else meeting.pairs.get(peer)
        return "" if pair is None else pair.own_trouble()

    def refused(self) -> Refused:
        return Refused(self._listener.strangers, self._stale)

    def close(self) -> None:
        """End the generation in order, then the thread; the engine stays its owner's. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._failed is None:
            with suppress(HelixError):  # the generation is over, or the peers do not read
                self.engine.finish(self.options.linger_s)
        self._ending = True
        self._kick()
        self._thread.join()
        os.close(self._wake)

    def disown(self) -> None:
        """In a forked child, where the thread is not: close the copies of all sockets."""
        if not self._closed:
            self._closed = True
            self._watch.disown()
            os.close(self._wake)

    # ---------------------------------------------------------------- the thread

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Have the thread make a call, and wait for its result."""
        done, result, raised = threading.Event(), [], []

        def answer() -> None:
            try:
                result.append(call())
            except BaseException as error:  # handed to the thread that asked
                raised.append(error)
            done.set()

        self._calls.append(answer)
        self._kick()
        until_s = time.monotonic() + _ANSWER_S
        while not done.wait(0.1):
            if self._failed is not None or time.monotonic() > until_s:
                raise Retryable(f"the thread that connects does not answer: {self._failed!r}")
        if raised:
            raise raised[0]
        return result[0]

    def _kick(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while not self._ending:
                due_s = self._watch.due
                wait_s = _IDLE_S if due_s == math.inf else due_s - time.monotonic()
                self._watch.dispatch(min(max(0.0, wait_s), _IDLE_S))
                self._watch.run_timers(time.monotonic())
        except BaseException as error:
            _log.exception("the thread that connects ended")
            self._failed = error
            self.engine.abort(pack_cause(Cause(f"the thread that connects ended: {error!r}")))
        finally:
            self._end()

    def _end(self) -> None:
        if self._meeting is not None:
            self._meeting.stop()
        self._parked.close()
        self._listener.close()
        self._watch.close()

    def _woken(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        while self._calls:
            self._calls.popleft()()

    def _leave(self) -> None:
        if self._meeting is not None:
            self._meeting.stop()
        self._passing = False
        self._take_events()

    def _begin(self, generation: int, me: int, peers: Mapping[int, bytes], until_s: float) -> Meeting:
        meeting = Meeting(self._means, generation, me, peers, until_s)
        self.engine.begin(generation & 0xFFFFFFFF, me, meeting.rail_counts())
        self._take_events()
        self._meeting, self._generation, self._passing = meeting, generation, True
        meeting.begin()
        for accepted in self._parked.leave(generation):
            self._proved(accepted)
        return meeting

    def _take_events(self) -> None:
        meeting = self._meeting
        for event in self.engine.events():
            if meeting is None or not self._passing:
                continue  # of a generation that this end has left
            if event.kind is EventKind.RESTORE:
                meeting.restore(event.peer, event.a, event.b)
                continue
            if event.kind is EventKind.ENDED:
                meeting.ended(event.peer, event.text)
            elif event.kind is EventKind.CLOSED:
                meeting.closed(event.peer)
            self._heard(event)

    def _proved(self, accepted: Accepted) -> None:
        """Handle an authenticated incoming connection: accept, park or reject it."""
        hello, meeting = accepted.hello, self._meeting
        assert hello is not None
        probes = hello.purpose is Purpose.PROBE
        if hello.generation > self._generation and not probes:
            self._parked.enter(accepted)
            return
        verdict = Verdict.WELCOME if meeting is None else meeting.verdict(hello)  # without one only probes come here
        self._stale += verdict is Verdict.STALE
        if verdict is Verdict.WELCOME and not probes:
            assert meeting is not None
            meeting.welcome(accepted)
            return
        accepted.verdict(verdict, max(0, self._generation))
        accepted.sock.close()


class _Descriptor:
    """A descriptor for a `Watch`, which does not close it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        pass
