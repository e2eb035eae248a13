"""Where the figures of a run go besides `metrics.jsonl`: the `MetricsLogger` contract and those that are built in.

In: `MetricsPoint`s, from the driver. Out: TensorBoard's files, rows of a CSV file, or whatever a user's own logger makes of
them. A logger serves a run: it can never end one (`Guarded`).
"""

from __future__ import annotations

import csv
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from helixrt.errors import MissingExtra

_AGAIN_S = 10.0


@dataclass(frozen=True)
class MetricsPoint:
    """Figures of one update, or of a validation of the state after it.

    `what`: "step" or "validation". `step`: number of the update. `replica`: whose figures these are; None: those of all
    replicas that contributed to the step, joined as `helixrt.job.means` says. `values`: by name; slashes part names.
    """

    what: str
    step: int
    replica: int | None
    values: Mapping[str, float]

    STEP = "step"
    VALIDATION = "validation"

    @property
    def of(self) -> str:
        """Whose figures, as part of a name: r0, r1, ... or all."""
        return "all" if self.replica is None else f"r{self.replica}"


class MetricsLogger(ABC):
    """What a user's own logger implements; `helixrt.run(loggers=[...])` takes it. The driver calls it, in one thread.

    Steps of a replica come in order; the same step may come twice, when its first account was lost with a failure and it was
    computed again: the last one counts. An exception costs a message on stderr, and never the run.
    """

    def begin(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:  # noqa: B027 most need nothing
        """Once, before anything is logged: the run's folder, its name (which a resumed run keeps), its settings."""

    @abstractmethod
    def log(self, point: MetricsPoint) -> None:
        """Take in figures. The run's console waits meanwhile; training does not."""

    def close(self) -> None:  # noqa: B027
        """Once, at the end of the run."""


class TensorBoardLogger(MetricsLogger):
    """TensorBoard's files in the folder `tensorboard` of the run's. Raises MissingExtra where the package is not installed."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "train", "TensorBoardLogger") from error
        self._writer: Callable[..., Any] = SummaryWriter
        self._board: Any = None
        self._path = ""
        self._failure: Exception | None = None  # of the newest attempt
        self._again_s = 0.0  # when the next one is made

    def begin(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self._path = str(folder / "tensorboard")
        self._board = self._writer(self._path, flush_secs=5)

    def log(self, point: MetricsPoint) -> None:
        """A writer that has failed once, on a full disk say, writes nothing more: a new one takes its place."""
        if self._failure is not None and time.monotonic() < self._again_s:
            raise self._failure.with_traceback(None)
        try:
            if self._failure is not None:
                self._board = self._writer(self._path, flush_secs=5)
            for name, value in point.values.items():
                self._board.add_scalar(f"{name}/{point.of}", value, point.step)
            self._failure = None
        except Exception as error:
            self._board, self._failure, self._again_s = None, error, time.monotonic() + _AGAIN_S
            raise

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


class CsvLogger(MetricsLogger):
    """`metrics.csv` in the run's folder, a row per value: what, step, replica (or all), name, value. A resumed run appends."""

    FILE = "metrics.csv"
    COLUMNS = ("what", "step", "replica", "name", "value")

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def begin(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self._file = open(folder / self.FILE, "a", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115
        if self._file.tell() == 0:
            csv.writer(self._file).writerow(self.COLUMNS)

    def log(self, point: MetricsPoint) -> None:
        assert self._file is not None, "begin comes first"
        whose = "all" if point.replica is None else point.replica
        csv.writer(self._file).writerows([point.what, point.step, whose, name, value] for name, value in point.values.items())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Guarded:
    """A logger whose errors are told, the first of a series each, and go no further. `problem(name, error)` tells one."""

    def __init__(self, logger: MetricsLogger, problem: Callable[[str, BaseException], None]) -> None:
        self._logger, self._problem = logger, problem
        self._failing = False
        self._begun = False

    @property
    def name(self) -> str:
        return type(self._logger).__name__

    def begin(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        """As of the logger. One that cannot begin is left out of the run."""
        self._begun = self._done(lambda: self._logger.begin(folder, name, settings))

    def log(self, point: MetricsPoint) -> None:
        if self._begun:
            self._done(lambda: self._logger.log(point))

    def close(self) -> None:
        if self._begun:
            self._begun = False
            self._failing = False
            self._done(self._logger.close)

    def _done(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            if not self._failing:
                self._problem(self.name, error)
            self._failing = True
            return False
        self._failing = False
        return True
