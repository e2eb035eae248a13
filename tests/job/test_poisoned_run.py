"""A batch that ends a run of one process each time: it is known by its position, and left out where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.job.lineage_files import read_lineage
from helixrt.protocol.step.lineage import Log
from tests import programs

SCRIPT = Path(__file__).with_name("poisoned_script.py")
POISONED, STEPS = 57, 120


@pytest.mark.slow  # a driver and three processes in turn
@pytest.mark.timeout(300)
def test_a_batch_that_kills_the_process_twice_is_left_out_though_records_before_it_are_lost(tmp_path: Path) -> None:
    ended = programs.output_of(SCRIPT, tmp_path, timeout=280)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    (folder,) = {path.parent for path in tmp_path.glob("*/*/report.json")}
    report = json.loads((folder / "report.json").read_text())
    assert len(report["failures"]) == 2
    audit = report["data_audit"]
    assert (audit["excluded"], audit["gaps"], audit["repeats"]) == (1, 0, 0)
    chain = Log(read_lineage(folder / "lineage")).chain()
    (left_out,) = {record.positions[0] - 1 for record in chain if record.excluded}
    assert left_out == POISONED and chain[-1].step == STEPS
