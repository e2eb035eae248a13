"""Where the ranks of a replica stand in its mesh: their coordinates, in the order of their group ranks.

Group rank = ((pp * DP_SHARD + dp_shard) * CP + cp) * TP + tp, with capitals for the sizes of the axes.
"""

from __future__ import annotations

from itertools import product

from helixrt.job.config import MeshConfig
from helixrt.replica.contracts import Coordinate


def axes_of(mesh: MeshConfig) -> dict[str, int]:
    """The sizes of a replica's axes by name."""
    return {"pp": mesh.pp, "dp_shard": mesh.dp_shard, "cp": mesh.cp, "tp": mesh.tp}


def group_world_size(mesh: MeshConfig) -> int:
    """How many ranks a replica has."""
    return mesh.pp * mesh.dp_shard * mesh.cp * mesh.tp


def group_rank(mesh: MeshConfig, at: Coordinate) -> int:
    """A rank's index inside its replica."""
    return ((at.pp * mesh.dp_shard + at.dp_shard) * mesh.cp + at.cp) * mesh.tp + at.tp


def coordinates(mesh: MeshConfig, replica: int) -> list[Coordinate]:
    """Of all ranks of a replica, by group rank."""
    axes = product(range(mesh.pp), range(mesh.dp_shard), range(mesh.cp), range(mesh.tp))
    return [Coordinate(replica, *at) for at in axes]
