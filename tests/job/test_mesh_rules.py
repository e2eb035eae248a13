"""What docs/concepts/mesh.md says raises does so, as far as one process can show it, and says which axis is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import helixrt
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.stage_ranks import ParameterLayout, StageRanks
from helixrt.errors import ConfigError
from helixrt.job.mesh import Mesh
from helixrt.job.session import Session
from tests.job.session_world import session_with
from tests.job.test_captured import StageHost, perceptron

AXES = ("pp", "dp_shard", "cp", "tp")


def session(**sizes: int) -> Session:
    return session_with(StageHost(), mesh=Mesh(**sizes))


def compiled(session: Session) -> Any:
    model = helixrt.compile(perceptron(), loss=mse_loss, microbatches=4)
    x = torch.zeros(8, 6, dtype=torch.float64)
    return session.parallelize(model, example=helixrt.ExampleBatch(x, target=x[:, :2]))


def plain(session: Session) -> Any:
    return session.parallelize(nn.Linear(2, 2))


def prepared(session: Session) -> Any:
    model = nn.Linear(2, 2)
    return session.prepare(model, torch.optim.SGD(model.parameters()), [], until=1)


@pytest.mark.parametrize(
    ("model", "axes", "rule"),
    [
        (plain, ("pp",), r"needs session\.parallelize\(helixrt\.compile\(model"),
        (plain, ("cp",), r"needs helixrt\.Stages or, for transformers models, session\.parallelize\(helixrt\.compile"),
        (compiled, ("dp_shard",), "must be 1 for a captured model"),
        (prepared, AXES, r"session\.prepare takes models that are whole on each rank"),
    ],
    ids=["plain-pp", "plain-cp", "compiled", "prepared"],
)
def test_axes_that_a_model_cannot_have(model: Callable[[Session], Any], axes: tuple[str, ...], rule: str) -> None:
    for axis in axes:
        with pytest.raises(ConfigError, match=rf"^mesh\.{axis}=2: .*{rule}"):
            model(session(**{axis: 2}))


@pytest.mark.parametrize("axis", AXES)
def test_a_size_below_one(axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"^mesh\.{axis}=0: must be at least 1"):
        Mesh(**{axis: 0}).check_supported()


class Unconnected(ReplicaMesh):
    def group(self, *axes: str) -> None:
        """No ranks are there."""


def test_a_parameter_of_two_parts_has_one_layout() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    cut = {"weight": ParameterLayout(sharded=("tp",))}
    with pytest.raises(ConfigError, match=r"^stages\.layouts=weight: is .* in part 3, and .* before"):
        StageRanks(Unconnected({"tp": 2}), {0: first, 3: second}, lambda module: cut if module is first else {})
