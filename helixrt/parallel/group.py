"""A process group, as functional collectives are given it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """A process group as functional collectives know it: by name. `rank` is this rank's place in it."""

    name: str
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Group | None:
        """The group, or None for a single rank. It must stay registered and referenced as long as it is used."""
        return None if group is None or group.size() == 1 else Group(group.group_name, group.rank(), group.size())
