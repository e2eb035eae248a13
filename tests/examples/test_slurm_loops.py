"""The loops of the Slurm scripts, with stand-ins for srun and sleep: they outlast a server that is away, and read its address
again. Slurm itself: test_slurm.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.examples.slurm_cluster import ROOT

AWAY = 70  # attempts: an outage of a good hour
GUIDES = ROOT / "docs" / "guides"

pytestmark = pytest.mark.timeout(480)


def block(guide: str) -> str:
    return next(block.code for block in blocks_of(GUIDES / guide) if "#SBATCH" in block.code)


def run(folder: Path, script: str) -> tuple[int, list[str]]:
    """The script's exit code, and what each srun of a replica had as HELIXRT_STORE. The one after AWAY of them succeeds."""
    programs = {
        "srun": f"""case "$*" in *"helixrt serve"*) exec /bin/sleep 600;; esac
            echo "$HELIXRT_STORE" >> {folder}/calls
            echo "  export HELIXRT_STORE=host:$(wc -l < {folder}/calls)" > {folder}/variables
            test $(wc -l < {folder}/calls) -gt {AWAY} || exit 1
            test ! -f {folder}/server || kill $(cat {folder}/server)""",
        "sleep": "",
        "openssl": "echo secret",
        "scontrol": "echo node1",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "variables").write_text(
        "serving\n  export HELIXRT_STORE=host:0  # for replicas elsewhere\n  export HELIXRT_REPLICA=R\n"
    )
    environment = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "node1"}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    (folder / "job.sh").write_text(script)
    done = subprocess.run(
        ["bash", folder / "job.sh"],
        env={**os.environ, **environment, "PATH": path, "VARIABLES": str(folder / "variables")},
        timeout=450,
    )
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("source", ["example", "guide"])
def test_an_array_outlasts_its_server_and_reads_its_new_address(source: str, tmp_path: Path) -> None:
    example = (ROOT / "examples" / "slurm_replicas.sh").read_text()
    script = example if source == "example" else block("existing-loop.md").replace("/shared/runs", str(tmp_path))
    code, stores = run(tmp_path, script)
    assert code == 0 and stores == [f"host:{number}" for number in range(AWAY + 1)]


def test_a_job_with_its_server_starts_replicas_again_until_the_server_ends(tmp_path: Path) -> None:
    script = block("hosts.md").replace("in 0 1 2 3;", "in 0;").replace("server=$!", f"server=$!; echo $! > {tmp_path}/server")
    code, stores = run(tmp_path, script)
    assert code == 128 + 15 and len(stores) == AWAY + 1, "the server was ended by the last srun"
