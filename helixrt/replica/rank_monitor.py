"""The addresses of the monitor processes of a replica's ranks, at its leader.

A rank that does not lead publishes its monitor's address in the run's store; the leader's membership depends on all of them
(`TorchftMembership.depend_on`), so the replica is withdrawn when any of its ranks is stopped.
"""

from __future__ import annotations

from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import OfRank
from helixrt.transport.monitor.client import give_back, lease, unsupported


class PublishedMonitor:
    """Of rank `rank` in this `life` of its replica, at the address `host` of this machine; `close` gives it back."""

    def __init__(self, store: RunStore, life: str, rank: int, host: str, secret: bytes) -> None:
        self._monitor = None
        if unsupported() is None:
            self._monitor = lease(host)
            self._monitor.know(secret)
            self._monitor.start()
            store.put_if_absent(OfRank.MONITOR.key(life, rank), self._monitor.address().decode())

    def close(self) -> None:
        """Idempotent."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            give_back(monitor)


def monitors(store: RunStore, life: str, ranks: int, timeout_s: float) -> list[bytes]:
    """Of all ranks but the leader. Raises Retryable if one does not publish its own in time."""
    if unsupported() is not None:
        return []
    return [store.wait(OfRank.MONITOR.key(life, rank), timeout_s).encode() for rank in range(1, ranks)]
