"""examples/existing_loop.py under torchrun: a replica is killed and started again; nothing is lost, nothing comes twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from helixrt.protocol.step.lineage import audit
from helixrt.record import Kind, read_events
from tests import programs
from tests.job.lineage_oracle import chain, reported

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "existing_loop.py"
STEPS, ACCUMULATE = 40, 2
LIMIT_S = 420


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HELIXRT_")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def variables(server: subprocess.Popen[str]) -> dict[str, str]:
    """Those that `helixrt serve` prints for its replicas."""
    assert server.stdout is not None
    found: dict[str, str] = {}
    for line in server.stdout:
        found |= dict(re.findall(r"export (\w+)=(\S+)", line))
        if "HELIXRT_REPLICA" in found:
            return found
    raise AssertionError("helixrt serve has ended")


def check_rejoined(root: Path, said: str, logs: str) -> None:
    """Of the example's run with `torchrun_killed.py`: no gap, no repeat; both replicas to the end, and bitwise equal. `said`:
    by the server; `logs`: of the replicas."""
    folder = (root / "latest").resolve()
    records = chain(folder)
    found = audit(records, advance=ACCUMULATE)
    assert (found.gaps, found.repeats, found.excluded) == (0, 0, 0)
    assert [record.step for record in records] == list(range(STEPS + 1))
    contributions = Counter(contributor for record in records for contributor in record.contributors)
    assert contributions[(0, 0)] == STEPS and contributions[(1, 0)] >= 3 and contributions[(1, 1)] >= 5, contributions
    assert len(reported(folder)) == 2 and len(set(reported(folder))) == 1
    assert "in its place" in said and logs.count("has trained to the end") == 2, said + logs
    worked = [e.detail["position"] for e in read_events(folder / "flight" / "r0.pp0.inc0.jsonl") if e.kind is Kind.WORK_BEGIN]
    assert worked == [ACCUMULATE * step for step in range(STEPS)]  # the survivor runs no forward twice


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.system
@pytest.mark.timeout(480)
def test_a_replica_that_torchrun_starts_again_rejoins(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", "2", "--storage", str(tmp_path)]
    server = programs.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    replicas: list[subprocess.Popen[str]] = []
    try:
        told = variables(server)
        for replica in range(2):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "2"]
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", str(replica)]
            command = [*torchrun, str(Path(__file__).parent / "torchrun_killed.py"), str(STEPS), str(tmp_path)]
            with open(tmp_path / f"torchrun{replica}.log", "w") as log:
                mine = environment(**{**told, "HELIXRT_REPLICA": str(replica)})
                replicas.append(programs.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=mine))
        said, _ = server.communicate(timeout=LIMIT_S)
        codes = [replica.wait(60) for replica in replicas]
    finally:
        for process in (server, *replicas):
            process.terminate()
            process.wait(30)
    logs = "".join((tmp_path / f"torchrun{replica}.log").read_text() for replica in range(2))
    assert (server.returncode, codes) == (0, [0, 0]), said + logs
    check_rejoined(tmp_path, said, logs)
    assert (tmp_path / "latest" / "secret").stat().st_mode & 0o077 == 0
