"""examples/existing_loop.py under torchrun: a replica is killed and started again; nothing is lost, nothing comes twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from tests import programs
from tests.examples.runs import check_ranks, check_rejoined
from tests.job.lineage_oracle import reported

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


def check_loop(root: Path, said: str, logs: str) -> None:
    """Of the example's run with `torchrun_killed.py`: no gap, no repeat; both replicas to the end, and bitwise equal. `said`:
    by the server; `logs`: of the replicas."""
    folder = (root / "latest").resolve()
    check_rejoined(folder, STEPS, ACCUMULATE)
    check_ranks(folder, STEPS, ACCUMULATE)
    assert len(reported(folder)) == 2 and len(set(reported(folder))) == 1
    assert "in its place" in said and logs.count("has trained to the end") == 2, said + logs


def torchrun(folder: Path, replica: int, told: dict[str, str], ranks: int, *script: object) -> subprocess.Popen[str]:
    """One replica."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", str(replica), *map(str, script)]
    mine = environment(**{**told, "HELIXRT_REPLICA": str(replica), "TORCH_CPP_LOG_LEVEL": "ERROR"})
    with open(folder / f"torchrun{replica}.log", "w") as log:
        return programs.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=mine)


def run_under_torchrun(
    folder: Path, *script: object, ranks: int = 1, options: Sequence[str] = (), more: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, str]:
    """Two replicas of so many ranks, each under a torchrun. All must end well. `options`: of the server, `more`: variables of
    the replicas. Gives what the server and the replicas have said."""
    serve = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", "2", "--storage", str(folder), *options]
    server = programs.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    replicas: list[subprocess.Popen[str]] = []
    try:
        told = {**variables(server), **more}
        replicas += [torchrun(folder, replica, told, ranks, *script) for replica in range(2)]
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
    logs = "".join((folder / f"torchrun{replica}.log").read_text() for replica in range(2))
    assert (server.returncode, codes) == (0, [0, 0]), said + logs
    return said, logs


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.system
@pytest.mark.timeout(480)
def test_a_replica_that_torchrun_starts_again_rejoins(tmp_path: Path) -> None:
    said, logs = run_under_torchrun(tmp_path, Path(__file__).with_name("torchrun_killed.py"), STEPS, tmp_path)
    check_loop(tmp_path, said, logs)
    assert (tmp_path / "latest" / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.system
def test_what_cannot_be_imported_is_not_started_again_by_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import helixrt\ndef train(session): import no_such_module\nhelixrt.run(train, storage='runs')\n")
    serve = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", "1", "--storage", str(tmp_path)]
    server = programs.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    try:
        replica = torchrun(tmp_path, 0, variables(server), 1, script)
        said, _ = server.communicate(timeout=120)
        assert replica.wait(120) != 0 and server.returncode == 1, said
    finally:
        for process in (server, replica):
            process.terminate()
            process.wait(60)
    log = (tmp_path / "torchrun0.log").read_text()
    assert log.count("Fatal: not started again by torchrun, since this would come again: ModuleNotFoundError") == 2, log
    assert "cannot be reached" not in log, log
