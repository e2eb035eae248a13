"""Replicas that are each under a torchrun of several processes: one is killed, and torchrun starts its replica again.

examples/hsdp.py (FSDP2 inside a replica), and a small model in pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.examples.runs import KILLED, check_ranks, check_rejoined
from tests.examples.test_existing_loop import run_under_torchrun
from tests.job.lineage_oracle import reported

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hsdp.py"
STEPS, ACCUMULATE, RANKS, REPLICAS = 20, 2, 2, 2
STAGED = ROOT / "tests" / "job" / "staged_script.py"
SLOW = ("--step-timeout-s", "240")  # a busy machine may take minutes to start ranks


def run(folder: Path, axis: str, script: Path, *arguments: object, options: Sequence[str] = ()) -> None:
    """Two replicas whose ranks are along this axis of the mesh. `options`: of the server."""
    said, _ = run_under_torchrun(folder, script, *arguments, ranks=RANKS, options=[axis, str(RANKS), *SLOW, *options])
    assert "r1      restarted (incarnation 1)" in said and "r0      lost" not in said, said


def check_alike(folder: Path, steps: int, accumulate: int = 1, again: int = 5) -> None:
    """No gap, no repeat; each replica was one incarnation at a time, the second contributed `again` times; they ended alike."""
    records = check_rejoined(folder, steps, accumulate, again)
    lives = {contributor for record in records for contributor in record.contributors}
    assert lives == {(0, 0), (1, 0), (1, 1)}, "both processes are one incarnation, before and after"
    assert len(reported(folder)) == REPLICAS and len(set(reported(folder))) == 1


@pytest.mark.slow  # two torchruns of two processes that import torch and transformers, two of them twice, and the server
@pytest.mark.timeout(500)
def test_a_replica_whose_rank_is_killed_is_started_again_whole_by_torchrun(tmp_path: Path) -> None:
    """killed.py runs the example's train function, and kills the last rank of replica 1 after step 3."""
    run(tmp_path, "--dp-shard", KILLED, STEPS, tmp_path, EXAMPLE, "", REPLICAS, RANKS)
    folder = (tmp_path / "latest").resolve()
    check_alike(folder, STEPS, ACCUMULATE)
    check_ranks(folder, STEPS, ACCUMULATE, ("pp0", "pp0.dp1"))


@pytest.mark.slow  # as above, without transformers
@pytest.mark.timeout(500)
def test_a_pipeline_whose_stage_is_killed_is_started_again_whole_by_torchrun(tmp_path: Path) -> None:
    run(tmp_path, "--pp", STAGED, tmp_path, RANKS, options=("--checkpoint-every", "5"))
    check_alike((tmp_path / "latest").resolve(), 60, again=1)
