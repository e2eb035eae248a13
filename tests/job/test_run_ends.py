"""How runs end: what the user's function raises is shown and is the result; what would come again is not tried again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from helixrt.record import Kind, read_events
from tests import programs

SCRIPT = Path(__file__).with_name("ends_script.py")
NO_LOOP = "helixrt.errors.MisuseError: the program did not iterate over session.steps (or the prepared loader)"
LEFT = "helixrt.errors.MisuseError: the loop over session.steps (or the prepared loader) was left before its end"

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # a driver and two ranks each


def ended(folder: Path, case: str, replicas: int = 2, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return programs.output_of(SCRIPT, folder, case, replicas, ranks, timeout=280)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("raise behind", "after the last step, RuntimeError: cannot write the model, at ends_script.py:"),
        ("exit before", NO_LOOP),
        ("exit in", LEFT),
    ],
)
def test_what_ends_the_train_function_is_shown_and_is_the_result(case: str, why: str, tmp_path: Path) -> None:
    done = ended(tmp_path, case)
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "returned" not in text, text
    assert sum(line.startswith(f"the run failed: {why}") for line in done.stderr.splitlines()) == 1, text
    assert f"helixrt.errors.Fatal: the run failed: {why}" in done.stderr, "the exception of helixrt.run"
    folder = (tmp_path / "latest").resolve()
    assert f"(log: {folder}/logs/r0.pp0.inc0.log)" in done.stderr and "restarted" not in text, text
    report = json.loads((folder / "report.json").read_text())
    if case == "raise behind":
        assert report["steps"] == 3 and list(folder.glob("checkpoints/step_00000003_*/complete.json"))
        assert "r0      failed (incarnation 0): RuntimeError: cannot write the model" in done.stdout
        assert "RuntimeError: cannot write the model" in report["tracebacks"][0]["text"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("raise before", "the same error in all replicas: ValueError: no such file"),
        ("raise in", "the same error in all replicas: ValueError: a bad record"),
        ("capture", "helixrt.passes.errors.CaptureError: model.py:3: cannot be captured: it prints; change: do not"),
    ],
)
def test_what_would_come_again_is_not_tried_again(case: str, why: str, tmp_path: Path) -> None:
    done = ended(tmp_path, case)
    text = done.stdout + done.stderr
    assert done.returncode == 1 and f"\nthe run failed: {why}" in "\n" + done.stderr, text
    assert "(incarnation 2)" not in text and (case != "capture" or "restarted" not in text), text


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (2, 1), (1, 2)])
def test_an_exception_in_the_loop_leaves_the_state_of_the_step_before(replicas: int, ranks: int, tmp_path: Path) -> None:
    done = ended(tmp_path, "raise in", replicas, ranks)
    assert done.returncode == 1 and "ValueError: a bad record" in done.stderr, done.stdout + done.stderr
    assert "\nthe run ended after step 1; its newest checkpoint is of step 1\n" in done.stdout, done.stdout
    (kept,) = tmp_path.glob("latest/checkpoints/step_00000001_*/complete.json")
    assert len(list(kept.parent.glob("rank_*"))) == ranks
    assert json.loads((tmp_path / "latest" / "report.json").read_text())["steps"] == 1


def test_a_state_that_the_loop_has_changed_is_not_saved_after_an_exception(tmp_path: Path) -> None:
    done = ended(tmp_path, "raise changed", 1)
    assert done.returncode == 1 and "\nthe run ended after step 1; it has no checkpoint\n" in done.stdout, done.stdout


def test_an_exception_is_told_to_the_other_replicas_before_its_exchange_breaks(tmp_path: Path) -> None:
    """Else they form the next quorum with the replica that ends, and wait until it does not come."""
    done = ended(tmp_path, "raise once")
    assert done.returncode == 0 and "r1      lost (incarnation 0): ValueError: a flaky library" in done.stdout, done.stderr
    flight = tmp_path / "latest" / "flight"
    (broken,) = [e.detail["reason"] for e in read_events(flight / "r0.pp0.inc0.story.jsonl") if e.kind is Kind.EXCHANGE_FAILED]
    assert "aborted" in broken
    joins = [event.step for event in read_events(flight / "r1.pp0.inc0.jsonl") if event.kind is Kind.QUORUM_JOIN]
    assert joins.count(2) == 1, "it asks for no other quorum of the step"


def test_the_cause_that_is_told_is_that_of_the_rank_whose_own_error_it_is(tmp_path: Path) -> None:
    """The first rank of the replica fails because of it, and ends first."""
    done = ended(tmp_path, "raise once", 2, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    (lost,) = [line for line in done.stdout.splitlines() if line.startswith("r1      lost (incarnation 0): ")]
    assert "ValueError: a flaky library, at ends_script.py:" in lost and "at r1.pp0.dp1.cp0.tp0 incarnation 0 (log: " in lost
    assert Path(lost[lost.index("(log: ") + 6 : -1]).exists()


def test_a_replica_that_is_killed_after_a_step_of_each_life_is_never_given_up(tmp_path: Path) -> None:
    done = ended(tmp_path, "killed often")
    assert done.returncode == 0 and "r1      running (incarnation 5)" in done.stdout, done.stdout + done.stderr
    assert "given up" not in done.stdout


@pytest.mark.parametrize(
    ("case", "code", "name"),
    [
        ("SIGTERM", 143, "SIGTERM"),
        ("SIGINT", -2, "SIGINT"),
        ("SIGHUP", 129, "SIGHUP"),
        ("SIGHUP twice", 129, "SIGHUP"),
        ("SIGTERM kept", 143, "SIGTERM"),
        ("SIGINT kept", 143, "SIGTERM"),
    ],
)
def test_a_signal_to_the_driver_or_the_keeper_ends_the_run_with_a_checkpoint_and_a_report(
    case: str, code: int, name: str, tmp_path: Path
) -> None:
    """Python itself ends by SIGINT after KeyboardInterrupt: 130 in a shell. The signal is for the parent of the ranks."""
    done = ended(tmp_path, f"signal {case}")
    text = done.stdout + done.stderr
    report = json.loads((tmp_path / "latest" / "report.json").read_text())
    step = report["steps"]
    assert done.returncode == code and 3 <= step < 100, text
    assert f"the run was ended by {name} after step {step}; its newest checkpoint is of step {step}\n" in done.stdout, text
    assert list(tmp_path.glob(f"latest/checkpoints/step_{step:08d}_*/complete.json"))


def test_under_nohup_sighup_changes_nothing(tmp_path: Path) -> None:
    done = ended(tmp_path, "signal SIGHUP nohup")
    assert done.returncode == 0 and "SIGHUP" not in done.stdout and "returned" in done.stdout, done.stdout + done.stderr


def test_sys_exit_behind_the_loop_is_a_return(tmp_path: Path) -> None:
    done = ended(tmp_path, "exit behind")
    assert done.returncode == 0 and "returned" in done.stdout, done.stdout + done.stderr
