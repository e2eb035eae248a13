"""Faults that a rank injects into itself, and the endpoint whose calls are the injection points.

In: a `Fault`. Effect: the fault. Faults that need another process (kill it, stop it, cut its link, connect to it) are
injected by the driver while the victim waits at the injection point.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import NoReturn

from helixrt.bench.fault_matrix.cells import Fault, Phase
from helixrt.errors import Cause, Retryable
from helixrt.transport.choice import TCP, unpack_addresses
from helixrt.transport.contract import Buffer, Endpoint, Lost, Outcome, PeerAborted, Refused, Sink
from helixrt.transport.tcp import rails as tcp_rails

EXIT_CODE = 3
HELD = 2.5  # heartbeat periods for which a rank holds its interpreter lock: longer than the limit for a silent peer
SLOW = 0.8  # of a heartbeat period: one long pause of the slow peer
THROTTLE_S = 0.003  # its pause before each later call
_BABBLE_S = 20.0
_DAY_S = 86_400
_GARBAGE = random.Random(7).randbytes(64 << 10)


def hold_interpreter_lock(seconds: float) -> None:
    """No other thread of this process runs Python code meanwhile, as in a call of C code that does not release the lock."""
    ctypes.PyDLL(None).usleep(round(seconds * 1e6))


class ProgramFault(Exception):
    """The exception that the victim's own program raises in cells with Fault.EXCEPTION."""


class FaultyEndpoint(Endpoint):
    """Wraps an endpoint. At one of its injection points `inject` is called once: see `wait_for`."""

    def __init__(self, inner: Endpoint, inject: Callable[[Fault], None]) -> None:
        self._inner, self._inject = inner, inject
        self._fault: Fault | None = None  # waits for its injection point
        self._phase = Phase.IDLE
        self._index = -1  # of the message before which the fault is injected
        self.pause_s = self.throttle_s = 0.0  # before the next call, before every call
        self.connecting = False
        self.peers: Mapping[int, bytes] = {}
        self.lost = threading.Event()
        self.lost_s = 0.0  # when a loss was reported first, since the last `connect`
        self._refused_until_closed: Refused | None = None

    def wait_for(self, fault: Fault, phase: Phase, index: int = -1) -> None:
        """Inject `fault` in `phase`; in a collective before message `index` is sent."""
        self._fault, self._phase, self._index = fault, phase, index

    def _at(self, *phases: Phase) -> None:
        if self._fault is not None and self._phase in phases:
            fault, self._fault = self._fault, None
            self._inject(fault)

    # ---- injection points

    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.peers, self.lost_s = peers, 0.0
        self.lost.clear()

        def asked() -> bool:  # first called when all connection attempts have begun and none has succeeded
            self._at(Phase.CONNECTING, Phase.RECONFIGURING)
            self._rest()
            return stopped()

        self.connecting = True
        try:
            self._inner.connect(generation, me, peers, deadline_s, asked)
        finally:
            self.connecting = False

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        if index == self._index:
            self._at(Phase.REDUCE_SCATTER, Phase.ALL_GATHER)
        self._inner.send(peer, op, index, data)

    def close(self) -> None:
        self._at(Phase.SHUTTING_DOWN)
        self._rest()
        self._refused_until_closed = self._refused_until_closed or self._inner.refused()
        self._inner.close()

    def progress(self, now: float) -> Sequence[Outcome]:
        if self._rest():
            now = time.monotonic()
        outcomes = self._inner.progress(now)
        if not self.lost_s and any(isinstance(outcome, (Lost, PeerAborted)) for outcome in outcomes):  # noqa: UP038
            self.lost_s = time.monotonic()
            self.lost.set()
        return outcomes

    def _rest(self) -> bool:
        """The pause of a slow peer. Returns whether there was one."""
        pause, self.pause_s = self.pause_s, 0.0
        if rest := pause + self.throttle_s:
            time.sleep(rest)
        return rest > 0

    # ---- unchanged calls

    def address(self) -> bytes:
        return self._inner.address()

    def receive(self, peer: int, op: int, index: int, into: Buffer | Sink) -> None:
        self._inner.receive(peer, op, index, into)

    def forget(self, op: int) -> None:
        self._inner.forget(op)

    def descriptors(self) -> Mapping[int, int]:
        return self._inner.descriptors()

    def next_deadline(self) -> float | None:
        return self._inner.next_deadline()

    def abort(self, cause: Cause) -> None:
        self._inner.abort(cause)

    def refused(self) -> Refused:
        return self._refused_until_closed or self._inner.refused()


# ---------------------------------------------------------------- faults of the program


def raise_in_main_thread(fault: Fault) -> None:
    """End the program by an exception in the main thread, where its own code runs. Any thread may call this."""
    if threading.current_thread() is threading.main_thread():
        _raise(fault)
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, _SIGNALS[fault])


def prepare() -> None:
    """Install the signal handlers of `raise_in_main_thread`. Call it in the main thread."""
    for fault, number in _SIGNALS.items():
        signal.signal(number, partial(_called, fault))


def _called(fault: Fault, number: int, frame: FrameType | None) -> None:
    _raise(fault)


def _raise(fault: Fault) -> NoReturn:
    if fault is Fault.EXIT:
        sys.exit(EXIT_CODE)
    raise ProgramFault("the program failed")


_SIGNALS = {Fault.EXIT: signal.SIGUSR1, Fault.EXCEPTION: signal.SIGUSR2}


def jump_clock() -> None:
    """The wall clock jumps by a day, forth or back, at each reading. (Only Python's clock is changed: no other code here reads
    the wall clock. A time namespace would change the monotonic clock only, and the machine's clock must not be set.)"""
    for name, a_second in (("time", 1), ("time_ns", 1_000_000_000)):
        setattr(time, name, _jumping(getattr(time, name), _DAY_S * a_second))


def _jumping(clock: Callable[[], float], by: int) -> Callable[[], float]:
    return lambda: clock() + random.choice((-by, by))


def fill_disk(folder: str) -> None:
    """From now on the device of every open file in `folder` (logs, standard output, the flight record) is full."""
    full, files = os.open("/dev/full", os.O_WRONLY), [fd for fd, target in _open_files() if target.startswith(folder)]
    assert files, "no log to fill the disk of"
    for descriptor in files:
        os.dup2(full, descriptor)


def _open_files() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


# ---------------------------------------------------------------- faults of connections


def _tcp_sockets(besides: int, listening: bool = False) -> Iterator[socket.socket]:
    """Copies of all connected, or of all listening TCP sockets of this process but those to and of port `besides`; the
    caller closes them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        keep = sock.type == socket.SOCK_STREAM and sock.family == socket.AF_INET
        try:
            keep = keep and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is listening
            keep = keep and besides not in (sock.getsockname()[1], *(() if listening else sock.getpeername()[1:2]))
        except OSError:  # not connected yet, or no more
            keep = False
        if keep:
            yield sock
        else:
            sock.close()


def _connections(store_port: int) -> list[socket.socket]:
    connections = list(_tcp_sockets(store_port))
    assert connections, "there is no connection to inject the fault into"
    return connections


def close_connections(store_port: int) -> None:
    """Shut all connections down, on both sides, without the knowledge of the code that owns them."""
    for sock in _connections(store_port):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def send_garbage(store_port: int) -> None:
    """Send garbage into every connection of this process."""
    for sock in _connections(store_port):
        with suppress(OSError):
            sock.send(_GARBAGE, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        sock.close()


def babble(peers: Mapping[int, bytes], store_port: int, until: Connection) -> None:
    """Send garbage in place of every handshake, on incoming connections and on new connections to the peers.

    Ends when a message comes from `until`. Raises Retryable, as a rank does that cannot connect to any peer.
    """
    listeners = list(_tcp_sockets(store_port, listening=True))
    said: list[socket.socket] = []  # kept open: closing one with unread data would reset it before the peer reads the garbage
    targets = [target for raw in peers.values() for target in tcp_rails.parse_address(unpack_addresses(raw)[TCP])]
    end = time.monotonic() + _BABBLE_S
    again = 0.0
    while time.monotonic() < end and not until.poll():
        ready, _, _ = select.select(listeners, (), (), 0.01)
        for listener in ready:
            with suppress(OSError):
                said.append(listener.accept()[0])
                said[-1].send(_GARBAGE[:4096], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        if time.monotonic() >= again:
            again = time.monotonic() + 0.1
            for target in targets:
                with suppress(OSError):
                    said.append(socket.create_connection(target, 0.1))
                    said[-1].send(_GARBAGE[:4096], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    for sock in (*said, *listeners):
        sock.close()
    if until.poll():
        until.recv()
    raise Retryable("this rank sent nothing but garbage")


def end_with_parent() -> None:
    """Kill this process when its parent ends; a stopped process would outlive it otherwise."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def move_to_namespace(file: str) -> None:
    """Later sockets of this process belong to another network namespace. Call it before the process has threads."""
    with Path(file).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), file)
