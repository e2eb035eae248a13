"""torch's autoload entry point (`torch.backends`): `init_process_group(backend="helix")` needs no import of helixrt.

In: nothing; torch calls `torch_backend` at the end of `import torch`. Out: the c10d backend is known by name. What it takes is
imported when a group is made. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches torch's autoload off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup, Store

BACKEND = "helix"
DEVICES = ["cpu", "cuda"]


def torch_backend() -> None:
    """Make c10d know the backend; idempotent. A torch that is built without torch.distributed has no backends."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _group, devices=DEVICES)


def _group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    from helixrt.collectives.process_group import HelixGroup

    made: Any = HelixGroup(store, rank, size, timeout)
    return made
