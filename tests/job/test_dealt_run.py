"""A run of two replicas goes on with three, then with one: every item of the epoch enters the parameters once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from helixrt.protocol.step.lineage import CommitRecord, audit
from tests import programs
from tests.job.lineage_oracle import chain, reported

SCRIPT = Path(__file__).with_name("dealt_script.py")
ACCUMULATE, BATCH = 2, 4


def launch(folder: Path, replicas: int, steps: int, *resume: str) -> subprocess.CompletedProcess[str]:
    return programs.output_of(SCRIPT, folder, replicas, steps, *resume, timeout=200)


def items_entered(folder: Path, records: Sequence[CommitRecord], replicas: int) -> list[int]:
    """The items behind the sums of these records, as the ranks of the script noted them."""
    read = {}  # (deals, replica, position) -> items; a batch that is worked on again has the same
    for replica in range(replicas):
        for line in (folder / f"items.{replica}.jsonl").read_text().splitlines():
            lives, position, items = json.loads(line)
            assert read.setdefault((lives, replica, position), items) == items
    entered: list[int] = []
    for before, record in zip(records, records[1:], strict=False):
        for replica in record.summed:
            first = before.positions.get(replica, 0) if before.deal == record.deal else 0
            for position in range(first, first + ACCUMULATE):
                entered += read[(len(record.deal), replica, position)]
    assert len(entered) == BATCH * ACCUMULATE * sum(len(record.summed) for record in records)
    return entered


@pytest.mark.slow  # three drivers and six processes that import torch
@pytest.mark.timeout(480)
def test_a_run_goes_on_with_other_numbers_of_replicas(tmp_path: Path) -> None:
    interrupted = launch(tmp_path, 2, 12)
    assert interrupted.returncode != 0, interrupted.stdout
    for replicas, steps in ((3, 12), (1, 20)):
        done = launch(tmp_path, replicas, steps, "latest")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"come first, dealt over {replicas}" in done.stdout
        assert len(reported((tmp_path / "latest").resolve())) == replicas

    records = chain((tmp_path / "latest").resolve())
    assert [record.step for record in records] == list(range(21)) and audit(records, ACCUMULATE).clean
    # The last life goes on from the newest checkpoint, that of step 12 or, if it was not read whole, of step 10.
    numbers = [len(record.deal) for record in records]
    assert numbers[:6] == [0] * 6 and numbers[6:11] == [1] * 5 and numbers[-1] == 2
    assert {replica for record in records[6:11] for replica in record.replicas} == {0, 1, 2}

    entered = items_entered(tmp_path, records, 3)
    assert len(entered) == len(set(entered)), "no item of the epoch comes twice"
