"""`torch.distributed.init_process_group(backend="helix")`: the c10d backend.

In: the store, rank and size that c10d gives. Out: a `torch.distributed.ProcessGroup` for CPU tensors, and for CUDA
tensors through host memory. On torch 2.13 a backend written in Python must be a `ProcessGroup`: a Python `Backend`
cannot be constructed, and one registered *on* a group would take the calls this one does not override.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from helixrt.autoload import BACKEND
from helixrt.collectives.group_lifecycle import GroupLifecycle


class HelixGroup(GroupLifecycle, dist.ProcessGroup):  # type: ignore[misc]
    """The group that `init_process_group` and `new_group` make; its ranks never change.

    Nothing repairs a job that loses a rank here, so a rank that is stopped or cannot be reached is lost only after ten seconds.
    A process that ends is noticed at once all the same.
    """

    _heartbeat_s = 10.0

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        any_init: Any = dist.ProcessGroup.__init__
        any_init(self, rank, size)
        self._name, self._description = "", BACKEND
        self._unconfigured(timeout)
        self._join(store, rank, size, f"group-{rank}")

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description
