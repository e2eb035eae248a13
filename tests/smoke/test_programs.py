"""The smoke set: whether helixrt works with the installed versions of Python, torch, torchft, ray and deepspeed.

`make test-smoke` runs the tests marked `smoke`: these, and those in `tests/examples` and `tests/ray_cluster` that are marked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.examples.runs import ROOT, folder_of, run
from tests.job.lineage_oracle import chain, reported

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(400)]
STEPS = 6


def check_equal_replicas(folder: Path, steps: int) -> None:
    assert [record.step for record in chain(folder)] == list(range(steps + 1))
    assert len(reported(folder)) == 2 and len(set(reported(folder))) == 1


def test_the_readmes_program(tmp_path: Path) -> None:
    (program,) = [block for block in blocks_of(ROOT / "README.md") if "helixrt.run(train, replicas=2)" in block.code]
    (tmp_path / "program.py").write_text(program.code)
    done = run("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_equal_replicas(folder_of(tmp_path / "outputs"), 30)


@pytest.mark.parametrize("example", ["own_model.py --pp 2", "hsdp.py", "deepspeed_zero.py"])
def test_an_example_ends_with_equal_replicas(example: str, tmp_path: Path) -> None:
    script, *axes = example.split()
    if script == "deepspeed_zero.py":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed (extra: deepspeed)")
    done = run(ROOT / "examples" / script, STEPS, tmp_path, *axes)
    assert done.returncode == 0, done.stdout + done.stderr
    check_equal_replicas(folder_of(tmp_path), STEPS)


def test_ddp_over_helix_gives_what_it_gives_over_gloo() -> None:
    script = Path(__file__).with_name("ddp_groups.py")
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script)
    assert done.returncode == 0 and done.stdout.split() == ["equal"], done.stdout + done.stderr
