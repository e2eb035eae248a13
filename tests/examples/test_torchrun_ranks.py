"""Replicas that are each under a torchrun of several processes: one is killed, and torchrun starts its replica again.

examples/hsdp.py (FSDP2 inside a replica), and a small model in pipeline stages."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from helixrt.protocol.step.lineage import audit
from helixrt.record import Kind, read_events
from tests import programs
from tests.examples.runs import KILLED
from tests.examples.test_existing_loop import environment, variables
from tests.job.lineage_oracle import chain, reported

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hsdp.py"
STEPS, ACCUMULATE, RANKS, REPLICAS = 20, 2, 2, 2
STAGED = ROOT / "tests" / "job" / "staged_script.py"
LIMIT_S = 430


def torchrun(folder: Path, replica: int, told: dict[str, str], script: Path, *arguments: object) -> subprocess.Popen[str]:
    """One replica."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", str(replica)]
    command += [str(script), *map(str, arguments)]
    mine = environment(**{**told, "HELIXRT_REPLICA": str(replica), "TORCH_CPP_LOG_LEVEL": "ERROR"})
    with open(folder / f"torchrun{replica}.log", "w") as log:
        return programs.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=mine)


def run(folder: Path, axis: str, script: Path, *arguments: object, options: Sequence[str] = ()) -> None:
    """Two replicas whose ranks are along this axis of the mesh, each under a torchrun. All must end well. `options`: of the
    server."""
    serve = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", str(REPLICAS), axis, str(RANKS)]
    serve += ["--storage", str(folder), "--step-timeout-s", "240", *options]
    server = programs.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    replicas: list[subprocess.Popen[str]] = []
    try:
        told = variables(server)
        replicas += [torchrun(folder, replica, told, script, *arguments) for replica in range(REPLICAS)]
        deadline = time.monotonic() + LIMIT_S
        while server.poll() is None and not any(replica.poll() for replica in replicas):
            assert time.monotonic() < deadline, "the run does not end"
            time.sleep(0.1)
        if any(replica.poll() for replica in replicas):  # nobody would start it again
            server.terminate()
        said, _ = server.communicate(timeout=60)
        codes = [replica.wait(60) for replica in replicas]
    finally:
        for process in (server, *replicas):
            process.terminate()
            process.wait(60)
    logs = "".join((folder / f"torchrun{replica}.log").read_text() for replica in range(REPLICAS))
    assert (server.returncode, codes) == (0, [0, 0]), said + logs
    assert "r1      restarted (incarnation 1)" in said and "r0      lost" not in said, said


def check_lineage(folder: Path, steps: int, accumulate: int, again: int) -> None:
    """No gap, no repeat; each replica was one incarnation at a time, the second contributed `again` times; they ended alike."""
    records = chain(folder)
    assert [record.step for record in records] == list(range(steps + 1))
    found = audit(records, advance=accumulate)
    assert (found.gaps, found.repeats, found.excluded) == (0, 0, 0)
    contributions = Counter(contributor for record in records for contributor in record.contributors)
    assert set(contributions) == {(0, 0), (1, 0), (1, 1)}, "both processes are one incarnation, before and after"
    assert contributions[(0, 0)] == steps and contributions[(1, 0)] >= 3 and contributions[(1, 1)] >= again, contributions
    assert len(reported(folder)) == REPLICAS and len(set(reported(folder))) == 1


@pytest.mark.slow  # two torchruns of two processes that import torch and transformers, two of them twice, and the server
@pytest.mark.timeout(500)
def test_a_replica_whose_rank_is_killed_is_started_again_whole_by_torchrun(tmp_path: Path) -> None:
    """killed.py runs the example's train function, and kills the last rank of replica 1 after step 3."""
    run(tmp_path, "--dp-shard", KILLED, STEPS, tmp_path, EXAMPLE, "", REPLICAS, RANKS)
    folder = (tmp_path / "latest").resolve()
    check_lineage(folder, STEPS, ACCUMULATE, again=5)
    for rank in range(RANKS):
        suffix = f".dp{rank}" if rank else ""
        events = read_events(folder / "flight" / f"r0.pp0{suffix}.inc0.jsonl")
        worked = [event.detail["position"] for event in events if event.kind is Kind.WORK_BEGIN]
        assert worked == [ACCUMULATE * step for step in range(STEPS)], "the survivor runs no forward twice"
        events = read_events(folder / "flight" / f"r1.pp0{suffix}.inc1.story.jsonl")
        assert any(event.kind is Kind.FETCH_END for event in events), "each rank of the new incarnation fetches its shard"


@pytest.mark.slow  # as above, without transformers
@pytest.mark.timeout(500)
def test_a_pipeline_whose_stage_is_killed_is_started_again_whole_by_torchrun(tmp_path: Path) -> None:
    run(tmp_path, "--pp", STAGED, tmp_path, RANKS, options=("--checkpoint-every", "5"))
    check_lineage((tmp_path / "latest").resolve(), 60, 1, again=1)
