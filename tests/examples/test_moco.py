"""examples/moco.py: each replica has its own queue, which a killed one has again; all else is equal on both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helixrt.job.loader_states import LoaderStates
from helixrt.replica.store import MemoryRunStore
from tests.examples.runs import KILLED, ROOT, check_killed_run, folder_of, run
from tests.job.lineage_oracle import reported

EXAMPLE = ROOT / "examples" / "moco.py"
STEPS, BATCH, KEYS = 30, 16, 256


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 90


@pytest.mark.system
@pytest.mark.timeout(480)
def test_a_killed_replica_has_a_queue_of_its_own_again(tmp_path: Path) -> None:
    done = run(KILLED, STEPS, tmp_path, EXAMPLE)
    folder = folder_of(tmp_path)
    records = check_killed_run(done, folder, STEPS)
    assert len(set(reported(folder))) == 1
    said = (folder / "logs" / "r1.pp0.inc1.log").read_text() + done.stdout
    assert f"per-replica state: that of batch 0 is taken, for batch {contributed(records[:4], 1)}" in said
    queues = []
    for replica in range(2):
        position = contributed(records, replica)
        found = LoaderStates(MemoryRunStore(), f"{replica}/0/per_replica", print, folder).newest((0, position))
        assert found is not None and found[0] == position
        queue, pointer = (found[1][f"buffers[{name!r}]"]["values"] for name in ("queue", "pointer"))
        torch.testing.assert_close(queue.norm(dim=0), torch.ones(KEYS), msg="a mean of keys is no key")
        lost = contributed(records[:4], 1) if replica else 0  # its queue goes on from that of batch 0
        assert pointer == (position - lost) * BATCH % KEYS
        queues.append(queue)
    assert not torch.isclose(queues[0], queues[1]).all(0).any()


def contributed(records: list, replica: int) -> int:
    return sum(replica in {number for number, _ in record.contributors} for record in records)
