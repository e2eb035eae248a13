"""Two ranks as threads over a real Gloo group, for tests of passes in which ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def registered(backend: Any, rank: int, name: str) -> Iterator[None]:
    """Within the block `name` is a group of two ranks, over `backend`."""
    group = dist.ProcessGroup(dist.HashStore(), rank, 2)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    try:
        yield
    finally:
        torch._C._distributed_c10d._unregister_process_group(name)


def on_two_ranks(run_stages: Any, names: Sequence[str], work: Callable[[int], Any]) -> list[Any]:
    """The results of `work(rank)`. Threads share one registry of groups, so each rank has a name of its own for the group."""

    def body(rank: int, backend: Any) -> Any:
        with registered(backend, rank, names[rank]):
            return work(rank)

    return run_stages(2, body)
