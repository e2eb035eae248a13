"""The engine of DeepSpeed engines on a GPU: replicas of one rank each, which NCCL allows on one device, run scenarios of
deepspeed_ranks.py once, and each test looks at one of them."""

from __future__ import annotations

from functools import cache

import pytest

from tests.engines import deepspeed_ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
NAMES = [scenario.__name__ for scenario in deepspeed_ranks.ON_A_DEVICE]


@cache
def world(folders: pytest.TempPathFactory) -> dict[str, list[str]]:
    """No fixture: those of a module come before the check for a device."""
    return deepspeed_ranks.wrong_by_scenario(1, "cuda", NAMES, str(folders.mktemp("deepspeed") / "rendezvous"))


@pytest.mark.parametrize("name", NAMES)
def test_scenarios(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    found = world(tmp_path_factory)[name]
    assert found, "an earlier scenario failed, so this one did not run"
    assert found == [""], found[0]
