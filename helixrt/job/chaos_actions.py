"""What chaos does to a process once a kill or a fault is due: the effects of `helixrt.job.chaos`.

In: a fault's kind, or the processes of a replica as they recorded themselves in the run's store. Out: a process that is
stopped, hangs, is slower, has an error, or is killed.

A process is signalled only by a process of the same host, boot and process-id namespace (`host_identity`); one
elsewhere is asked through the store to kill itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import threading
import time
from contextlib import suppress

from helixrt.errors import Retryable
from helixrt.job.config import FaultConfig
from helixrt.job.machine import boot_identity
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import OfRank, kill_key

_WAIT_S = 1.0  # one wait for a request to die; a longer one asks again
_MORE_THAN_ANY_MACHINE_HAS = 1 << 60  # bytes


class InjectedFault(RuntimeError):
    """The error that chaos raises."""


def inflict(fault: FaultConfig) -> None:
    """Carry it out in the calling thread. Returns only if the fault is `slow`, or a stopped process is continued."""
    match fault.kind:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                time.sleep(3600.0)
        case "hang_lock":
            libc = ctypes.PyDLL(None)  # calls through PyDLL keep the interpreter lock
            while True:
                libc.sleep(3600)
        case "slow":
            time.sleep(fault.seconds)
        case "exception":
            raise InjectedFault(f"chaos: exception at {fault.moment}")
        case "oom":
            import torch

            torch.empty(_MORE_THAN_ANY_MACHINE_HAS, dtype=torch.uint8)  # raises what torch's allocator raises


def host_identity() -> str:
    """The same for processes that can signal each other by process id, and for no others. Contains no space."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return "/".join((platform.node(), boot_identity(), namespace)).replace(" ", "_")


class ReplicaKiller:
    """Kills all processes of one incarnation of a replica; every one of its ranks has one.

    `life` is replica/incarnation. With `obeys`, the process kills itself when another rank of its replica asks it to:
    one on another host cannot.
    """

    def __init__(self, store: RunStore, life: str, rank: int, ranks: int, obeys: bool, host: str = "") -> None:
        self._store, self._life, self._rank, self._ranks = store, life, rank, ranks
        self._host = host or host_identity()
        self._closed = threading.Event()
        store.put_if_absent(OfRank.PID.key(life, rank), f"{self._host} {os.getpid()}")
        if obeys:
            threading.Thread(target=self._obey, name="helixrt-chaos", daemon=True).start()

    def kill(self) -> None:
        """SIGKILL to every process of this replica's life, this one last."""
        mine = self.of_this_host()
        if len(mine) < self._ranks:
            self._store.put_if_absent(kill_key(self._life), "all")
        for pid in mine:
            if pid != os.getpid():
                with suppress(ProcessLookupError):  # it was quicker
                    os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def of_this_host(self) -> list[int]:
        """Process ids of the ranks that this process may signal."""
        recorded = [self._store.get(OfRank.PID.key(self._life, rank)) for rank in range(self._ranks)]
        found = [text.split(" ") for text in recorded if text is not None]
        return [int(pid) for host, pid in found if host == self._host]

    def close(self) -> None:
        """Obey no more; idempotent. The thread ends by itself within its next wait."""
        self._closed.set()

    def _obey(self) -> None:
        while not self._closed.is_set():
            try:
                self._store.wait(kill_key(self._life), _WAIT_S)
            except Retryable:
                self._closed.wait(0.05)
                continue
            os.kill(os.getpid(), signal.SIGKILL)
