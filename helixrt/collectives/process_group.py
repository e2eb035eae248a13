"""`torch.distributed.init_process_group(backend="helix")`: the c10d backend.

In: the store, rank and size that c10d gives. Out: a `torch.distributed.ProcessGroup` for CPU tensors, and for CUDA
tensors through host memory. On torch 2.13 a backend written in Python must be a `ProcessGroup`: a Python `Backend`
cannot be constructed, and one registered *on* a group would take the calls this one does not override.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from helixrt.autoload import BACKEND
from helixrt.collectives.group_lifecycle import GroupLifecycle
from helixrt.errors import ConfigError

if TYPE_CHECKING:
    from helixrt.collectives.operations import Collectives


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
        self._checked = False  # what c10d was asked for: it notes that when this group has been made

    def _calls(self) -> Collectives:
        if not self._checked:
            with suppress(ValueError, TypeError):  # of a group that c10d does not know
                check_devices(dist.get_backend_config(self))
            self._checked = True
        return super()._calls()

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


def check_devices(asked: str) -> None:
    """Raise ConfigError for a c10d backend string, such as "cpu:gloo,cuda:helix", that asks for another backend on some device:
    c10d gives a group that is written in Python the calls of all devices."""
    others = [each for each in asked.split(",") if each.partition(":")[2] not in ("", BACKEND)]
    if others and BACKEND in asked:
        rule = f'helix would take the calls of all devices, and {others[0]} none; use backend="helix", or none of it'
        raise ConfigError("backend", asked, rule)
