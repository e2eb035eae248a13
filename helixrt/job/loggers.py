"""Where the figures of a run go besides `metrics.jsonl`: the `MetricsLogger` contract and those that are built in.

In: `MetricsPoint`s, from the driver. Out: TensorBoard's files, rows of a CSV file, or whatever a user's own logger makes of
them. A logger serves a run: it can never end one, nor hold up the driver (`Guarded`).
"""

from __future__ import annotations

import csv
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from helixrt.errors import MissingExtra

_AGAIN_S = 10.0
_CAPACITY = 10_000  # calls of a logger that wait


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
    """What a user's own logger implements; `helixrt.run(loggers=[...])` takes it. The driver's process calls it, in one
    thread of its own.

    Steps of a replica come in order; the same step may come twice, when its first account was lost with a failure and it was
    computed again: the last one counts. An exception costs a message on stderr, and never the run. Of figures that come faster
    than they are taken the oldest are left out; at its end the run waits 30 s for the rest.
    """

    def begin(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:  # noqa: B027 most need nothing
        """Once, before anything is logged: the run's folder, its name (which a resumed run keeps), its settings."""

    @abstractmethod
    def log(self, point: MetricsPoint) -> None:
        """Take in figures. The run does not wait for the return."""

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


class Apart:
    """Calls that are made in their order, in a thread of this object. `problem(name, error)` reports the first error of each
    series; no error ends the thread. `do`, `end` and `wait` are called from one thread."""

    def __init__(self, name: str, problem: Callable[[str, BaseException], None]) -> None:
        self._name, self._problem = name, problem
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_CAPACITY)
        self._failing = self._full = self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"helixrt-{name}", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[], object] | None) -> None:
        """Make this call behind those that were asked for before. Where too many wait, the oldest of them is left out."""
        while not self._ended:
            with suppress(queue.Full):
                return self._calls.put_nowait(call)
            with suppress(queue.Empty):
                self._calls.get_nowait()
                self._calls.task_done()
                if not self._full:
                    self._problem(self._name, TimeoutError("it takes too long, and what comes meanwhile is left out"))
                self._full = True

    def end(self, last: Callable[[], object]) -> None:
        """Make this call as the last one; its error is told in any case. Idempotent."""
        self.do(lambda: None)
        self.do(last)
        self.do(None)
        self._ended = True

    def wait(self, limit_s: float) -> None:
        """Wait until all calls are made, `limit_s` at most. After `end`, calls that were not made are reported as a problem."""
        with self._calls.all_tasks_done:
            made = self._calls.all_tasks_done.wait_for(lambda: not self._calls.unfinished_tasks, limit_s)
        if self._ended and not made:
            self._problem(self._name, TimeoutError("it takes too long, and what has not been written is left out"))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
                self._failing = False
            except BaseException as error:  # also an exit, which would end this thread alone
                if not self._failing:
                    self._problem(self._name, error)
                self._failing = True
            self._calls.task_done()
        self._calls.task_done()


class Guarded(Apart):
    """A logger in a thread of its own. One that cannot begin is left out of the run."""

    def __init__(self, logger: MetricsLogger, problem: Callable[[str, BaseException], None]) -> None:
        super().__init__(type(logger).__name__, problem)
        self._logger = logger
        self._begun = False  # of its thread

    def begin(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        def begin() -> None:
            self._logger.begin(folder, name, settings)
            self._begun = True

        self.do(begin)

    def log(self, point: MetricsPoint) -> None:
        self.do(lambda: self._logger.log(point) if self._begun else None)

    def close(self) -> None:
        self.end(lambda: self._logger.close() if self._begun else None)
