"""Where a rank is in the run: its replica, its data stream, the groups of its replica's ranks.

In: what the rank's process was told, and its `Host`. Out: the part of `Session` that says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from helixrt.job.session_host import Host, SessionSettings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class RankPlace:
    """`device`: that of this rank."""

    def __init__(self, settings: SessionSettings, host: Host, device: torch.device) -> None:
        self.settings, self._host, self.device = settings, host, device

    @property
    def replica(self) -> int:
        """The number of this replica, from 0."""
        return self.settings.replica

    @property
    def replicas(self) -> int:
        """How many replicas are configured; fewer may be running."""
        return self.settings.replicas

    @property
    def folder(self) -> Path | None:
        """The run's folder, for files of the program's own; None without one on this machine."""
        return self._host.folder

    @property
    def shard(self) -> int:
        """The number of this rank among the dp_shard ranks of its replica, from 0."""
        return self.settings.shard

    @property
    def stream(self) -> int:
        """The number of the data stream that this rank reads. An IterableDataset divides itself by it and `streams`."""
        return self.replica * self.settings.mesh.dp_shard + self.shard

    @property
    def streams(self) -> int:
        """How many data streams there are: one for each dp_shard rank of each configured replica."""
        return self.replicas * self.settings.mesh.dp_shard

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks of this replica as a device mesh, for `fully_shard` and collectives of your own: its dimensions are those
        axes of `Mesh` that are larger than 1, by name. Its first use connects the ranks, and initializes torch.distributed in
        this process; all ranks make it. Raises MisuseError for a replica of one rank."""
        return self._host.connect(self.device).device_mesh()

    def group(self, *axes: str) -> ProcessGroup | None:
        """The ranks of this replica that differ from this one in these axes of `Mesh` at most (in any without an axis); None
        where there is no other. For parts of a model that work together, from the thread that trains. As with `device_mesh` the
        first use connects the ranks; all ranks ask for the same axes, in the same order."""
        mesh = self.settings.mesh
        if mesh.ranks == 1:
            return None
        return self._host.connect(self.device).group(*axes)
