"""Time until the survivors of an all-reduce detect that a process was killed.

In: the number of ranks. Out: seconds per survivor. The ranks are processes of this host that call all-reduces in a loop.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from typing import Any

import torch
import torch.multiprocessing as mp

from helixrt.collectives.endpoints import open_endpoint
from helixrt.collectives.ftar import FtarExchange
from helixrt.errors import Fatal, Retryable
from helixrt.replica.store import host_store

SECRET = b"the secret of a benchmark"
HOST = "127.0.0.1"
TIMEOUT_S = 120.0


def _victim(rank: int, ranks: int, address: str, said: Any) -> None:
    torch.set_num_threads(1)
    exchange = FtarExchange(open_endpoint(SECRET, HOST), TIMEOUT_S)
    exchange.configure(1, range(ranks), rank, f"{address}/kill")
    source, out = torch.ones(1 << 18), torch.empty(1 << 18)
    exchange.all_reduce(source, out)
    said.put((rank, os.getpid(), 0.0))
    try:
        while True:
            exchange.all_reduce(source, out)
    except Retryable:
        said.put((rank, 0, time.monotonic()))
    exchange.close()


def measure_kill(ranks: int) -> list[float]:
    """Seconds from SIGKILL of the last rank, in the middle of all-reduces, until each survivor's call raised."""
    server, address = host_store(HOST)
    context = mp.get_context("spawn")
    said = context.Queue()
    processes = [context.Process(target=_victim, args=(r, ranks, address, said), daemon=True) for r in range(ranks)]
    for process in processes:
        process.start()
    try:
        pids = dict((rank, pid) for rank, pid, _ in (said.get(timeout=TIMEOUT_S) for _ in range(ranks)))
        time.sleep(0.2)
        killed = time.monotonic()
        os.kill(pids[ranks - 1], signal.SIGKILL)
        noticed = [said.get(timeout=TIMEOUT_S)[2] - killed for _ in range(ranks - 1)]
    except queue.Empty:
        raise Fatal(f"a rank did not notice within {TIMEOUT_S:g} s that another one was killed") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    del server
    return noticed
