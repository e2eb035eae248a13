"""A pipeline one of whose stages asks for more time than a step has, and one of whose stages hangs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helixrt.replica.progress import LOOP
from helixrt.timeouts import derive
from tests import programs
from tests.job.busy_stage_script import BUSY_S, STEP_TIMEOUT_S, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


def launch(folder: Path, channels: str, hangs: str = "") -> dict[str, Any]:
    """The run's report."""
    script = Path(__file__).parent / "busy_stage_script.py"
    done = programs.succeeded(script, folder, channels, hangs, timeout=440)
    assert f"ended at step {STEPS}" in done.stdout
    report: dict[str, Any] = json.loads((folder / "latest" / "report.json").read_text())
    return report


@pytest.mark.grid
@pytest.mark.parametrize("channels", ["endpoint", "gloo"])
def test_a_stage_waits_for_a_busy_one_as_long_as_that_has_asked_for(channels: str, tmp_path: Path) -> None:
    assert BUSY_S > 2 * STEP_TIMEOUT_S
    assert launch(tmp_path, channels)["failures"] == []


@pytest.mark.parametrize(("when", "stage"), [("before", 1), ("after", 0), ("after", 1)])
def test_a_stage_that_hangs_is_named_at_the_limit_though_its_neighbour_would_wait_longer(
    when: str, stage: int, tmp_path: Path
) -> None:
    (failure,) = launch(tmp_path, "endpoint", f"{when}:{stage}")["failures"]
    pattern = rf"r0\.pp{stage}\.\S+ incarnation 0 has made no progress for (\d+) s: main thread in (.*) at "
    said = re.match(pattern, failure["seen"])
    assert said is not None, failure["seen"]
    assert (said[2] == LOOP) == (when == "after")
    assert "hang, line" in failure["seen"], "where it is in the user's code"
    looks_s = 2 * derive(STEP_TIMEOUT_S).progress_period_s
    assert STEP_TIMEOUT_S <= int(said[1]) <= STEP_TIMEOUT_S + looks_s + 1.0, "by time that was observed"
    assert failure["rejoined_after_s"] is not None
