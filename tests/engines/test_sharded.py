"""The module engine on models that FSDP2 has sharded over the ranks of a replica: 2 ranks, and 3, which divide few sizes.

Each world of ranks runs all scenarios of sharded_ranks.py once; each test looks at one of them.
"""

from __future__ import annotations

import pytest

from tests.engines import sharded_ranks
from tests.ranks_context import wrong_by_scenario

pytestmark = pytest.mark.system  # each rank captures or builds large models

NAMES = [scenario.__name__ for scenario in sharded_ranks.SCENARIOS]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By scenario, what each rank found wrong."""
    size, rendezvous = request.param, str(tmp_path_factory.mktemp("sharded") / "rendezvous")
    return wrong_by_scenario(sharded_ranks.run, [(size, rendezvous)] * size, NAMES, ends_one=NAMES[-1])


@pytest.mark.parametrize("name", NAMES)
def test_ranks(world: dict[str, list[str]], name: str) -> None:
    failures = [wrong for wrong in world[name] if wrong]
    assert not failures, "\n".join(failures)
    assert world[name], "an earlier scenario failed, so this one did not run"
