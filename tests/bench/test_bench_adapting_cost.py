"""The cost of the adaptation loop: what is rehearsed is what a job's ranks write, and all parts are in the sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import adapting_cost
from helixrt.bench.adaptation import Size
from helixrt.bench.adapting_cost import Loop, Rehearsal
from helixrt.errors import ConfigError
from tests.bench.running import run_bench


@pytest.mark.parametrize("hosts", [False, True])
def test_the_rehearsed_steps_are_measured_as_what_they_are(hosts: bool) -> None:
    rehearsal = Rehearsal(Size(4, 6, 3.0), hosts)
    loop = Loop(rehearsal)
    for number in range(1, 13):
        events = rehearsal.step(number)
        loop.lead(number, True, events[0], loop.follow(number, events))
    found = loop._costs.estimates()
    assert found is not None and not found.lacking() and found.microbatches == 6
    costs = found.costs()
    for values in (costs.forward, costs.backward, costs.weight):
        assert values == pytest.approx([3.0] * 4, rel=0.05)
    assert len(found.links) == 6 and all(link.delay.value_ms < 0.5 for link in found.links.values())
    assert any(abs(link.offset_ms) > 100 for link in found.links.values()) is hosts


@pytest.mark.system
def test_the_figures_have_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting_cost, "WARM_UP", 2)
    monkeypatch.setattr(adapting_cost, "BLOCK", 1)
    figures = tmp_path / "figures.json"
    size = ("--size", "4x4@5")
    assert run_bench(adapting_cost, *size, "--steps", "60", "--pairs", "2", "--json", str(figures)) == 0
    found = json.loads(figures.read_text())
    for parts in found["parts_ms"].values():
        for side in ("leader", "follower"):
            mine = [ms for part, ms in parts.items() if part.startswith(f"{side}:")]
            assert len(mine) == {"leader": 4, "follower": 3}[side] and parts[f"{side}, in all"] == pytest.approx(sum(mine))
    assert len(found["pairs"]["ratios"]) == 2
    with pytest.raises(ConfigError, match="--steps=2: must be above 2"):
        run_bench(adapting_cost, *size, "--steps", "2")
