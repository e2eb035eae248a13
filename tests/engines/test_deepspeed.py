"""The engine of DeepSpeed engines with ZeRO 1, 2 and 3: two ranks run all scenarios of deepspeed_ranks.py once, and each test
looks at one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import deepspeed_ranks
from tests.ranks_context import ranks_context

pytest.importorskip("deepspeed")
NAMES = [scenario.__name__ for scenario in deepspeed_ranks.SCENARIOS]
SIZE = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By scenario, what each rank found wrong."""
    context = ranks_context()
    rendezvous: Path = tmp_path_factory.mktemp("deepspeed") / "rendezvous"
    results = context.Queue()
    ranks = [context.Process(target=deepspeed_ranks.run, args=(rank, SIZE, str(rendezvous), results)) for rank in range(SIZE)]
    for rank in ranks:
        rank.start()
    found: dict[str, list[str]] = {name: [] for name in NAMES}
    try:
        expected = SIZE * len(NAMES) - 1  # rank 0 ends in the last one
        while sum(map(len, found.values())) < expected:
            number, name, wrong = results.get(timeout=300)
            found[name].append(wrong and f"rank {number}: {wrong}")
            if wrong:
                break
    finally:
        for rank in ranks:
            rank.join(5)
            rank.kill()
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_ranks(world: dict[str, list[str]], name: str) -> None:
    failures = [wrong for wrong in world[name] if wrong]
    assert not failures, "\n".join(failures)
    assert world[name], "an earlier scenario failed, so this one did not run"
