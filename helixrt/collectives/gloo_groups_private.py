"""Gloo groups with one worker thread each, on an address of ours; the private parts of torch (2.13) that this needs.

In: an address of this machine, or nothing. Out: every Gloo group that torch.distributed makes from then on is made so.

One worker: torch gives a Gloo group two worker threads. After each collective a worker writes the collective's name into a
`std::string` of the group (`pgStatus_->lastCompletedWorkName`, in `ProcessGroupGloo::runLoop`) without holding the group's
lock. A name longer than 15 characters is stored on the heap (`ALLGATHER_COALESCED`: every functional all-gather, so every
tensor parallel model with a sharded sequence). Two workers that end at the same moment then free one block twice, and later
allocations of up to 24 bytes share memory: a rank dies of a corrupt heap in a later collective, or a small buffer is
overwritten. With one worker there is no race. It runs a group's collectives in the order of their calls; point-to-point
messages do not pass through workers.

The address: torch knows an interface's name alone (GLOO_SOCKET_IFNAME), or goes by the machine's name. An interface may have
several addresses, and the machine's name often means loopback.

torch ignores `pg_options` for Gloo, and groups are made in many places (subgroups, device meshes, the user's own), so the class
that its code calls is replaced.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

WORKERS = 1
_TORCH_TIMEOUT = timedelta(seconds=1800)  # the default of torch's constructor
_Gloo: Any = dist.ProcessGroupGloo
_bound: list[Any] = []  # the device of `bind_gloo`


def gloo_backend(store: dist.Store, rank: int, size: int, timeout: timedelta = _TORCH_TIMEOUT) -> Any:
    """What `dist.ProcessGroupGloo(store, rank, size, timeout)` makes, with one worker thread, on the address of `bind_gloo` or
    else on the same interfaces.

    Raises RuntimeError (torch's) when the other ranks do not come in time.
    """
    options = _Gloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    named = [_Gloo.create_device(interface=name) for name in interfaces.split(",") if name]
    options._devices = _bound or named or [_Gloo.create_default_device()]
    options._threads = WORKERS
    options._timeout = timeout
    return _Gloo(store, rank, size, options)


class _MadeWithOneWorker(type):
    """Of the class that torch.distributed calls to make a Gloo group: has the attributes and the instances of torch's own."""

    def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta = _TORCH_TIMEOUT) -> Any:
        return gloo_backend(store, rank, size, timeout)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


class _OneWorkerGloo(metaclass=_MadeWithOneWorker):
    pass


def one_gloo_worker() -> None:
    """From now on `init_process_group`, `new_group` and device meshes of this process make Gloo groups with one worker thread.

    Groups that exist keep their threads. Calling it again changes nothing.
    """
    distributed_c10d.ProcessGroupGloo = _OneWorkerGloo  # type: ignore[misc, assignment]


def bind_gloo(address: str) -> None:
    """As `one_gloo_worker`, and the groups are made on `address`; a later call replaces an earlier one.

    Raises RuntimeError for what is no address of this machine.
    """
    _bound[:] = [_Gloo.create_device(hostname=address)]
    one_gloo_worker()
