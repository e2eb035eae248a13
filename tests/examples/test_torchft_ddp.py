"""examples/torchft_ddp.py: torchft's loop survives the loss of a group with either process group; stalls are reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.runs import ROOT, run

pytestmark = pytest.mark.system

pytest.importorskip("torchft", reason="torchft is not installed (extra: ft)")


@pytest.mark.smoke
@pytest.mark.timeout(400)
def test_both_groups_survive_a_kill(tmp_path: Path) -> None:
    steps = 60
    done = run(ROOT / "examples" / "torchft_ddp.py", steps, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(
        r"^(\w+): longest step of group 0 after the kill ([\d.]+) s; median ([\d.]+) s", done.stdout, re.MULTILINE
    )
    assert [kind for kind, _, _ in said] == ["helix", "gloo"], done.stdout
    for kind, stall, median in said:
        assert float(stall) > float(median) > 0
        for group in range(2):
            lines = [line.split() for line in (tmp_path / "torchft_ddp" / f"{kind}-group{group}.txt").read_text().splitlines()]
            numbers = [int(step) for step, _, _ in lines]
            assert numbers[-1] == steps
            if group == 0:
                assert numbers == list(range(numbers[0], steps + 1)), "from when it joined, the survivor commits each step once"
            else:
                assert "2" in {participants for _, _, participants in lines}
