"""examples/hsdp.py, each replica under a torchrun of several processes: one is killed, torchrun starts the replica again."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from helixrt.protocol.step.lineage import audit
from helixrt.record import Kind, read_events
from tests.examples.runs import KILLED
from tests.examples.test_existing_loop import environment, variables
from tests.job.lineage_oracle import chain, reported

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hsdp.py"
STEPS, ACCUMULATE, RANKS, REPLICAS = 20, 2, 2, 2
LIMIT_S = 430


def torchrun(replica: int, folder: Path, told: dict[str, str]) -> subprocess.Popen[str]:
    """One replica: killed.py runs the example's train function, and kills the last rank of replica 1 after step 3."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", str(replica)]
    command += [str(KILLED), str(STEPS), str(folder), str(EXAMPLE), "", str(REPLICAS), str(RANKS)]
    mine = environment(**{**told, "HELIXRT_REPLICA": str(replica), "TORCH_CPP_LOG_LEVEL": "ERROR"})
    with open(folder / f"torchrun{replica}.log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=mine)


@pytest.mark.slow  # two torchruns of two processes that import torch and transformers, two of them twice, and the server
@pytest.mark.timeout(500)
def test_a_replica_whose_rank_is_killed_is_started_again_whole_by_torchrun(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", str(REPLICAS), "--dp-shard", str(RANKS)]
    serve += ["--storage", str(tmp_path), "--step-timeout-s", "240"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    replicas: list[subprocess.Popen[str]] = []
    try:
        told = variables(server)
        replicas += [torchrun(replica, tmp_path, told) for replica in range(REPLICAS)]
        said, _ = server.communicate(timeout=LIMIT_S)
        codes = [replica.wait(60) for replica in replicas]
    finally:
        for process in (server, *replicas):
            process.terminate()
            process.wait(60)
    logs = "".join((tmp_path / f"torchrun{replica}.log").read_text() for replica in range(REPLICAS))
    assert (server.returncode, codes) == (0, [0, 0]), said + logs

    folder = (tmp_path / "latest").resolve()
    records = chain(folder)
    assert [record.step for record in records] == list(range(STEPS + 1))
    found = audit(records, advance=ACCUMULATE)
    assert (found.gaps, found.repeats, found.excluded) == (0, 0, 0)
    contributions = Counter(contributor for record in records for contributor in record.contributors)
    assert contributions[(0, 0)] == STEPS and contributions[(1, 0)] >= 3 and contributions[(1, 1)] >= 5, contributions
    assert set(contributions) == {(0, 0), (1, 0), (1, 1)}, "both processes are one incarnation, before and after"
    assert len(reported(folder)) == REPLICAS and len(set(reported(folder))) == 1
    assert "r1      restarted (incarnation 1)" in said and "r0      lost" not in said, said
    for rank in range(RANKS):
        suffix = f".dp{rank}" if rank else ""
        events = read_events(folder / "flight" / f"r0.pp0{suffix}.inc0.jsonl")
        worked = [event.detail["position"] for event in events if event.kind is Kind.WORK_BEGIN]
        assert worked == [ACCUMULATE * step for step in range(STEPS)], "the survivor runs no forward twice"
        events = read_events(folder / "flight" / f"r1.pp0{suffix}.inc1.jsonl")
        assert any(event.kind is Kind.FETCH_END for event in events), "each rank of the new incarnation fetches its shard"
