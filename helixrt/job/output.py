"""What a run leaves behind and what it says while it runs. Used by the driver alone, from one thread.

In: `StepMetrics`, `ValidationMetrics` and what happened to replicas. Out: the run's folder
`ROOT/DATE/TIME/` (with `ROOT/latest` pointing to the newest), in it `metrics.jsonl` with each replica's figures; the points
that loggers take (TensorBoard's files by default); one labelled line per step, of the mean over replicas, and a progress bar
if the stream is a terminal.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, TypedDict

from helixrt.job.console import Console
from helixrt.job.controller import Happening, LifeEvent
from helixrt.job.goodput import Goodput, flops_utilisation
from helixrt.job.kept_run import Absence
from helixrt.job.loggers import Apart, Guarded, MetricsLogger, MetricsPoint, TensorBoardLogger
from helixrt.job.means import Joined, Line, StepMeans
from helixrt.job.metrics import Logged, StepMetrics, ValidationMetrics
from helixrt.job.step_rules import SHOWN_EXCLUSIONS, audit_text
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.telling import tell

_EXPLAINED = {
    Happening.LOST, Happening.GIVEN_UP, Happening.WAITING, Happening.SKIPPED, Happening.LEFT, Happening.REFUSED,
    Happening.FAILED,
}  # fmt: skip
_BLOCK_BYTES = 1 << 16
_FILES_S = 30.0  # how long the end of a run waits for files and loggers
_ORDER_S = 0.2  # how long standard error waits for the lines that were said before
_TOLD = {Happening.RESTARTED, Happening.RUNNING, Happening.DRAINED, *_EXPLAINED}


def new_run_folder(root: Path, now: datetime | None = None) -> Path:
    """Make `root/DATE/TIME` (with a suffix, if a run of that second has it) and point `root/latest` to it."""
    now = now or datetime.now()
    date = root / now.strftime("%Y-%m-%d")
    date.mkdir(parents=True, exist_ok=True)
    for attempt in range(1000):
        folder = date / (now.strftime("%H-%M-%S") + (f".{attempt}" if attempt else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        point_latest_to(folder)
        return folder.resolve()
    raise FileExistsError(f"no free run folder in {date}")


def point_latest_to(folder: Path) -> None:
    """Make `ROOT/latest` a symlink to the folder of a run that begins, at once: no reader ever finds none. Where that does not
    work (`latest` is a folder, links are not supported) it costs a message."""
    root = folder.parent.parent
    link = root / f".latest.{os.getpid()}"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(folder, root))
        os.replace(link, root / "latest")
    except OSError as error:
        with suppress(OSError):
            link.unlink(missing_ok=True)
        tell(f"{root / 'latest'} does not point to this run's folder {folder}: {error.strerror or error}")


class Timed(TypedDict):
    """`updates`: in `seconds`; `goodput`: see `helixrt.job.goodput`."""

    seconds: float
    updates: int
    goodput: float | None


class RunOutput:
    """The folder, the lines and the bar of one run of so many replicas. `stream` gets the lines; `folder` must exist.

    `loggers`: besides TensorBoard's. Where the packages tensorboard or tqdm are not installed, the run has no such files, which
    a line says, or no bar. `flops_per_step`: of a replica; `peak_flops`: of all its ranks together, per second; 0
    where they are not known.
    """

    def __init__(
        self,
        folder: Path,
        replicas: int,
        stream: TextIO | None = None,
        *,
        name: str = "",
        settings: Mapping[str, Any] = MappingProxyType({}),
        loggers: Sequence[MetricsLogger] = (),
        flops_per_step: float = 0.0,
        peak_flops: float = 0.0,
    ) -> None:
        self.folder = folder
        self._replicas, self._steps = replicas, 0  # steps: not known yet
        self._console = Console(stream or sys.stdout)
        self._errors: Console | None = None  # once there is something to say on it
        self._making = threading.Lock()  # of that one: loggers have threads of their own
        self._flops, self._peak_flops = flops_per_step, peak_flops
        self._begun_s = self._record_s = time.monotonic()  # record: when the newest ones came
        self._begun_at: int | None = None  # after which step; not known before the first record
        self._newest = 0  # step
        self._means, self._goodput = StepMeans(), Goodput(replicas)
        _drop_cut_line(folder / "metrics.jsonl")
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        self._lines = Apart("metrics.jsonl", self.problem)
        missing = [package for package in ("tensorboard", "tqdm") if importlib.util.find_spec(package) is None]
        board = [] if "tensorboard" in missing else [TensorBoardLogger()]
        self._loggers = [Guarded(logger, self.problem) for logger in (*board, *loggers)]
        for logger in self._loggers:
            logger.begin(folder, name, settings)
        self._bar: Any = None
        if board == []:
            self.say("no TensorBoard files: the package tensorboard is not installed (pip install 'helixrt[train]')")
        if self._console.isatty() and "tqdm" not in missing:
            from tqdm import tqdm

            self._bar = tqdm(total=None, unit="step", file=self._console, dynamic_ncols=True, leave=False)

    def plan(self, steps: int) -> None:
        """The run has so many steps."""
        self._steps = steps
        if self._bar is not None:
            self._bar.total = steps
            self._bar.refresh()

    def step(self, line: Line) -> None:
        """Keep one replica's figures of one step; print the mean over replicas once all have told theirs."""
        self._keep(line)
        self._log(MetricsPoint(MetricsPoint.STEP, line.step, line.replica, self._figures_of(line)))
        self._tell(self._means.add(line, time.monotonic()))

    def committed(self, records: Sequence[CommitRecord]) -> None:
        """Take in the records that stand since the last time."""
        if not records:
            return
        now = time.monotonic()
        self._goodput.add(records, now - self._record_s)
        self._record_s, self._newest = now, records[-1].step
        if self._begun_at is None:
            self._begun_at = records[0].step - 1

    def attached(self, absence: Absence, records: Sequence[CommitRecord]) -> None:
        """Begin with a run that was without a driver; `records`: all that were committed in that time."""
        now = time.monotonic()
        self._begun_s, self._record_s = now - absence.away_s, now - (absence.away_s - absence.still_s)
        self._begun_at = self._newest = absence.first
        self.committed(records)

    def figures(self) -> Timed:
        """Of the run, or of this life of it; where another driver has begun it, since that one was lost."""
        updates = 0 if self._begun_at is None else max(0, self._newest - self._begun_at)
        seconds = time.monotonic() - self._begun_s
        return {"seconds": seconds, "updates": updates, "goodput": self._goodput.share(seconds)}

    def tick(self) -> None:
        """Print steps that not all replicas that contributed have told of in time."""
        self._tell(self._means.due(time.monotonic()))

    def validation(self, metrics: ValidationMetrics) -> None:
        """Print and keep a validation loss."""
        self._keep(metrics)
        rank = metrics.rank if metrics.parts else f"r{metrics.replica}    "
        told = f"validation {metrics.bits_per_byte:.4f} bits/byte{_of_parts(metrics)}"
        self.say(f"{rank}  step {metrics.step}  {told}")
        values = {"loss/validation_bits_per_byte": metrics.bits_per_byte}
        self._log(MetricsPoint(MetricsPoint.VALIDATION, metrics.step, None if metrics.parts else metrics.replica, values))

    def evaluated(self, line: Logged) -> None:
        """Print and keep what a user's evaluation returned."""
        self._keep(line)
        self.say(f"{line.rank}  step {line.step}  validation  {_told(line.values)}{_of_parts(line)}")
        values = {f"{Logged.VALIDATION}/{name}": value for name, value in line.values.items()}
        self._log(MetricsPoint(MetricsPoint.VALIDATION, line.step, None if line.parts else line.replica, values))

    def _tell(self, joined: Iterable[Joined]) -> None:
        """A step's line, and its point of all replicas."""
        for step in joined:
            line, values = step.mean, self._figures_of(step.mean)
            if (goodput := self.figures()["goodput"]) is not None:
                values["speed/goodput"] = goodput
            used = flops_utilisation(self._flops, line.seconds, self._peak_flops)
            if used is not None:
                values["speed/flops_utilisation"] = used
            self._log(MetricsPoint(MetricsPoint.STEP, step.step, None, values))
            shown = "" if used is None else f"  utilisation {used:.1%}"
            if isinstance(line, StepMetrics):
                self.say(line_of(line, self._steps, self._replicas) + shown)
            else:
                self.say(logged_line_of(line, self._steps, self._replicas) + shown)
            self._advance(line)

    @staticmethod
    def _figures_of(line: Line) -> dict[str, float]:
        """By the names that loggers get."""
        if isinstance(line, Logged):
            return {f"{Logged.STEP}/{name}": value for name, value in line.values.items()}
        figures = {
            "loss/bits_per_byte": line.bits_per_byte,
            "speed/tokens_per_s": line.tokens_per_s,
            "speed/stall_s": line.stall_s,
            "replicas/participants": float(line.participants),
            "replicas/generation": float(line.generation),
            "update/grad_norm": line.grad_norm,
            "update/learning_rate": line.learning_rate,
        }
        return {name: value for name, value in figures.items() if value is not None}

    def life(self, event: LifeEvent) -> None:
        """Say what happened to a replica, if a user wants to know."""
        if event.kind in _TOLD:
            why = f": {event.why}" if event.why and event.kind in _EXPLAINED else ""
            self.say(f"r{event.replica}      {event.kind.value.replace('_', ' ')} (incarnation {event.incarnation}){why}")

    def settle(self) -> None:
        """Wait until what was kept is in metrics.jsonl."""
        self._lines.wait(_FILES_S)

    def summary(self) -> None:
        """Say what `report.json` in the run's folder holds, and where the page is."""
        for line in summary_of(json.loads((self.folder / "report.json").read_text(encoding="utf-8"))):
            self.say(line)
        self.say(f"report: {self.folder / 'report.html'}")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is None:
            self._console.write(text + "\n")
        else:
            self._bar.write(text + "\n", file=self._bar.fp, end="")

    def complain(self, text: str) -> None:
        """Print a line to standard error, behind those that were said before."""
        self._console.flush(_ORDER_S)
        with self._making:
            if self._errors is None:
                self._errors = Console(sys.stderr)
        self._errors.write(text + "\n")

    def problem(self, what: str, error: BaseException) -> None:
        """Say on stderr that something of the output could not be written. Training does not depend on it."""
        said = str(error).strip().splitlines()
        self.complain(f"{what} could not be written: {type(error).__name__}: {said[0] if said else ''}")

    def close(self) -> None:
        """Finish the files, take the bar away and write the last lines; idempotent. A file that cannot be written costs a
        message, a logger that does not end half a minute, and a console that takes nothing a few seconds."""
        self._tell(self._means.rest())
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
        self._lines.end(lambda: self._metrics.close())
        for logger in self._loggers:
            logger.close()
        deadline = time.monotonic() + _FILES_S
        for apart in (self._lines, *self._loggers):
            apart.wait(max(0.0, deadline - time.monotonic()))
        self._console.close()
        if self._errors is not None:
            self._errors.close()

    def _keep(self, metrics: StepMetrics | ValidationMetrics | Logged) -> None:
        """Into metrics.jsonl. What cannot be written is lost, and the first of a series of such lines is reported."""
        text = metrics.to_json() + "\n"
        self._lines.do(lambda: self._metrics.write(text))

    def _log(self, point: MetricsPoint) -> None:
        for logger in self._loggers:
            logger.log(point)

    def _advance(self, line: Line) -> None:
        if self._bar is not None and line.step > self._bar.n:
            if isinstance(line, StepMetrics) and line.bits_per_byte is not None:
                self._bar.set_postfix_str(f"{line.bits_per_byte:.3f} bits/byte", refresh=False)
            self._bar.update(line.step - self._bar.n)


def logged_line_of(line: Logged, steps: int, replicas: int) -> str:
    """`r0-r1  step 20/200  loss 2.41  0.310 s  participants 2/2  stall 0.010 s`"""
    step = f"{line.step}/{steps}" if steps else f"{line.step}"
    of = f"participants {line.participants}/{replicas}  stall {line.stall_s:.3f} s"
    return f"{line.rank}  step {step}  {_told(line.values)}  {line.seconds:.3f} s  {of}"


def _of_parts(line: Logged | ValidationMetrics) -> str:
    """What of the data a validation left out."""
    return f"  ({line.partial})" if line.partial else ""


def _told(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.6g}" for name, value in values.items())


def line_of(metrics: StepMetrics, steps: int, replicas: int) -> str:
    """`r0-r1  step  20/200  3.412 bits/byte  12,345 tokens/s  participants 2/2  stall 0.010 s`"""
    of = f"/{steps}" if steps else ""
    loss = "  (catching up)  " if metrics.bits_per_byte is None else f"{metrics.bits_per_byte:7.4f} bits/byte"
    return (
        f"{metrics.rank}  step {metrics.step:{len(str(steps))}d}{of}  {loss}  {metrics.tokens_per_s:8,.0f} tokens/s"
        f"  participants {metrics.participants}/{replicas}  stall {metrics.stall_s:.3f} s"
    )


def summary_of(report: dict[str, Any]) -> list[str]:
    """A few lines for the end of a run's log."""
    reached, order0 = report["validation_bits_per_byte"], report["corpus_order0_bits_per_byte"]
    audit = report["data_audit"]
    verdict = audit_text(audit) if audit["batches"] else "nothing trained"
    hashes = {r["parameters_digest"] for r in report["replicas"]}
    alike = "bitwise equal" if len(hashes) == 1 else "DIFFERENT" if hashes else "unknown"
    validation = "unknown" if reached is None else f"{reached:.4f} bits/byte"
    validation += f" ({report['validation_partial']})" if report.get("validation_partial") else ""
    corpus = "" if order0 is None else f", order-0 entropy of the corpus {order0:.4f}"
    lines = [
        *([f"validation {validation}{corpus}"] if reached is not None or order0 is not None else []),
        f"data: {audit['batches']} batches, {audit['gaps']} gaps, {audit['repeats']} repeats: {verdict}",
        f"final parameters of all replicas: {alike}",
    ]
    if report.get("stopped"):
        lines.append(f"stopped after step {report['steps']}: {report['stopped']}")
    if audit["superseded"]:
        lines.append(f"{audit['superseded']} committed records were superseded: their steps were lost and computed again")
    lines += [e["what"] for e in report["exclusions"][:SHOWN_EXCLUSIONS]]
    for f in report["failures"]:
        lines.append(
            f"replica {f['replica']} lost in step {f['step']}: detected after {_seconds(f['detected_after_s'])}, survivors"
            f" stalled for {_seconds(f['survivors_stalled_s'])}, rejoined after {_seconds(f['rejoined_after_s'])}"
        )
    for r in report["rails_left"]:
        back = "did not return" if r["back_after_s"] is None else f"back after {_seconds(r['back_after_s'])}"
        saved = "" if r["checkpoint_step"] is None else f", checkpoint of step {r['checkpoint_step']}"
        lines.append(
            f"{r['rank']} left rail {r['rail']} towards {r['towards'] or r['peer']} in step {r['step']}"
            f" ({r['failure'] or 'slow'}: {r['reason']}), {r['usable']} went on; {back}{saved}"
        )
    return lines


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _drop_cut_line(path: Path) -> None:
    """A run that is resumed goes on in the same file, whose last line a kill may have cut. The file may be large: it is read
    from its end on."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        file.truncate(end)
