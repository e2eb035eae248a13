"""Layouts of parameters that cannot be, and norms on a rank that is alone in its stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.stage_ranks import ParameterLayout, StageRanks
from helixrt.errors import ConfigError


def test_layouts_name_axes_that_ranks_of_a_stage_can_differ_in() -> None:
    with pytest.raises(ConfigError, match=r"ParameterLayout\.sharded=pp: must be axes out of dp_shard, cp, tp"):
        ParameterLayout(sharded=("pp",))
    with pytest.raises(ConfigError, match=r"ParameterLayout\.summed=ep: must be axes out of dp_shard, cp, tp"):
        ParameterLayout(summed=("ep",))
    with pytest.raises(ConfigError, match=r"ParameterLayout\.summed=cp: is in `sharded` too"):
        ParameterLayout(sharded=("cp", "tp"))


def test_a_shared_parameter_has_one_layout() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    mesh = ReplicaMesh({})
    assert len(StageRanks(mesh, {0: first, 3: second}, None).layouts) == 3
    cut = {"weight": ParameterLayout(sharded=("tp",))}
    with pytest.raises(ConfigError, match=r"stages\.layouts=bias_: part 0 has no such parameter"):
        StageRanks(mesh, {0: first}, lambda module: {"bias_": ParameterLayout()})
    # On this mesh no axis has two ranks, so whole and cut are the same.
    assert len(set(StageRanks(mesh, {0: first, 3: second}, lambda m: cut if m is first else {}).layouts.values())) == 1


def test_alone_the_norm_is_that_of_the_buckets_that_count() -> None:
    ranks = StageRanks(ReplicaMesh({}), {0: nn.Linear(2, 2)}, None)
    buckets = [torch.randn(7, generator=torch.Generator().manual_seed(3)) for _ in range(3)]

    def named(bucket: int) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("nothing is compared on one rank")

    layouts = [ParameterLayout()] * 3
    whole = ranks.squared_norm(buckets, layouts, named)
    assert whole == pytest.approx(torch.cat(buckets).double().square().sum().item(), rel=1e-12)
    part = ranks.squared_norm(buckets, layouts, named, frozenset({1}))
    assert part == pytest.approx(torch.cat([buckets[0], buckets[2]]).double().square().sum().item(), rel=1e-12)
    assert ranks.mean_loss(2.5) == 2.5
