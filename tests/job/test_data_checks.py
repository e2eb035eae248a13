"""Runs that go wrong are refused or told in one line: the same batches twice, ranks of one stream that differ, another order
after a restart, an update that reads the clock. Loaders that shuffle by themselves and take a share give each item once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import programs

SCRIPT = Path(__file__).with_name("data_checks_script.py")
ITEMS = 64

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # a driver and two ranks each


def reported(folder: Path) -> dict[str, object]:
    (path,) = {path.resolve() for path in folder.glob("2*/*/report.json")}
    found: dict[str, object] = json.loads(path.read_text())["data_audit"]
    return found


@pytest.mark.parametrize(
    ("kind", "step", "said"),
    [
        ("same", 8, "stream 0/0 and stream 1/0 have given the same batches in the last 8 steps, so each item is trained on"),
        ("stages", 1, "ranks 0 and 1 of replica 0 have read different batches for step 1 (before position 1)"),
        ("restart strict", 0, "the data of replica 1 is another than before its restart: the batches before position"),
    ],
)
def test_a_run_whose_data_are_wrong_ends_with_one_line(kind: str, step: int, said: str, tmp_path: Path) -> None:
    ended = programs.output_of(SCRIPT, tmp_path, *kind.split(), timeout=280)
    text = ended.stdout + ended.stderr
    assert ended.returncode == 1 and f"the run failed: helixrt.errors.MisuseError: {said}" in text, text
    if step:
        assert reported(tmp_path)["batches"] == (1 if kind == "stages" else 2) * (step - 1)


def test_an_update_that_reads_the_clock_is_found_and_ends_the_run_when_it_comes_again(tmp_path: Path) -> None:
    ended = programs.output_of(SCRIPT, tmp_path, "clock", timeout=280)
    text = ended.stdout + ended.stderr
    assert ended.returncode == 1 and reported(tmp_path)["batches"] <= 2 * 51, text
    assert text.count("replicas 0, 1 hold different states before step ") >= 2, text
    assert text.count("parameter/weight differs first (rank 0). It must be equal bit for bit") >= 2, text
    assert text.count("the run goes on from its beginning, where its state was found equal") == 1, text
    assert "\nthe run failed: replicas differed before step " in text and "this cause comes again" in text, text


@pytest.mark.parametrize("kind", ["constant", "same allowed"])
def test_streams_that_are_the_same_may_be_allowed_and_constant_ones_are_said(kind: str, tmp_path: Path) -> None:
    ended = programs.succeeded(SCRIPT, tmp_path, kind, timeout=280)
    constant = "stream 0/0 has given the same batch in all steps so far"
    assert ended.stdout.count(constant) == (kind == "constant"), ended.stdout
    assert "every batch exactly once, as its loader deals them" in ended.stdout


@pytest.mark.grid
@pytest.mark.parametrize("shuffle", ["random", "numpy", "torch"])
@pytest.mark.parametrize("kind", ["sampler", "dataset"])
def test_each_stream_shuffles_all_items_and_takes_its_share(kind: str, shuffle: str, tmp_path: Path) -> None:
    programs.succeeded(SCRIPT, tmp_path, f"{kind} {shuffle}", timeout=280)
    read = [(tmp_path / f"items.{replica}").read_text().split() for replica in range(2)]
    assert sorted(int(each) for each in [*read[0], *read[1]]) == list(range(ITEMS))


def test_an_order_that_changed_with_a_restart_is_told_and_the_audit_says_so(tmp_path: Path) -> None:
    ended = programs.succeeded(SCRIPT, tmp_path, "restart", timeout=280)
    assert ended.stdout.count("the data of replica 1 is another than before its restart") == 1, ended.stdout
    (position,) = reported(tmp_path)["unsure"].values()  # type: ignore[attr-defined]
    assert f"not known from position {position} of replica 1 on, whose data changed with a restart" in ended.stdout
