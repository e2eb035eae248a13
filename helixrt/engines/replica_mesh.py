"""The ranks of one replica by the axes of its mesh: pp, dp_shard, cp, tp.

In: the axes' sizes, in a process whose default process group holds the replica's ranks, by group rank (`job.places`). Out: this
rank's place on each axis, and process groups of the ranks that differ from it in one axis, or in several taken together.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from helixrt.engines.inner_group import InnerGroup
from helixrt.errors import MisuseError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_shard", "cp", "tp")  # the last one varies fastest with the group rank


class ReplicaMesh:
    """One rank's view of its replica. Groups are made when they are first asked for: all ranks of the replica ask for the same
    ones, in the same order, from one thread.

    `sizes`: of the axes; those left out are 1. `timeout`: of a collective.
    """

    def __init__(
        self, sizes: Mapping[str, int], group_rank: int = 0, device: str = "cpu", timeout: timedelta | None = None
    ) -> None:
        self._sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        self._device, self._timeout, self._rank = device, timeout, group_rank
        shape = tuple(self._sizes.values())
        self._ranks = torch.arange(prod(shape)).view(shape)
        self._place = self.place_of(group_rank)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._inner: dict[str, InnerGroup] = {}
        self._mesh: DeviceMesh | None = None

    def size(self, *axes: str) -> int:
        """Of these axes together; of the whole replica without any."""
        return prod(self._sizes[axis] for axis in axes or AXES)

    def rank(self, *axes: str) -> int:
        """This rank's number on these axes together, the last of them varying fastest; its group rank without any."""
        number = 0
        for axis in _ordered(axes):
            number = number * self._sizes[axis] + self._place[axis]
        return number

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in these axes at most (in the whole replica without any), ordered as `rank`
        numbers them; None where it is alone."""
        key = tuple(axis for axis in _ordered(axes) if self._sizes[axis] > 1)
        if not key:
            return None
        if key not in self._groups:
            members = self.members(*key)
            if len(members) == dist.get_world_size():
                world = dist.group.WORLD
                assert world is not None
                self._groups[key] = world
            else:
                self._groups[key] = self._new_group(members)
        return self._groups[key]

    def members(self, *axes: str) -> list[int]:
        """The group ranks that differ from this one in these axes at most (all without any), ordered as `rank` numbers them."""
        free = _ordered(axes)
        spans = [range(self._sizes[axis]) if axis in free else (self._place[axis],) for axis in AXES]
        return [int(self._ranks[at]) for at in product(*spans)]

    def place_of(self, group_rank: int) -> dict[str, int]:
        """The place of a rank of this replica on each axis."""
        return dict(zip(AXES, (int(i) for i in (self._ranks == group_rank).nonzero()[0]), strict=True))

    def separate_group(self, *axes: str) -> dist.ProcessGroup | None:
        """A new group of the ranks of `group(*axes)`, for collectives of another thread: those of one group must be called in
        the same order on all its ranks."""
        members = self.members(*axes)
        return self._new_group(members) if len(members) > 1 else None

    def device_mesh(self) -> DeviceMesh:
        """The axes that are larger than 1, as dimensions of these names. Raises MisuseError for a replica of one rank."""
        from torch.distributed.device_mesh import DeviceMesh

        if self._mesh is None:
            names = tuple(axis for axis in AXES if self._sizes[axis] > 1)
            if not names:
                raise MisuseError("a replica of one rank has no device mesh; run with mesh=Mesh(...)")
            groups = [group for name in names if (group := self.group(name)) is not None]
            shape = [self._sizes[name] for name in names]
            self._mesh = (
                DeviceMesh.from_group(groups[0], self._device, mesh_dim_names=names)
                if len(groups) == 1
                else DeviceMesh.from_group(groups, self._device, self._ranks.view(shape), mesh_dim_names=names)
            )
        return self._mesh

    def inner(self, axis: str) -> InnerGroup:
        """Small exchanges along one axis that is larger than 1."""
        if axis not in self._inner:
            mesh = self.device_mesh()
            self._inner[axis] = InnerGroup(mesh if mesh.ndim == 1 else mesh[axis])
        return self._inner[axis]

    def _new_group(self, members: list[int]) -> dist.ProcessGroup:
        group = dist.new_group(members, timeout=self._timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # this rank is one of its members
        return group



def _ordered(axes: tuple[str, ...]) -> tuple[str, ...]:
    """In the mesh's order; all axes for none."""
    if unknown := set(axes) - set(AXES):
        raise ValueError(f"{sorted(unknown)[0]} is no axis of a replica's mesh: {', '.join(AXES)}")
    return tuple(axis for axis in AXES if axis in axes) if axes else AXES
