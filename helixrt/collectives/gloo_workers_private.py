"""Gloo groups with one worker thread each; the private parts of torch that this needs, all in this file.

torch (2.13) gives a Gloo group two worker threads. After each collective a worker writes the collective's name into a
`std::string` of the group (`pgStatus_->lastCompletedWorkName`, in `ProcessGroupGloo::runLoop`) without holding the group's
lock. A name longer than 15 characters lies on the heap (`ALLGATHER_COALESCED`: every functional all-gather, so every tensor
parallel model with a sharded sequence). Two workers that end at the same moment then free one block twice, and later
allocations of up to 24 bytes share memory: a rank dies of a corrupt heap in a later collective, or a small buffer is
overwritten. One worker has nobody to race with. It runs a group's collectives in the order of their calls; point-to-point
messages do not pass through workers.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

WORKERS = 1
_TORCH_TIMEOUT = timedelta(seconds=1800)  # the default of torch's constructor


def gloo_backend(store: dist.Store, rank: int, size: int, timeout: timedelta = _TORCH_TIMEOUT) -> Any:
    """What `dist.ProcessGroupGloo(store, rank, size, timeout)` makes, on the same interfaces, with one worker thread.

    Raises RuntimeError (torch's) when the other ranks do not come in time.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    named = [gloo.create_device(interface=name) for name in interfaces.split(",") if name]
    options._devices = named or [gloo.create_default_device()]
    options._threads = WORKERS
    options._timeout = timeout
    return gloo(store, rank, size, options)


class _MadeWithOneWorker(type):
    """Of the class that torch.distributed calls to make a Gloo group; its instances are torch's own."""

    def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta = _TORCH_TIMEOUT) -> Any:
        return gloo_backend(store, rank, size, timeout)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)


class _OneWorkerGloo(metaclass=_MadeWithOneWorker):
    pass


def one_gloo_worker() -> None:
    """From now on `init_process_group`, `new_group` and device meshes of this process make Gloo groups with one worker thread.

    torch 2.13 ignores `pg_options` for Gloo, and meshes make groups where no options reach, so the class is replaced where
    torch.distributed looks it up. Groups that exist keep their threads. Calling it again changes nothing.
    """
    distributed_c10d.ProcessGroupGloo = _OneWorkerGloo  # type: ignore[misc, assignment]
