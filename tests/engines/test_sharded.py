"""The module engine on models that FSDP2 has sharded over the ranks of a replica: 2 ranks, and 3, which divide few sizes.

Each world of ranks runs all scenarios of sharded_ranks.py once; each test looks at one of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import sharded_ranks
from tests.ranks_context import ranks_context

NAMES = [scenario.__name__ for scenario in sharded_ranks.SCENARIOS]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By scenario, what each rank found wrong."""
    size, context = request.param, ranks_context()
    rendezvous: Path = tmp_path_factory.mktemp("sharded") / "rendezvous"
    results = context.Queue()
    ranks = [context.Process(target=sharded_ranks.run, args=(rank, size, str(rendezvous), results)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    found: dict[str, list[str]] = {name: [] for name in NAMES}
    try:
        expected = size * len(NAMES) - 1  # rank 0 ends in the last one
        while sum(map(len, found.values())) < expected:
            number, name, wrong = results.get(timeout=200)
            found[name].append(wrong and f"rank {number}: {wrong}")
            if wrong:
                break
    finally:
        for rank in ranks:
            rank.join(5)
            rank.kill()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_ranks(world: dict[str, list[str]], name: str) -> None:
    failures = [wrong for wrong in world[name] if wrong]
    assert not failures, "\n".join(failures)
    assert world[name], "an earlier scenario failed, so this one did not run"
