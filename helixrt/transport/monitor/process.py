"""The monitor process's program: checks its rank, reports to the monitors that watch it, and watches other ranks' monitors.

In: the rank's process (a pidfd and its number), a listening socket, and the rank's orders. Out: to whom watches: RUNNING,
STOPPED, GONE; to its own rank: what other monitors said; and, if ordered, beats of the rank's membership, which are withheld
while the rank, or a rank of the same replica, is stopped or gone. Ends with its rank.

Standard library only; torch is never imported here. One thread, and one more for membership beats, whose calls block.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from helixrt.protocol.liveness import BEAT, LOOK, Liveness, Stopped
from helixrt.transport.authentication import NONCE_BYTES, PROOF_BYTES, agrees, nonce
from helixrt.transport.monitor import wire
from helixrt.transport.monitor.beats import Beats
from helixrt.transport.monitor.wire import State
from helixrt.transport.stopped_processes import is_stopped
from helixrt.transport.tcp.kernel_view import acknowledgements

_LOOK_S = 0.1  # between checks of the rank, if no shorter interval is requested
_HANDSHAKE_S = 2.0
_DIAL_AGAIN_S = 0.2
_MOST_HALF_OPEN, _MOST_WATCHERS = 64, 4096
_MOST_SECRETS = 256  # one for each group, and a watcher that dials again may name an old one; each costs microseconds
_LINGER_S = 2.0  # from the end of the rank's connection to the end of its process


class Ended(Exception):
    """The other end closed the connection, or broke the protocol."""


class Watcher:
    """A connection of another monitor that watches this rank."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock, self.until_s = sock, now + _HANDSHAKE_S
        self.stopped: Stopped | None = None  # once it has proved the secret
        self.told_stopped = False
        self.beat_due_s = 0.0
        self._period_s = 0.0
        self._got = b""
        self._nonces: tuple[bytes, bytes] | None = None

    def read(self, secrets: list[bytes], now: float) -> None:
        """Raises Ended, OSError."""
        try:
            more = self.sock.recv(4096)
        except BlockingIOError:
            return
        if not more:
            raise Ended
        if self.stopped is not None:
            return  # probes
        self._got += more
        if self._nonces is None and len(self._got) >= wire.HELLO_BYTES:
            if not self._got.startswith(wire.MAGIC):
                raise Ended
            self._nonces = self._got[len(wire.MAGIC) : wire.HELLO_BYTES], nonce()
            self._got = self._got[wire.HELLO_BYTES :]
            self.sock.send(self._nonces[1])
        if self._nonces is not None and len(self._got) >= wire.LAST.size:
            proof, period_s = wire.LAST.unpack_from(self._got)
            meetings = [wire.meeting(secret, *self._nonces) for secret in secrets]
            proved = next((one for one in meetings if agrees(proof, one.dialler_proof())), None)
            least, most = wire.PERIODS_S
            if proved is None or not least <= period_s <= most:
                raise Ended
            self.sock.send(proved.answerer_proof())
            self._period_s, self.stopped, self._got = period_s, Stopped(period_s), b""

    @property
    def look_s(self) -> float:
        return LOOK * self._period_s if self.stopped is not None else _LOOK_S

    def tell(self, stopped: bool, now: float) -> None:
        """What a look at the rank showed. Raises OSError."""
        if self.stopped is None:
            return
        dead = self.stopped.look(stopped, now)
        if dead != self.told_stopped or now >= self.beat_due_s:
            self.told_stopped, self.beat_due_s = dead, now + BEAT * self._period_s
            self.sock.send(wire.STOPPED if dead else wire.RUNNING)


class Watched:
    """A rank whose monitor we ask. `changed(state)` is called when its state is another."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, period_s: float, here: str, changed: Callable[[State], None]
    ) -> None:
        self.sock: socket.socket | None = None
        self.state = State.RUNNING
        self._address, self._secret, self._period_s, self._here = address, secret, period_s, here
        self._changed = changed
        self._dial_due_s = self._probe_due_s = 0.0
        self._nonce = self._got = b""
        self._proof: bytes | None = None  # that it has to give
        self._liveness: Liveness | None = None  # once it has proved the secret

    def turn(self, now: float, connected: Callable[[Watched], None]) -> None:
        """Dial, probe, judge: whatever is due. Raises Ended, OSError."""
        if self.sock is None:
            if now >= self._dial_due_s and self.state is not State.GONE:
                self._dial(now, connected)
            return
        if self._liveness is None:
            return
        if now >= self._probe_due_s:
            self._probe_due_s = now + BEAT * self._period_s
            self.sock.send(wire.PROBE)
        if self._liveness.silent(now):
            view = acknowledgements(self.sock, now)
            if view is not None and now - view.last_s < self._period_s and not view.full:
                self._is(State.FROZEN)  # else the path has failed, which its link notices

    def due_s(self) -> float:
        if self.sock is None:
            return self._dial_due_s
        return min(self._probe_due_s, self._liveness.deadline_s) if self._liveness is not None else self._probe_due_s

    def _dial(self, now: float, connected: Callable[[Watched], None]) -> None:
        self._dial_due_s = now + max(_DIAL_AGAIN_S, self._period_s)
        self._got, self._proof, self._liveness = b"", None, None
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.bind((self._here, 0))
        self._probe_due_s = now + _HANDSHAKE_S  # of the handshake as well: then it is tried again
        self.sock.connect_ex(self._address)
        self._nonce = nonce()
        connected(self)

    def ready(self, now: float) -> None:
        """It can be written for the first time, or something came. Raises Ended, OSError."""
        assert self.sock is not None
        if self._nonce:
            if code := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            self.sock.send(wire.MAGIC + self._nonce)
            self._sent_nonce, self._nonce = self._nonce, b""
            return
        try:
            more = self.sock.recv(4096)
        except BlockingIOError:
            return
        if not more:
            raise Ended
        self._got += more
        if self._proof is None:
            if len(self._got) < NONCE_BYTES:
                return
            meeting = wire.meeting(self._secret, self._sent_nonce, self._got[:NONCE_BYTES])
            self._got, self._proof = self._got[NONCE_BYTES:], meeting.answerer_proof()
            self.sock.send(wire.LAST.pack(meeting.dialler_proof(), self._period_s))
        if self._liveness is None:
            if len(self._got) < PROOF_BYTES:
                return
            if not agrees(self._got[:PROOF_BYTES], self._proof):
                raise Ended
            self._got, self._liveness = self._got[PROOF_BYTES:], Liveness(self._period_s, now)
            self._probe_due_s = now
        words, self._got = self._got, b""
        if words:
            self._liveness.heard(now)
            last = words[-1:]
            self._is({wire.STOPPED: State.STOPPED, wire.GONE: State.GONE}.get(last, State.RUNNING))

    def _is(self, state: State) -> None:
        if state is not self.state and self.state is not State.GONE:
            self.state = state
            self._changed(state)

    def handshaking_too_long(self, now: float) -> bool:
        return self.sock is not None and self._liveness is None and now >= self._probe_due_s


class Monitor:
    """The loop. `rank` is the rank's process, `process` a pidfd of it, `orders` the connection with it."""

    def __init__(self, rank: int, process: int, orders: socket.socket, listener: socket.socket) -> None:
        self._rank, self._process, self._orders, self._listener = rank, process, orders, listener
        self._here = listener.getsockname()[0]
        self._secrets: list[bytes] = []
        self._watchers: dict[int, Watcher] = {}
        self._watched: dict[int, Watched] = {}  # by the rank's number for it
        self._beats: dict[str, Beats] = {}
        self._look_due_s = 0.0
        self._over = False
        self._lock = threading.Lock()  # of sending to the rank
        self._unsent: dict[tuple[str, object], bytes] = {}  # reports the rank had no room for, the newest on each matter
        self._poll = select.epoll()
        for descriptor in (process, orders.fileno(), listener.fileno()):
            self._poll.register(descriptor, select.EPOLLIN)
        listener.setblocking(False)

    def run(self) -> None:
        while not self._over:
            now = time.monotonic()
            due = min([self._look_due_s, *(each.due_s() for each in self._watched.values())])
            for descriptor, _ in self._poll.poll(max(0.0, due - now), 256):
                self._serve(descriptor, time.monotonic())
            if not self._over:
                self._turn(time.monotonic())

    def _serve(self, descriptor: int, now: float) -> None:
        if descriptor == self._process:
            self._rank_ended()
        elif descriptor == self._orders.fileno():
            self._obey()
        elif descriptor == self._listener.fileno():
            self._accept(now)
        elif descriptor in self._watchers:
            try:
                self._watchers[descriptor].read(self._secrets, now)
            except (Ended, OSError):
                self._drop(descriptor)
        else:
            for each in self._watched.values():
                if each.sock is not None and each.sock.fileno() == descriptor:
                    self._guard(each, lambda each=each: self._heard(each, now))  # type: ignore[misc]
                    return

    def _heard(self, each: Watched, now: float) -> None:
        each.ready(now)
        assert each.sock is not None
        self._poll.modify(each.sock, select.EPOLLIN)

    def _turn(self, now: float) -> None:
        if self._unsent:
            self._send_reports()
        if now >= self._look_due_s:
            stopped = is_stopped(self._rank)
            self._withhold(stopped, now)
            for descriptor, watcher in list(self._watchers.items()):
                try:
                    watcher.tell(stopped, now)
                except OSError:
                    self._drop(descriptor)
                if watcher.stopped is None and now >= watcher.until_s:
                    self._drop(descriptor)
            self._look_due_s = now + min([_LOOK_S, *(watcher.look_s for watcher in self._watchers.values())])
        for each in self._watched.values():
            if each.handshaking_too_long(now):
                self._hang_up(each)
            self._guard(each, lambda each=each: each.turn(now, self._dialled))  # type: ignore[misc]

    # ---------------------------------------------------------------- the rank

    def _obey(self) -> None:
        while not self._over:
            try:
                raw = self._orders.recv(wire.MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                raw = b""
            if not raw:  # its end, or that of its process
                poll = select.poll()
                poll.register(self._process, select.POLLIN)
                if poll.poll(_LINGER_S * 1000):
                    self._rank_ended()
                self._over = True
                return
            self._order(wire.unpack(raw))

    def _order(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "secret":
                self._secrets = [*self._secrets, bytes.fromhex(order["secret"])][-_MOST_SECRETS:]
            case "watch":
                number = order["number"]
                address, secret = (order["host"], order["port"]), bytes.fromhex(order["secret"])
                changed = lambda state: self._changed(number, state)  # noqa: E731
                self._watched[number] = Watched(address, secret, order["period_s"], self._here, changed)
            case "forget":
                each = self._watched.pop(order["number"], None)
                for beats in self._beats.values():
                    beats.depends_on.discard(order["number"])
                if each is not None:
                    self._hang_up(each)
            case "beat":
                name = order["name"]
                beat = importlib.import_module(order["module"]).beat_of(**order["arguments"])
                beaten = lambda: self._report("beating", name, {"beating": True, "name": name})  # noqa: E731
                self._beats[name] = Beats(beat, order["period_s"], order["most_s"], beaten)
            case "depend":
                self._beats[order["name"]].depends_on.add(order["number"])
            case "alive":
                self._beats[order["name"]].alive_s = time.monotonic()
            case "rest":
                self._beats.pop(order["name"]).end()
            case "end":
                self._over = True

    def _changed(self, number: int, state: State) -> None:
        self._report("state", number, {"number": number, "state": state.value})

    def _report(self, kind: str, about: object, message: dict[str, Any]) -> None:
        with self._lock:
            self._unsent[kind, about] = wire.pack(message)
        self._send_reports()

    def _send_reports(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # there is no room now: in the next turn; or the rank has ended
            while self._unsent:
                matter = next(iter(self._unsent))
                self._orders.send(self._unsent[matter])
                del self._unsent[matter]

    def _withhold(self, stopped: bool, now: float) -> None:
        """No membership beats while the rank, or a rank of its replica, does not run."""
        for name, beats in self._beats.items():
            why = beats.reason(stopped, lambda number: self._watched[number].state, now)
            if why != beats.withheld:
                beats.withheld = why
                self._report("withheld", name, {"withheld": why, "name": name})

    def _rank_ended(self) -> None:
        for watcher in self._watchers.values():
            with contextlib.suppress(OSError):
                if watcher.stopped is not None:
                    watcher.sock.send(wire.GONE)
        self._over = True

    # ---------------------------------------------------------------- other monitors

    def _accept(self, now: float) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        half_open = [descriptor for descriptor, watcher in self._watchers.items() if watcher.stopped is None]
        if len(half_open) >= _MOST_HALF_OPEN:
            self._drop(half_open[0])
        if len(self._watchers) >= _MOST_WATCHERS:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watchers[sock.fileno()] = Watcher(sock, now)
        self._poll.register(sock, select.EPOLLIN)

    def _drop(self, descriptor: int) -> None:
        watcher = self._watchers.pop(descriptor, None)
        if watcher is not None:
            self._poll.unregister(watcher.sock)
            watcher.sock.close()

    def _dialled(self, each: Watched) -> None:
        assert each.sock is not None
        self._poll.register(each.sock, select.EPOLLIN | select.EPOLLOUT)

    def _guard(self, each: Watched, do: Callable[[], None]) -> None:
        try:
            do()
        except (Ended, OSError):
            self._hang_up(each)

    def _hang_up(self, each: Watched) -> None:
        if each.sock is not None:
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(each.sock)
            each.sock.close()
            each.sock = None


def main() -> None:
    """Arguments: the rank's process id, a pidfd of it, the descriptors of its connection and of the listening socket."""
    rank, process, orders, listener = map(int, sys.argv[1:5])
    Monitor(rank, process, socket.socket(fileno=orders), socket.socket(fileno=listener)).run()
    # The end of the interpreter ends threads where they next want its lock: one that beats is in native code of torchft, which
    # takes that for an error and aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main()
