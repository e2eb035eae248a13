"""The process that ranks are forked from: it has imported everything, so that a rank starts in milliseconds, not seconds.

In: `Fork`s over a pipe. Out: `Forked` and `Ended`. It has one thread and no exchange of its own. It ends with its owner,
and so do its ranks. A forked rank that is done, exits or raises ends as any Python program does, with all exit handlers.
"""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection

from helixrt.bench.fault_matrix.messages import ProcessSettings

_LOOK_S = 0.01


@dataclass(frozen=True)
class Fork:
    settings: ProcessSettings
    path: str  # of the socket at which the driver waits for the rank


@dataclass(frozen=True)
class Forked:
    pid: int


@dataclass(frozen=True)
class Ended:
    pid: int
    code: int  # negative: the signal


def fork_ranks(pipe: Connection) -> None:
    """Main function of the process."""
    from helixrt.bench.fault_matrix import rank
    from helixrt.transport.auto import AutoEndpoint  # noqa: F401, with what ranks would import later

    gc.collect()
    gc.freeze()  # the collector does not touch imported objects again, so their pages stay shared
    living: set[int] = set()
    try:
        pipe.send(Forked(os.getpid()))
        while True:
            if pipe.poll(_LOOK_S):
                order = pipe.recv()
                assert isinstance(order, Fork)
                pid = os.fork()
                if pid == 0:
                    living.clear()
                    pipe.close()
                    rank.main(order.settings, order.path)
                    return
                living.add(pid)
                pipe.send(Forked(pid))
            for pid in list(living):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    living.discard(pid)
                    pipe.send(Ended(pid, os.waitstatus_to_exitcode(status)))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the owner is gone
        pass
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)
