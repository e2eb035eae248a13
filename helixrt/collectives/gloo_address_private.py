"""Has the Gloo groups of this process listen on an address of ours: a private part of torch (2.13).

In: an address of this machine. Out: nothing; every Gloo group that torch.distributed makes from then on is bound to it. torch
knows an interface's name alone (GLOO_SOCKET_IFNAME), or goes by the machine's name: an interface may have several addresses,
and the machine's name often means loopback. It ignores `pg_options` for Gloo, and groups are made in many places (subgroups,
device meshes, the user's own), so the class that its private code calls is replaced.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_Gloo: Any = dist.ProcessGroupGloo


class _Bound(type):
    """Stands for torch's class: has its attributes and its instances."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


def bind_gloo(address: str) -> None:
    """Gloo groups are made on `address` from now on, in the whole process; a later call replaces an earlier one.

    Raises RuntimeError for what is no address of this machine.
    """
    device = _Gloo.create_device(hostname=address)

    class BoundGloo(metaclass=_Bound):
        def __new__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            options = _Gloo._Options()
            options._devices, options._timeout = [device], timeout
            return _Gloo(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = BoundGloo  # type: ignore[misc]
