"""A run's folder, lines and files."""

import dataclasses
import errno
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixrt.errors import ConfigError
from helixrt.job import driver as drivers
from helixrt.job.config import JobConfig, MeshConfig, OutputConfig
from helixrt.job.controller import Controller, Happening, LifeEvent
from helixrt.job.driver import Driver, JobProgram, Run
from helixrt.job.leader_reports import Finished
from helixrt.job.metrics import StepMetrics, ValidationMetrics, read_metrics, read_metrics_line
from helixrt.job.output import RunOutput, line_of, new_run_folder
from helixrt.job.policies import Options, StopRun
from helixrt.job.storage_trouble import in_words
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.replica.contracts import Launcher, RunStore
from helixrt.replica.run_keys import done_key

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


def test_latest_that_is_a_folder_costs_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latest").mkdir()
    folder = new_run_folder(tmp_path)
    assert folder.is_dir() and (tmp_path / "latest").is_dir() and not (tmp_path / "latest").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.parent.name, "latest"]
    assert f"latest does not point to this run's folder {folder}: Is a directory" in capsys.readouterr().err


def test_a_run_that_ends_leaves_latest_on_the_one_that_began_after_it(ended_run: Driver) -> None:
    newer = new_run_folder(ended_run.run_.folder.parent.parent)
    assert ended_run._end(StopRun(True, "")) == 0 and (ended_run.run_.folder / "report.html").exists()
    assert (newer.parent.parent / "latest").resolve() == newer


def test_line_says_all_figures_of_a_step() -> None:
    line = line_of(ONE, 200, 2)
    for part in ("r1.pp1", "step  20/200", "2.0000 bits/byte", "8,192 tokens/s", "participants 2/2", "stall 0.013 s"):
        assert part in line
    assert "catching up" in line_of(dataclasses.replace(ONE, loss_nats=None), 200, 2)


def test_metrics_survive_the_way_to_the_file_and_back(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = RunOutput(tmp_path, 2, stream)
    output.plan(200)
    behind = dataclasses.replace(ONE, loss_nats=None, step=21)
    output.step(ONE)
    output.step(behind)
    output.validation(ValidationMetrics(1, 21, 2.5, 100))
    output.close()
    output.close()
    assert read_metrics_line(ONE.to_json()) == ONE
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind":"step","repl')  # cut short by a kill
    RunOutput(tmp_path, 2, stream).close()  # resumed
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [ONE, behind, ValidationMetrics(1, 21, 2.5, 100)]
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and "\r" not in stream.getvalue(), "no progress bar into a file"
    assert lines[0].startswith("r1 ") and lines[0].endswith("3.6067 bits/byte")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(s.step, s.value) for s in board.Scalars("loss/bits_per_byte/r1")] == [(20, pytest.approx(2.0))]


def test_terminal_gets_a_bar(tmp_path: Path) -> None:
    stream = Terminal()
    output = RunOutput(tmp_path, 2, stream)
    output.plan(200)
    output.step(ONE)
    output.step(dataclasses.replace(ONE, replica=0, rank="r0.pp1"))
    output.close()
    assert "\r" in stream.getvalue() and "/200" in stream.getvalue() and "r0-r1" in stream.getvalue()


def test_what_happens_to_a_replica_is_said_with_its_cause(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = RunOutput(tmp_path, 2, stream)
    output.plan(200)
    for kind in (Happening.LOST, Happening.WAITING, Happening.SKIPPED, Happening.STOPPED):
        output.life(LifeEvent(kind, 1, 2, 0.0, f"why it is {kind.value}"))
    output.close()
    assert stream.getvalue().splitlines() == [
        f"r1      {kind} (incarnation 2): why it is {kind}" for kind in ("lost", "waiting", "skipped")
    ]


def test_figures_that_cannot_be_written_cost_a_message_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = RunOutput(tmp_path, 2, io.StringIO())
    output._metrics.close()
    output._metrics = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    for step in (20, 21, 22):
        output.step(dataclasses.replace(ONE, step=step))
    output.close()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "metrics.jsonl could not be written: OSError: [Errno 28] No space left on device"
    assert len(said) <= 2, "once, and when the file is closed"


@pytest.fixture
def ended_run(tmp_path: Path) -> Iterator[Driver]:
    """A driver whose one replica has done its one step and said so."""
    driver = driver_of(tmp_path, life=0, steps=1, held=1)
    yield driver
    driver.output.close()


def driver_of(root: Path, life: int, steps: int, held: int) -> Driver:
    """Of one replica, which has ended with the record of step `held`; the first life of the run has made so many steps."""
    folder = root / "out" / "2026-03-04" / "05-06-07"
    folder.mkdir(parents=True)
    config = JobConfig(output=OutputConfig(str(root / "out")), mesh=MeshConfig(replicas=1, pp=1))
    records = [genesis("run", 1)]
    for step in range(1, steps + 1):
        records.append(CommitRecord(step, 5, records[-1].hash, ((0, 0),), {0: step}, "run"))
    driver = Driver(config, Run(folder, "run", 0.0, Log(records), life), JobProgram("no.module"))
    driver.store.put_if_absent(done_key(0), Finished(0, held, records[held].hash, "ab", "cd").to_json())
    driver.controller = SimpleNamespace(history=[])  # type: ignore[assignment]
    return driver


@pytest.mark.parametrize(("life", "code", "step"), [(1, 0, 1), (0, 1, 2)])
def test_a_life_that_had_no_step_to_make_ends_with_the_record_that_it_began_with(
    life: int, code: int, step: int, tmp_path: Path
) -> None:
    """Resumed from the checkpoint of step 1 with until=1, where the life before had come to step 2; in that life itself a
    replica that ends behind the head has not ended well."""
    driver = driver_of(tmp_path, life, steps=2, held=1)
    assert driver._end(StopRun(True, "")) == code and driver.reached.step == step
    driver.output.close()


def test_a_finished_run_has_its_report(ended_run: Driver) -> None:
    assert ended_run._end(StopRun(True, "")) == 0
    assert (ended_run.run_.folder / "report.html").exists()


def test_the_limits_of_restarts_are_those_of_the_settings(ended_run: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Options] = []

    class Given(Controller):
        def __init__(self, launcher: Launcher, store: RunStore, specs: Any, options: Options, *more: Any, **named: Any) -> None:
            given.append(options)
            super().__init__(launcher, store, specs, options, *more, **named)

        def run(self, *args: Any, **named: Any) -> StopRun:
            return StopRun(True, "")

    monkeypatch.setattr(drivers, "Controller", Given)
    ended_run.config = dataclasses.replace(ended_run.config, restarts=7, fatal_restarts=5)
    assert ended_run.run() == 0
    assert [(o.max_restarts, o.fatal_restarts) for o in given] == [(7, 5)]


@pytest.mark.parametrize("problem", ["the disk is full", "an error in a chart", "no folder"])
def test_a_report_that_cannot_be_written_does_not_fail_a_finished_run(
    problem: str, ended_run: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device") if "disk" in problem else ZeroDivisionError("a chart")

    if problem == "no folder":
        ended_run.run_.folder.rename(ended_run.run_.folder.with_name("elsewhere"))
        ended_run.run_.folder.touch()  # so that no thread that still writes makes it again
    else:
        monkeypatch.setattr(drivers, "write_report", fail)
    assert ended_run._end(StopRun(True, "")) == 0
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("the report could not be written: ")]) == 1
    assert all(" could not be written: " in line for line in said), "no stack"
    assert ended_run._end(StopRun(False, "no replica is left")) == 1, "a failed run stays failed"


def test_a_clock_that_steps_back_does_not_shorten_the_run(ended_run: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 7200.0)
    assert ended_run._end(StopRun(True, "")) == 0
    assert json.loads((ended_run.run_.folder / "report.json").read_text())["seconds"] >= 0


def test_a_console_that_takes_nothing_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log on a full disk, or a pipe whose reader has gone; of a terminal too, which has a bar."""

    class Full(io.StringIO):
        def __init__(self, terminal: bool) -> None:
            super().__init__()
            self.terminal = terminal

        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def isatty(self) -> bool:
            return self.terminal

    monkeypatch.setattr(sys, "stderr", Full(False))
    for number, terminal in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        output = RunOutput(folder, 1, Full(terminal))
        assert (output._bar is not None) == terminal
        output.plan(200)
        for step in (20, 21):
            output.step(dataclasses.replace(ONE, step=step, participants=1, replica=0))
        output.tick()
        output.life(LifeEvent(Happening.LOST, 1, 2, 0.0, "why"))
        output.problem("metrics.jsonl", OSError("no space"))
        output.close()
        assert len(list(read_metrics(folder / "metrics.jsonl"))) == 2


def test_of_a_large_file_of_figures_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.truncate(40 << 30)  # a sparse file, larger than the memory of the machine
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + ONE.to_json().encode() + b"\n" + b"cut " * 50_000)
    whole = path.stat().st_size
    RunOutput(tmp_path, 2, io.StringIO()).close()
    assert path.stat().st_size == whole - 200_000
    path.write_bytes(b"one line that a kill has cut")
    RunOutput(tmp_path, 2, io.StringIO()).close()
    assert path.stat().st_size == 0


def test_the_driver_asks_the_store_for_the_newest_lives_alone(ended_run: Driver) -> None:
    """Else each look would cost as many calls as replicas ever were lost."""
    for incarnation in range(50):
        ended_run.specs(0, incarnation)
        ended_run._lived(LifeEvent(Happening.RUNNING, 0, incarnation, 0.0, ""))
    assert list(ended_run._lives.shown) == [(0, 48), (0, 49)]


def test_a_storage_that_cannot_be_written_says_which_limit_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (("file", "a part of this path is a file: name a folder"), ("n" * 300, "a name may have 255 bytes")):
        config = JobConfig(output=OutputConfig(root=str(tmp_path / name)))
        with pytest.raises(ConfigError, match=rf"^storage=.*{name}.*cannot be written.*\({words}"):
            drivers.new_run(config)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")
    assert in_words(full).endswith("'metrics.jsonl' (its file system is full: free some space, or take another storage)")
