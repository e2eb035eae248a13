"""Runs of example scripts in which a replica is killed, and what every such run must have left."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.data import TensorDataset

from helixrt.job.sampler import StreamSampler
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


def dealt(items: TensorDataset, batch: int, seed: int) -> Callable[[int, int], list[torch.Tensor]]:
    """The batch of replica r of two at a position of its stream, as `session.sampler` with `shuffle` and a loader with
    `drop_last` give it."""
    samplers = [StreamSampler(len(items), 2, replica, shuffle=True, seed=seed) for replica in range(2)]
    count = len(samplers[0]) // batch

    def batch_at(replica: int, position: int) -> list[torch.Tensor]:
        samplers[replica].set_epoch(position // count)
        first = batch * (position % count)
        chosen = samplers[replica].order()[first : first + batch]
        return [part[chosen] for part in items.tensors]

    return batch_at


def logged(folder: Path, name: str, what: str = "step") -> dict[int, float]:
    """By step, the figure of this name that was logged last: of steps or validations."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if line["kind"] == "logged" and line["what"] == what]
    return {line["step"]: line["values"][name] for line in found if name in line["values"]}


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
