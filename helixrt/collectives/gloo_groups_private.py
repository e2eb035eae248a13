"""Gloo groups with one worker thread each, on an address of ours; the private parts of torch (2.13 to 2.15) that this needs.

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
that its code calls is replaced. Arguments that are not known here go into the options where these have them. Where they do not,
and where torch's class has another shape, torch makes the group in its own way, and one line in the log says what is lost.
"""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from helixrt.private_api import GLOO_GROUPS, tell_once, usable

WORKERS = 1
_TORCH_TIMEOUT = timedelta(seconds=1800)  # the default of torch's constructor
_Gloo: Any = dist.ProcessGroupGloo
_bound: list[Any] = []  # the device of `bind_gloo`


def gloo_backend(store: dist.Store, rank: int, size: int, timeout: timedelta = _TORCH_TIMEOUT, **others: Any) -> Any:
    """What `dist.ProcessGroupGloo(store, rank, size, timeout, **others)` makes, with one worker thread, on the address of
    `bind_gloo` or else on the same interfaces. `others`: what later versions of torch take.

    Raises RuntimeError (torch's) when the other ranks do not come in time.
    """
    if usable(GLOO_GROUPS):
        options = _Gloo._Options()
        if all(hasattr(options, name) for name in others):
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
            named = [_Gloo.create_device(interface=name) for name in interfaces.split(",") if name]
            values = {"_devices": _bound or named or [_Gloo.create_default_device()], "_threads": WORKERS, "_timeout": timeout}
            for name, value in {**values, **others}.items():
                setattr(options, name, value)
            try:
                return _Gloo(store, rank, size, options)
            except TypeError as error:  # refused before anything is connected
                tell_once(GLOO_GROUPS, f"does not make a Gloo group of options ({str(error).partition(chr(10))[0]})")
        else:
            tell_once(GLOO_GROUPS, f"makes Gloo groups with {', '.join(sorted(others))}, which their options do not have")
    return _Gloo(store, rank, size, timeout=timeout, **others)


_CALLED = inspect.signature(gloo_backend)


class _MadeWithOneWorker(type):
    """Of the class that torch.distributed calls to make a Gloo group: has the attributes and the instances of torch's own."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """A group of the arguments that torch has given so far (store, rank, size, timeout), or torch's of any others."""
        try:
            _CALLED.bind(*args, **kwargs)
        except TypeError:
            return _Gloo(*args, **kwargs)
        return gloo_backend(*args, **kwargs)

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
    if usable(GLOO_GROUPS):
        distributed_c10d.ProcessGroupGloo = _OneWorkerGloo  # type: ignore[misc, assignment]


def bind_gloo(address: str) -> None:
    """As `one_gloo_worker`, and the groups are made on `address`; a later call replaces an earlier one.

    Raises RuntimeError for what is no address of this machine.
    """
    if usable(GLOO_GROUPS):
        _bound[:] = [_Gloo.create_device(hostname=address)]
    one_gloo_worker()
