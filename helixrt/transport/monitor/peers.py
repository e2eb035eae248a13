"""The peers of one generation as their monitors see them: which of them are to be given up, and why.

In: the peers' monitor addresses, at every `connect`. Out: each dead peer once, with its cause. What a link notices itself
comes first: a process that ended closed its connections, and perhaps sent BYE on them, so its end counts only after a
while, for links that a forked child holds open.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from helixrt.errors import Cause
from helixrt.protocol.liveness import STOPPED
from helixrt.transport.monitor.client import Monitor, give_back, lease
from helixrt.transport.monitor.wire import State

_GONE = 0.5  # of a period, after the report of a process's end


class WatchedPeers:
    """`host`: the address of this host that monitors meet at. Owns a lease of this rank's monitor until `close`.

    Raises ConfigError if the address is not one of this host's.
    """

    def __init__(self, host: str, secret: bytes, period_s: float) -> None:
        self._monitor: Monitor = lease(host)
        self._monitor.know(secret)
        self._secret, self._period_s = secret, period_s
        self._numbers: dict[int, int] = {}  # peer -> number at the monitor
        self._gone: dict[int, float] = {}  # peer -> when it counts
        self._closed = False

    def address(self) -> bytes:
        return self._monitor.address()

    @property
    def descriptor(self) -> int:
        """Readable when there is news; -1: there is none to come."""
        return self._monitor.descriptor if self._numbers else -1

    def watch(self, addresses: Mapping[int, bytes]) -> None:
        """These peers from now on, and no others. Raises ValueError for what is no address."""
        self.forget()
        for peer, address in addresses.items():
            self._numbers[peer] = self._monitor.watch(address, self._secret, self._period_s)

    def forget(self) -> None:
        for number in self._numbers.values():
            self._monitor.forget(number)
        self._numbers.clear()
        self._gone.clear()

    def dead(self, now: float) -> list[tuple[int, Cause]]:
        """Peers that count as dead since the last call."""
        if not self._numbers:
            return []
        self._monitor.look()
        found: list[tuple[int, Cause]] = []
        for peer, number in list(self._numbers.items()):
            state = self._monitor.state(number)
            if state is State.GONE and now < self._gone.setdefault(peer, now + _GONE * self._period_s):
                continue
            if state is not State.RUNNING:
                found.append((peer, Cause(self._why(state), f"rank {peer}")))
                self._monitor.forget(self._numbers.pop(peer))
                self._gone.pop(peer, None)
        return found

    def _why(self, state: State) -> str:
        return {
            State.STOPPED: f"its process has been stopped for {STOPPED * self._period_s:g} s",
            State.FROZEN: "its process and its monitor process do not run, although its host answers",
        }.get(state, "its process ended")

    def next_deadline(self) -> float | None:
        return min(self._gone.values(), default=None)

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self.forget()
            give_back(self._monitor)
