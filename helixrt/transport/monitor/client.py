"""A rank's handle on its monitor process: starts it, orders what to watch, receives what it observed.

In: an address of this host, secrets, other monitors' addresses. Out: states of the watched ranks, by number. All users of one
rank (its groups, its membership) share one monitor per address: `lease` and `give_back` count them. The process is started
when something is first ordered; the listening socket exists from the beginning, so its address can be published at once.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import helixrt
from helixrt.errors import ConfigError
from helixrt.transport.forking import disown_in_children
from helixrt.transport.monitor import wire
from helixrt.transport.monitor.wire import State

_END_S = 2.0
_TAKES_S = 5.0  # a process that takes no order for so long is ended; those for a large group fill its socket for a moment
_BACKLOG = 512
_PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from helixrt.transport.monitor.process import main; main()"

_log = logging.getLogger("helixrt.transport")

_leases_lock = threading.Lock()
_leases: dict[tuple[int, str], Monitor] = {}  # (this process, address): a rank has one monitor, however many groups it has


class Monitor:
    """One per address of this rank, see `lease`. Any thread may call.

    Raises ConfigError if the address is not one of this host's.
    """

    def __init__(self, host: str) -> None:
        self._lock = threading.RLock()
        self._states: dict[int, State] = {}
        self._beating: dict[str, bool] = {}  # names of memberships: the first beat was sent
        self._withheld: dict[str, str] = {}
        self._numbers = 0
        self._secrets: set[bytes] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._closed = self.ended = False  # ended: the process ended, or took no orders, although this was not closed
        self._users = 0
        self._host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise ConfigError("host", host, f"cannot listen there: {error.strerror}") from error
        self._address = wire.pack_address(*self._listener.getsockname()[:2])
        disown_in_children(self)

    def address(self) -> bytes:
        """For other ranks' monitors."""
        return self._address

    # ---------------------------------------------------------------- orders

    def know(self, secret: bytes) -> None:
        """Who proves `secret` may watch this rank."""
        with self._lock:
            if secret not in self._secrets:
                self._secrets.add(secret)
                if self._child is not None:
                    self._order("secret", secret=secret.hex())

    def watch(self, address: bytes, secret: bytes, period_s: float) -> int:
        """Watch the rank of the monitor at `address`; its number from now on. Raises ValueError if it is no address."""
        host, port = wire.parse_address(address)
        least, most = wire.PERIODS_S
        with self._lock:
            self.start()
            self._numbers += 1
            self._states[self._numbers] = State.RUNNING
            self._order(
                "watch",
                number=self._numbers,
                host=host,
                port=port,
                secret=secret.hex(),
                period_s=min(max(period_s, least), most),
            )
            return self._numbers

    def forget(self, number: int) -> None:
        with self._lock:
            if self._states.pop(number, None) is not None:
                self._order("forget", number=number)

    def beat(self, name: str, module: str, arguments: dict[str, Any], period_s: float, most_s: float) -> None:
        """Let the monitor beat for a membership: `beat_of(**arguments)` of `module` gives a function that beats once.

        The beats are withheld while this rank is stopped, and when it has not called `alive` for `most_s` seconds.
        """
        with self._lock:
            self.start()
            self._beating[name], self._withheld[name] = False, ""
            self._order("beat", name=name, module=module, arguments=arguments, period_s=period_s, most_s=most_s)

    def depend(self, name: str, number: int) -> None:
        """No beats of that membership while the watched rank `number` does not run."""
        with self._lock:
            self._order("depend", name=name, number=number)

    def alive(self, name: str) -> None:
        """This rank's interpreter runs."""
        with self._lock:
            self._order("alive", name=name)

    def rest(self, name: str) -> None:
        """No more beats of that membership."""
        with self._lock:
            if self._beating.pop(name, None) is not None:
                self._order("rest", name=name)

    # ---------------------------------------------------------------- what was seen

    @property
    def descriptor(self) -> int:
        """Readable when there is news; -1: none will come."""
        return -1 if self._orders is None or self.ended else self._orders.fileno()

    def look(self) -> None:
        """Take in all news. Never blocks."""
        with self._lock:
            while self._orders is not None and not self.ended:
                try:
                    raw = self._orders.recv(wire.MESSAGE_BYTES, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError:
                    raw = b""
                if not raw:
                    self.ended = True
                    return
                news = wire.unpack(raw)
                if (name := news.get("name")) is not None:
                    if name not in self._beating:
                        continue  # of a membership that rests by now
                    self._withheld[name] = news.get("withheld", self._withheld[name])
                    self._beating[name] = self._beating[name] or "beating" in news
                elif news["number"] in self._states:
                    self._states[news["number"]] = State(news["state"])

    def state(self, number: int) -> State:
        """As of the last `look`."""
        return self._states.get(number, State.RUNNING)

    def beating(self, name: str) -> bool:
        """Whether the first beat of that membership was sent; as of the last `look`."""
        return self._beating.get(name, False)

    def withheld(self, name: str) -> str:
        """Why its beats are withheld; empty: they are not. As of the last `look`."""
        return self._withheld.get(name, "")

    # ---------------------------------------------------------------- the process

    def start(self) -> None:
        """Start the process, unless it was."""
        with self._lock:
            if self._child is not None or self._closed:
                return
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = os.pidfd_open(os.getpid())
            try:
                theirs.setblocking(False)
                arguments = (os.getpid(), process, theirs.fileno(), self._listener.fileno())
                root = str(Path(helixrt.__file__).parent.parent)
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, root, *map(str, arguments)],
                    pass_fds=arguments[1:],
                    stdin=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,  # what is sent to the rank's process group is not for its monitor
                )
            finally:
                theirs.close()
                os.close(process)
            limit = struct.pack("ll", *divmod(round(_TAKES_S * 1e6), 10**6))  # a struct timeval
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._orders = ours
            for secret in self._secrets:
                self._order("secret", secret=secret.hex())

    def _order(self, do: str, **more: Any) -> None:
        """Waits for room for at most `_TAKES_S`, and only once."""
        if self._orders is not None and not self.ended:
            try:
                self._orders.send(wire.pack({"do": do, **more}))
            except BlockingIOError:
                _log.warning("the monitor process of this rank has taken no order for %g s; it is ended", _TAKES_S)
                self.ended = True
                assert self._child is not None
                self._child.kill()
            except OSError:  # it has ended, which `look` notices
                pass

    def close(self) -> None:
        """End the process; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._order("end")
            self._listener.close()
            if self._child is not None:
                try:
                    self._child.wait(_END_S)
                except subprocess.TimeoutExpired:
                    self._child.kill()
                    self._child.wait()
            if self._orders is not None:
                self._orders.close()
                self._orders = None

    def disown(self) -> None:
        """In a forked child: the process is the parent's."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._closed = True
        self._listener.close()
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._child is not None:
            self._child.returncode = 0  # not this process's to wait for


def unsupported() -> str | None:
    """Why this machine has no monitor processes; None if it has."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return "needs Linux and a Python with os.pidfd_open"
    return None


def lease(host: str) -> Monitor:
    """This rank's monitor at an address of this host; each lease is to be given back. Raises ConfigError."""
    with _leases_lock:
        key = (os.getpid(), host)
        monitor = _leases.get(key)
        if monitor is None:
            monitor = _leases[key] = Monitor(host)
        monitor._users += 1
        return monitor


def give_back(monitor: Monitor) -> None:
    """The last one ends the process."""
    with _leases_lock:
        monitor._users -= 1
        last = monitor._users == 0
        if last:
            _leases.pop((os.getpid(), monitor._host), None)
    if last:
        monitor.close()
