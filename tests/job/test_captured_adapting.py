"""Orders that follow measured costs, with an unmodified model in captured graphs: a resumed run and a replica that returns
begin with the order that the log names, and follow costs further."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helixrt.protocol.step.lineage import audit
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.generators.classic import build
from tests import programs
from tests.job.lineage_oracle import chain, reported

SCRIPT = Path(__file__).parent / "adapting_script.py"
SLOW_FROM, SLOW_TO, STEPS = 8, 50, 100  # as in the script
FIRST = order_key(build("zb", 2, 8))


def launch(case: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return programs.output_of(SCRIPT, case, folder, *arguments, timeout=230)


def changes(run: Path, replica: int) -> list[dict[str, Any]]:
    """Of the order, those that were made, by the report."""
    told = json.loads((run / "report.json").read_text(encoding="utf-8"))["order_changes"]
    return [change for change in told if change["replica"] == replica and not change["failed"]]


def orders_of(run: Path, replica: int) -> dict[int, str]:
    """By step: the hash of the order by which the replica worked, "" for the first one."""
    return {record.step: record.orders.get(replica, "") for record in chain(run) if replica in record.replicas}


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_resumed_run_goes_on_with_its_order_and_returns_to_the_first_one_when_the_link_has_recovered(tmp_path: Path) -> None:
    ended = launch("interrupted", tmp_path / "one")
    assert ended.returncode != 0 and (tmp_path / "one" / "done").exists(), ended.stdout + ended.stderr
    run = (tmp_path / "one" / "latest").resolve()
    again = launch("interrupted", tmp_path / "one", "latest")
    assert again.returncode == 0, again.stdout + again.stderr
    records = chain(run)
    assert audit(records).clean and [record.step for record in records] == list(range(STEPS + 1))
    resumed = next(record.step for record in records if record.life == 1)
    orders = orders_of(run, 0)
    assert SLOW_FROM < resumed <= SLOW_TO and orders[resumed] == orders[resumed - 1] != "", orders
    assert orders[STEPS] == "", f"the link has recovered: {orders}"
    assert changes(run, 0)[-1]["order"] == FIRST, "the resumed run measures and decides, too"
    fixed = launch("fixed", tmp_path / "two")
    assert fixed.returncode == 0, fixed.stdout + fixed.stderr
    assert reported(run) == reported((tmp_path / "two" / "latest").resolve()), "no order, and no resume, changes a bit"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_replica_that_returns_works_by_its_order_and_follows_the_link_further(tmp_path: Path) -> None:
    ended = launch("lost", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = (tmp_path / "latest").resolve()
    records = chain(run)
    assert audit(records).clean and records[-1].step == STEPS and len(set(reported(run))) == 1
    back = next(record for record in records if (1, 1) in record.contributors)
    before = next(record for record in reversed(records[: back.step]) if 1 in record.orders)
    assert back.step < SLOW_TO and back.orders[1] == before.orders[1] != "", (back, before)
    for replica in (0, 1):
        assert orders_of(run, replica)[STEPS] == "" and changes(run, replica)[-1]["order"] == FIRST
