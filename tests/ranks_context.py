"""How tests start ranks as processes: from a server that has imported torch, once for the whole session.

A process of `spawn` imports torch, seconds of compute for every rank of every test; one that the server forks has it. The
server runs one thread and holds nothing of a test; it ends with the session.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_IMPORTED = [
    "torch.distributed",
    "torch.distributed.fsdp",  # brings DTensor
    "helixrt.collectives",
    "helixrt.transport.auto",
    "helixrt.transport.tcp.endpoint",
    "helixrt.passes.capture",  # brings torch's tracer, which takes as long as torch itself
]


def ranks_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context
