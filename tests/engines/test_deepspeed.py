"""The engine of DeepSpeed engines with ZeRO 1, 2 and 3: two ranks run all scenarios of deepspeed_ranks.py once, and each test
looks at one of them."""

from __future__ import annotations

import pytest

from tests.engines import deepspeed_ranks

pytestmark = pytest.mark.system  # each rank captures or builds large models

pytest.importorskip("deepspeed")
NAMES = [scenario.__name__ for scenario in deepspeed_ranks.SCENARIOS]
SIZE = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    rendezvous = tmp_path_factory.mktemp("deepspeed") / "rendezvous"
    return deepspeed_ranks.wrong_by_scenario(SIZE, "cpu", NAMES, str(rendezvous))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_ranks(world: dict[str, list[str]], name: str) -> None:
    failures = [wrong for wrong in world[name] if wrong]
    assert not failures, "\n".join(failures)
    assert world[name], "an earlier scenario failed, so this one did not run"
