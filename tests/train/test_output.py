"""A run's folder, lines and files."""

import dataclasses
import io
import math
from datetime import datetime
from pathlib import Path

import pytest

from helixrt.train.config import TrainConfig
from helixrt.train.metrics import StepMetrics, ValidationMetrics, read_metrics, read_metrics_line
from helixrt.train.output import RunOutput, line_of, new_run_folder

ONE = StepMetrics(
    replica=1, rank="r1.pp1", step=20, loss_nats=2 * math.log(2), tokens=2048, seconds=0.25, participants=2, stall_s=0.0125,
    grad_norm=0.5, learning_rate=1e-3, generation=7,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_folders_are_dated_and_latest_points_to_the_newest(tmp_path: Path) -> None:
    now = datetime(2026, 3, 4, 5, 6, 7)
    first, second = new_run_folder(tmp_path, now), new_run_folder(tmp_path, now)
    assert first == tmp_path / "2026-03-04" / "05-06-07"
    assert second.parent == first.parent and second.name > first.name
    assert (tmp_path / "latest").resolve() == second
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2026-03-04", "latest"]


def test_line_says_all_figures_of_a_step() -> None:
    line = line_of(ONE, 200, 2)
    for part in ("r1.pp1", "step  20/200", "2.0000 bits/byte", "8,192 tokens/s", "participants 2/2", "stall 0.013 s"):
        assert part in line
    assert "catching up" in line_of(dataclasses.replace(ONE, loss_nats=None), 200, 2)


def test_metrics_survive_the_way_to_the_file_and_back(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = RunOutput(tmp_path, TrainConfig(), stream)
    behind = dataclasses.replace(ONE, loss_nats=None, step=21)
    output.step(ONE)
    output.step(behind)
    output.validation(ValidationMetrics(1, 21, 2.5, 100))
    output.close()
    output.close()
    assert read_metrics_line(ONE.to_json()) == ONE
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind":"step","repl')  # cut short by a kill
    RunOutput(tmp_path, TrainConfig(), stream).close()  # resumed
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [ONE, behind, ValidationMetrics(1, 21, 2.5, 100)]
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and "\r" not in stream.getvalue(), "no progress bar into a file"
    assert lines[2].startswith("r1 ") and lines[2].endswith("3.6067 bits/byte")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(s.step, s.value) for s in board.Scalars("loss/bits_per_byte/r1")] == [(20, pytest.approx(2.0))]


def test_terminal_gets_a_bar(tmp_path: Path) -> None:
    stream = Terminal()
    output = RunOutput(tmp_path, TrainConfig(), stream)
    output.step(ONE)
    output.close()
    assert "\r" in stream.getvalue() and "/200" in stream.getvalue() and "r1.pp1" in stream.getvalue()
