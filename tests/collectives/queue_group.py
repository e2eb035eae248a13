"""All ranks of one communicator in one process, over queues (`queue_endpoint`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from helixrt.collectives.communicator import Communicator
from helixrt.collectives.operations import Collectives
from helixrt.collectives.reduction import Op, Reduction
from helixrt.collectives.staging import Staging
from helixrt.protocol.collective.algorithms.layout import Tuning
from tests.collectives.queue_endpoint import Hub

DEADLINE_S = 60.0
SUM = Reduction(Op.SUM)
SMALL = Tuning(
    chunk_bytes=1 << 10,
    chunks=2,
    least_chunk_bytes=128,
    direct_bytes=2 << 10,
    two_step_bytes=4 << 10,
    halving_bytes=8 << 10,
)


class Group:
    """A thread for each rank. `staging`: of a rank, if not the usual one."""

    def __init__(self, size: int, tuning: Tuning = SMALL, staging: Callable[[int], Staging | None] = lambda rank: None) -> None:
        self.hub, self.size = Hub(), size
        self.endpoints = [self.hub.endpoint() for _ in range(size)]
        self.ranks = [Collectives(Communicator(e, tuning, f"test-{i}"), staging(i)) for i, e in enumerate(self.endpoints)]
        self.pool = ThreadPoolExecutor(size)
        self.configure(1, range(size))

    def configure(self, generation: int, members: Any) -> None:
        members = list(members)

        def begin(rank: int) -> None:
            peers = {i: self.endpoints[m].address() for i, m in enumerate(members) if m != rank}
            self.ranks[rank].communicator.begin()
            self.ranks[rank].communicator.configure(generation, members.index(rank), peers, DEADLINE_S)

        self.on_each(begin, members)

    def on_each(self, call: Callable[[int], Any], members: Any = None) -> list[Any]:
        futures = [self.pool.submit(call, rank) for rank in (range(self.size) if members is None else members)]
        return [future.result(DEADLINE_S) for future in futures]

    def close(self) -> None:
        for rank in self.ranks:
            rank.communicator.close()
            rank.communicator.close()
        self.pool.shutdown()


def tensor(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))
