"""The module engine on models that a tensor-parallel plan has cut: two tp ranks, and two dp_shard x two tp ranks.

Each world of ranks runs all scenarios of tensor_ranks.py once; each test looks at one of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helixrt.engines.tensor_styles import apply_style, cut_parameter
from helixrt.errors import MisuseError
from tests.engines import tensor_ranks
from tests.ranks_context import wrong_by_scenario

pytestmark = pytest.mark.system  # each rank captures or builds large models


def found_by_ranks(sizes: dict[str, int], names: list[str], folder: Path) -> dict[str, list[str]]:
    """By scenario, what each rank found wrong."""
    given = (sizes, str(folder / "rendezvous"))
    return wrong_by_scenario(
        tensor_ranks.run, [given] * (sizes.get("dp_shard", 1) * sizes["tp"]), names, ends_one="a_lost_rank_is_told"
    )


def check(found: dict[str, list[str]], name: str) -> None:
    failures = [wrong for wrong in found[name] if wrong]
    assert not failures, "\n".join(failures)
    assert found[name], "an earlier scenario failed, so this one did not run"


TENSOR = [scenario.__name__ for scenario in tensor_ranks.TENSOR]
SHARDED = [scenario.__name__ for scenario in tensor_ranks.SHARDED_TENSOR]


@pytest.fixture(scope="module")
def tensor_world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return found_by_ranks({"tp": 2}, TENSOR, tmp_path_factory.mktemp("tensor"))


@pytest.fixture(scope="module")
def sharded_world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return found_by_ranks({"dp_shard": 2, "tp": 2}, SHARDED, tmp_path_factory.mktemp("sharded_tensor"))


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_ranks(tensor_world: dict[str, list[str]], name: str) -> None:
    check(tensor_world, name)


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_tensor_ranks(sharded_world: dict[str, list[str]], name: str) -> None:
    check(sharded_world, name)


def test_a_plan_that_spreads_experts_is_refused_and_says_what_to_do() -> None:
    """The styles of transformers' plans for expert parallelism."""
    mesh: object = None  # it is not reached
    advice = "unmodified models cannot do. Cut each expert over the tp ranks .*'moe_tp_experts'.*helixrt.Stages"
    with pytest.raises(MisuseError, match=f"'ep_dispatch_experts' for the module layers.0.experts; .*{advice}"):
        apply_style("ep_dispatch_experts", nn.Module(), "layers.0.experts", mesh)  # type: ignore[arg-type]
    owner = nn.ParameterDict({"up": torch.ones(2, 3, 4)})
    with pytest.raises(MisuseError, match=f"'grouped_gemm' for the parameter layers.0.experts.up; .*{advice}"):
        cut_parameter("grouped_gemm", owner, "up", "layers.0.experts.up", mesh)  # type: ignore[arg-type]
