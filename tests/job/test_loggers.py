"""Loggers: what they are told, and that one that fails costs a message alone."""

import csv
import io
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import helixrt
from helixrt.job import loggers
from helixrt.job.goodput import Goodput
from helixrt.job.kept_run import Absence
from helixrt.job.metrics import Logged, StepMetrics, ValidationMetrics
from helixrt.job.output import RunOutput
from helixrt.protocol.step.lineage import CommitRecord
from tests.waiting import PATIENT_S, until


def step(replica: int, number: int, loss: float = 1.0) -> Logged:
    return Logged(Logged.STEP, replica, f"r{replica}", number, {"loss": loss}, 0.5, 2, 0.0)


class Kept(helixrt.MetricsLogger):
    def __init__(self) -> None:
        self.begun: list[tuple[Path, str, Mapping[str, Any]]] = []
        self.points: list[helixrt.MetricsPoint] = []
        self.closed = 0

    def begin(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self.begun.append((folder, name, settings))

    def log(self, point: helixrt.MetricsPoint) -> None:
        self.points.append(point)

    def close(self) -> None:
        self.closed += 1


class Failing(helixrt.MetricsLogger):
    def log(self, point: helixrt.MetricsPoint) -> None:
        if point.step != 3:
            raise ConnectionError("the server of the figures is away")


class NeverBegins(Kept):
    def begin(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        raise PermissionError("no token")


def test_a_logger_gets_each_replicas_figures_and_those_of_all(tmp_path: Path) -> None:
    kept = Kept()
    output = RunOutput(tmp_path, 2, io.StringIO(), name="run-1", settings={"seed": 3}, loggers=[kept])
    output.step(step(1, 1, 3.0))
    output.step(step(0, 1, 1.0))
    output.evaluated(Logged(Logged.VALIDATION, 0, "r0", 1, {"accuracy": 0.5}, 0.0, 0, 0.0))
    output.validation(ValidationMetrics(1, 1, 2.5, 100))
    output.close()
    output.close()
    assert kept.begun == [(tmp_path, "run-1", {"seed": 3})] and kept.closed == 1
    found = [(p.what, p.step, p.replica, p.values.get("step/loss")) for p in kept.points]
    assert found[:3] == [("step", 1, 1, 3.0), ("step", 1, 0, 1.0), ("step", 1, None, 2.0)]
    assert not {"speed/goodput", "speed/flops_utilisation"} & kept.points[2].values.keys(), "neither is known"
    assert kept.points[3].values == {"validation/accuracy": 0.5}
    assert "loss/validation_bits_per_byte" in kept.points[4].values


def test_a_logger_that_fails_costs_one_message_a_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    never = NeverBegins()
    output = RunOutput(tmp_path, 1, io.StringIO(), loggers=[Failing(), never])
    for number in (1, 2, 3, 4, 5):
        output.step(Logged(Logged.STEP, 0, "r0", number, {"loss": 1.0}, 0.5, 1, 0.0))
    output.close()
    said = capsys.readouterr().err.splitlines()
    failing = "Failing could not be written: ConnectionError: the server of the figures is away"
    never_said = "NeverBegins could not be written: PermissionError: no token"
    assert sorted(said) == [failing, failing, never_said], "it was back in step 3"
    assert not never.points and not never.closed
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5


def test_a_logger_or_a_file_that_hangs_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freed = threading.Event()

    class Hanging(Kept):
        def log(self, point: helixrt.MetricsPoint) -> None:
            freed.wait()
            super().log(point)

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            freed.wait()
            return super().write(text)

    monkeypatch.setattr("helixrt.job.loggers._CAPACITY", 9)
    hanging, kept = Hanging(), Kept()
    output = RunOutput(tmp_path, 1, io.StringIO(), loggers=[hanging, kept])
    output._metrics = Slow()  # type: ignore[assignment]
    try:
        for number in range(1, 31):
            output.step(Logged(Logged.STEP, 0, "r0", number, {"loss": 1.0}, 0.5, 1, 0.0))
            until(lambda at=2 * number: len(kept.points) == at, "the figures")  # type: ignore[misc]
        monkeypatch.setattr("helixrt.job.output._FILES_S", 0.1)
        output.close()
    finally:
        freed.set()
    said = capsys.readouterr().err
    for name in ("Hanging", "metrics.jsonl"):
        assert said.count(f"{name} could not be written: TimeoutError: it takes too long, and what") == 2, "and at its end"
    until(lambda: hanging.closed, "the end of the logger")
    assert hanging.points[-1].step == 30 and len(hanging.points) == 7, "one was on its way, three calls are the end"


def test_csv_has_a_row_per_value_and_goes_on_when_the_run_is_resumed(tmp_path: Path) -> None:
    for number in (1, 2):
        output = RunOutput(tmp_path, 1, io.StringIO(), loggers=[helixrt.CsvLogger()])
        output.step(Logged(Logged.STEP, 0, "r0", number, {"loss": 0.5 * number}, 0.5, 1, 0.0))
        output.close()
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [(row["step"], row["replica"], float(row["value"])) for row in rows if row["name"] == "step/loss"]
    assert losses == [("1", "0", 0.5), ("1", "all", 0.5), ("2", "0", 1.0), ("2", "all", 1.0)]


def test_utilisation_is_shown_where_operations_and_the_devices_speed_are_known(tmp_path: Path) -> None:
    kept, stream = Kept(), io.StringIO()
    output = RunOutput(tmp_path, 2, stream, loggers=[kept], flops_per_step=4e9, peak_flops=2e10)
    for replica, seconds in ((0, 0.5), (1, 1.0)):
        output.step(StepMetrics(replica, f"r{replica}.pp0", 1, 1.0, 100, seconds, 2, 0.0, 1.0, 1e-3, 1))
    output.close()
    assert kept.points[-1].values["speed/flops_utilisation"] == pytest.approx(0.2), "of the slowest replica"
    assert "utilisation 20.0%" in stream.getvalue()


def committed(*steps: int, replicas: int = 2, applied: bool = True) -> list[CommitRecord]:
    contributors = tuple((replica, 0) for replica in range(replicas))
    return [CommitRecord(step, 5, "", contributors, run="run", applied=applied) for step in steps]


def test_goodput_counts_committed_steps_once_with_what_is_usual() -> None:
    goodput = Goodput(2)
    assert goodput.share(20.0) is None
    goodput.add(committed(1), 50.0)  # a capture
    for number in range(2, 5):
        goodput.add(committed(number), 1.0)
    assert goodput.share(20.0) is None, "it is not known yet what is usual"
    goodput.add(committed(5, 6, 7, 8, 9, 10), 6.0)
    assert goodput.share(20.0) == pytest.approx(20 / 40), "ten steps of a second on each of two replicas, in 20 s"
    goodput.add(committed(9, 10), 2.0)  # computed again
    goodput.add(committed(11, applied=False), 1.0)
    assert goodput.share(20.0) == pytest.approx(20 / 40)
    goodput.add(committed(12, replicas=1), 30.0)  # the other was lost, and it was waited for
    assert goodput.share(42.0) == pytest.approx(21 / 84)
    assert goodput.share(0.0) is None


@pytest.mark.parametrize("logs", ["nothing", "every tenth step", "on one replica"])
def test_goodput_does_not_depend_on_what_the_program_logs(logs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("helixrt.job.output.time", SimpleNamespace(monotonic=lambda: now))
    output = RunOutput(tmp_path, 2, io.StringIO())
    assert output.figures()["goodput"] is None
    now += 30.0  # it starts
    for number in range(1, 31):
        now += 1.0
        output.committed(committed(number))
        for replica in (0, 1):
            if logs == "every tenth step" and number % 10 == 0 or logs == "on one replica" and replica == 0:
                output.step(step(replica, number, 1.0))
    assert output.figures() == {"seconds": 60.0, "updates": 30, "goodput": pytest.approx(0.5)}
    output.close()


def test_figures_of_a_driver_that_attached_are_of_the_time_without_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("helixrt.job.output.time", SimpleNamespace(monotonic=lambda: now))
    output = RunOutput(tmp_path, 2, io.StringIO())
    output.attached(Absence(away_s=100.0, first=500, last=580, still_s=20.0), committed(*range(501, 581)))
    for number in range(581, 601):
        now += 1.0
        output.committed(committed(number))
    figures = output.figures()
    assert (figures["seconds"], figures["updates"]) == (120.0, 100)
    assert figures["goodput"] == pytest.approx(100 / 120)
    output.close()


def test_tensorboard_has_a_new_writer_after_its_own_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the package writes nothing any more after a full disk."""
    made: list[Any] = []

    class Writer:
        def __init__(self, path: str, flush_secs: int) -> None:
            made.append(self)
            self.steps: list[int] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            if self is made[0] and step >= 2:
                raise OSError("no space left on device")
            self.steps.append(step)

        def close(self) -> None:
            pass

    logger = loggers.TensorBoardLogger()
    logger._writer = Writer
    said: list[str] = []
    guarded = loggers.Guarded(logger, lambda name, error: said.append(f"{name}: {error}"))
    guarded.begin(tmp_path, "run", {})
    for step in (1, 2, 3):
        guarded.log(helixrt.MetricsPoint("step", step, None, {"loss": 1.0}))
    guarded.wait(PATIENT_S)
    assert len(made) == 1, "not at once"
    monkeypatch.setattr(loggers, "_AGAIN_S", 0.0)
    logger._again_s = 0.0
    for step in (4, 5):
        guarded.log(helixrt.MetricsPoint("step", step, None, {"loss": 1.0}))
    guarded.close()
    guarded.wait(PATIENT_S)
    assert [writer.steps for writer in made] == [[1], [4, 5]]
    assert said == ["TensorBoardLogger: no space left on device"]
