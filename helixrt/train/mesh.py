"""The ranks that share the built-in model, from the settings: process groups in a session, sizes alone before a launch."""

from __future__ import annotations

from collections.abc import Callable

from helixrt import Mesh, Session
from helixrt.parallel.group import Group
from helixrt.train.config import TrainConfig
from helixrt.train.models.parallel import EXPERT_AXES, ParallelGroups, check_groups

Find = Callable[..., Group | None]  # the group of axes


def mesh_of(config: TrainConfig) -> Mesh:
    """Of one replica."""
    mesh = config.mesh
    return Mesh(mesh.pp, mesh.dp_shard, mesh.cp, mesh.tp)


def session_groups(session: Session, config: TrainConfig) -> ParallelGroups:
    """Of this rank. All ranks of a replica call it together; where they share no layer, nothing is connected."""
    if config.mesh.dp_shard * config.mesh.cp * config.mesh.tp == 1:
        return ParallelGroups()
    return _groups(config, lambda *axes: Group.of(session.group(*axes)))


def check_sharing(config: TrainConfig) -> None:
    """Raises ConfigError for a model that the ranks of the mesh cannot share evenly."""
    sizes = {axis: getattr(config.mesh, axis) for axis in ("dp_shard", "cp", "tp")}

    def of_size(*axes: str) -> Group | None:
        size = 1
        for axis in axes:
            size *= sizes[axis]
        return Group(" x ".join(axes), 0, size) if size > 1 else None

    check_groups(config.model, config.data.seq_len, _groups(config, of_size))


def _groups(config: TrainConfig, find: Find) -> ParallelGroups:
    tp, cp = find("tp"), find("cp")
    ep = find(*EXPERT_AXES) if config.model.experts else None
    return ParallelGroups(tp=tp, sequence=config.parallel.sequence and tp is not None, cp=cp, ep=ep)
