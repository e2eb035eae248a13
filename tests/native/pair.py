"""Two engines in one process, joined by one rail: what tests of engines share."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Sequence

import torch

from helixrt.native.engine import Engine, EngineEvent, Options, ring_bytes
from helixrt.native.library import EventKind, Status
from helixrt.protocol.collective.plan import Plan

KINDS = ("sockets", "shared memory")
LONG_S = 60.0  # nothing takes that long; a wait that ends by it is a failure
QUIET = Options(period_s=-1)  # a busy machine may stop a process for longer than the liveness period


def join(engines: Sequence[Engine], kind: str, generation: int = 1) -> None:
    """Begin a generation of two ranks."""
    for rank, engine in enumerate(engines):
        engine.begin(generation, rank, [1 - (rank == other) for other in range(2)])
    ends = socket.socketpair()
    if kind == "sockets":
        for rank, engine in enumerate(engines):
            engine.rail_up(1 - rank, 0, 1, ends[rank])
        return
    memory = os.memfd_create("ring")
    try:
        os.ftruncate(memory, ring_bytes())
        for rank, engine in enumerate(engines):
            engine.rail_up_memory(1 - rank, 0, 1, ends[rank], memory, rank == 0)
    finally:
        os.close(memory)


def run(
    engines: Sequence[Engine],
    make: Callable[[int], Plan],
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    **how: object,
) -> None:
    """One operation on both; raises AssertionError unless it ends well on both."""
    numbers = [
        engine.submit(make(rank), source, out, dtype=out.dtype, timeout_s=LONG_S, **how)  # type: ignore[arg-type]
        for rank, (engine, source, out) in enumerate(zip(engines, sources, outs, strict=True))
    ]
    ends = [engine.wait(number, LONG_S) for engine, number in zip(engines, numbers, strict=True)]
    assert ends == [Status.OK, Status.OK], [engine.print() for engine in engines]


def until(engine: Engine, kind: EventKind) -> EngineEvent:
    """The next event of this kind."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        for event in engine.events():
            if event.kind is kind:
                return event
        select.select([engine.event_fd()], [], [], 1.0)
    raise AssertionError(f"no event {kind.name}:\n{engine.print()}")
