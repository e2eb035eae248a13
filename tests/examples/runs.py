"""Runs of example scripts in which a replica is killed, and what every such run must have left."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from helixrt.protocol.step.lineage import CommitRecord, audit
from helixrt.record import Kind, read_events
from tests import programs
from tests.job.lineage_oracle import chain

ROOT = Path(__file__).parents[2]
KILLED = Path(__file__).with_name("killed.py")


def run(*arguments: str | Path | int, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return programs.output_of(*arguments, cwd=cwd, timeout=460)


def imported(script: Path) -> ModuleType:
    """A script as a module of its name, with no arguments."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    arguments, sys.argv = sys.argv, [script.name]  # it reads them
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    return module


def folder_of(root: Path) -> Path:
    return (root / "latest").resolve()


def check_killed_run(
    done: subprocess.CompletedProcess[str], folder: Path, steps: int, accumulate: int = 1, replicas: int = 2
) -> list[CommitRecord]:
    """Replica 1 was killed after its third step. Exit code 0; no gap and no repeat; the rejoined replica contributed to at
    least 5 steps; the others contributed to all and began no batch twice. Returns the lineage."""
    assert done.returncode == 0, done.stdout + done.stderr
    records = check_rejoined(folder, steps, accumulate, replicas=replicas)
    check_ranks(folder, steps, accumulate, replicas=replicas)
    return records


def check_lineage(folder: Path, steps: int, accumulate: int = 1) -> list[CommitRecord]:
    """No step lost, no gap and no repeat."""
    records = chain(folder)
    assert [record.step for record in records] == list(range(steps + 1))
    found = audit(records, accumulate)
    assert (found.gaps, found.repeats, found.excluded) == (0, 0, 0)
    return records


def check_rejoined(folder: Path, steps: int, accumulate: int = 1, again: int = 5, replicas: int = 2) -> list[CommitRecord]:
    """And replica 1 came again, and contributed `again` times then; the others contributed to all."""
    records = check_lineage(folder, steps, accumulate)
    contributions = Counter(contributor for record in records for contributor in record.contributors)
    assert contributions[(1, 0)] >= 3 and contributions[(1, 1)] >= again, contributions
    assert all(contributions[(survivor, 0)] == steps for survivor in {*range(replicas)} - {1}), contributions
    return records


def check_ranks(folder: Path, steps: int, accumulate: int = 1, ranks: Iterable[str] = ("pp0",), replicas: int = 2) -> None:
    """Ranks of the others began no batch twice, and each rank of replica 1 that came again fetched its part of the state."""
    for rank in ranks:
        for survivor in {*range(replicas)} - {1}:
            events = read_events(folder / "flight" / f"r{survivor}.{rank}.inc0.jsonl")
            worked = [event.detail["position"] for event in events if event.kind is Kind.WORK_BEGIN]
            assert worked == list(range(0, steps * accumulate, accumulate))
        fetched = read_events(folder / "flight" / f"r1.{rank}.inc1.story.jsonl")
        assert any(event.kind is Kind.FETCH_END for event in fetched), f"{rank} has fetched nothing"
