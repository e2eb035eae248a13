"""What a run leaves behind and what it says while it runs. Used by the driver alone, from one thread.

In: `StepMetrics`, `ValidationMetrics` and what happened to replicas. Out: the run's folder
`ROOT/DATE/TIME/` (with `ROOT/latest` pointing to the newest), in it `metrics.jsonl` and TensorBoard's
files; one rank-labelled line per step, and a progress bar if the stream is a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from helixrt.errors import MissingExtra
from helixrt.job.controller import Happening, LifeEvent
from helixrt.job.metrics import Logged, StepMetrics, ValidationMetrics
from helixrt.job.step_rules import SHOWN_EXCLUSIONS

_EXPLAINED = {
    Happening.LOST, Happening.GIVEN_UP, Happening.WAITING, Happening.SKIPPED, Happening.LEFT, Happening.REFUSED
}  # fmt: skip
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
    """Make `ROOT/latest` a symlink to the run's folder, at once: no reader ever finds none."""
    root = folder.parent.parent
    link = root / f".latest.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(folder, root))
    os.replace(link, root / "latest")


class RunOutput:
    """The folder, the lines and the bar of one run of so many replicas. `stream` gets the lines; `folder` must exist."""

    def __init__(self, folder: Path, replicas: int, stream: TextIO | None = None) -> None:
        self.folder = folder
        self._replicas, self._steps = replicas, 0  # steps: not known yet
        self._stream = stream or sys.stdout
        _drop_cut_line(folder / "metrics.jsonl")
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        self._board = _board(folder / "tensorboard")
        self._unwritten: set[str] = set()  # files whose newest entry could not be written
        self._said = 0  # the newest step that has had its line
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=None, unit="step", file=self._stream, dynamic_ncols=True, leave=False)

    def plan(self, steps: int) -> None:
        """The run has so many steps."""
        self._steps = steps
        if self._bar is not None:
            self._bar.total = steps
            self._bar.refresh()

    def step(self, metrics: StepMetrics) -> None:
        """Keep one replica's figures of one step; print them if it is the first to report the step."""
        self._keep(metrics)
        if metrics.step > self._said:
            self._said = metrics.step
            self.say(line_of(metrics, self._steps, self._replicas))
        self._advance(metrics)
        scalars = {
            "loss/bits_per_byte": metrics.bits_per_byte,
            "speed/tokens_per_s": metrics.tokens_per_s,
            "speed/stall_s": metrics.stall_s,
            "replicas/participants": float(metrics.participants),
            "replicas/generation": float(metrics.generation),
            "update/grad_norm": metrics.grad_norm,
            "update/learning_rate": metrics.learning_rate,
        }
        for name, value in scalars.items():
            if value is not None:
                self._draw(f"{name}/r{metrics.replica}", value, metrics.step)

    def validation(self, metrics: ValidationMetrics) -> None:
        """Print and keep a validation loss."""
        self._keep(metrics)
        self.say(f"r{metrics.replica}      step {metrics.step}  validation {metrics.bits_per_byte:.4f} bits/byte")
        self._draw(f"loss/validation_bits_per_byte/r{metrics.replica}", metrics.bits_per_byte, metrics.step)

    def logged(self, line: Logged) -> None:
        """Keep and print what a user logged."""
        self._keep(line)
        figures = "  ".join(f"{name} {value:.6g}" for name, value in line.values.items())
        if line.what == Logged.VALIDATION:
            self.say(f"{line.rank}  step {line.step}  validation  {figures}")
        elif line.step > self._said:
            self._said = line.step
            of = f"participants {line.participants}/{self._replicas}  stall {line.stall_s:.3f} s"
            step = f"{line.step}/{self._steps}" if self._steps else f"{line.step}"
            self.say(f"{line.rank}  step {step}  {figures}  {line.seconds:.3f} s  {of}")
        for name, value in line.values.items():
            self._draw(f"{line.what}/{name}/r{line.replica}", value, line.step)

    def life(self, event: LifeEvent) -> None:
        """Say what happened to a replica, if a user wants to know."""
        if event.kind in _TOLD:
            why = f": {event.why}" if event.why and event.kind in _EXPLAINED else ""
            self.say(f"r{event.replica}      {event.kind.value.replace('_', ' ')} (incarnation {event.incarnation}){why}")

    def summary(self) -> None:
        """Say what `report.json` in the run's folder holds, and where the page is."""
        for line in summary_of(json.loads((self.folder / "report.json").read_text(encoding="utf-8"))):
            self.say(line)
        self.say(f"report: {self.folder / 'report.html'}")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def problem(self, what: str, error: BaseException) -> None:
        """Say on stderr that something of the output could not be written. Training does not depend on it."""
        said = str(error).strip().splitlines()
        print(f"{what} could not be written: {type(error).__name__}: {said[0] if said else ''}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Finish the files and take the bar away; idempotent. A file that cannot be written costs a message."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for what, file in (("metrics.jsonl", self._metrics), ("TensorBoard's files", self._board)):
            try:
                file.close()
            except Exception as error:
                self.problem(what, error)

    def _keep(self, metrics: StepMetrics | ValidationMetrics | Logged) -> None:
        """Into metrics.jsonl. What cannot be written is lost, and the first of a series of such lines is reported."""
        with self._tolerant("metrics.jsonl"):
            self._metrics.write(metrics.to_json() + "\n")

    def _draw(self, name: str, value: float, step: int) -> None:
        with self._tolerant("TensorBoard's files"):
            self._board.add_scalar(name, value, step)

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        try:
            yield
            self._unwritten.discard(what)
        except OSError as error:
            if what not in self._unwritten:
                self.problem(what, error)
            self._unwritten.add(what)

    def _advance(self, metrics: StepMetrics) -> None:
        if self._bar is not None and metrics.step > self._bar.n:
            if metrics.bits_per_byte is not None:
                self._bar.set_postfix_str(f"{metrics.bits_per_byte:.3f} bits/byte", refresh=False)
            self._bar.update(metrics.step - self._bar.n)


def line_of(metrics: StepMetrics, steps: int, replicas: int) -> str:
    """`r0.pp1  step  20/200  3.412 bits/byte  12,345 tokens/s  participants 2/2  stall 0.010 s`"""
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
    clean = not audit["gaps"] and not audit["repeats"]
    verdict = "nothing trained" if not audit["batches"] else "every batch exactly once" if clean else "NOT every batch once"
    hashes = {r["parameters_sha256"] for r in report["replicas"]}
    alike = "bitwise equal" if len(hashes) == 1 else "DIFFERENT" if hashes else "unknown"
    validation = "unknown" if reached is None else f"{reached:.4f} bits/byte"
    lines = [
        f"validation {validation}" + ("" if order0 is None else f", order-0 entropy of the corpus {order0:.4f}"),
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
    """A run that is resumed goes on in the same file, whose last line a kill may have cut."""
    if path.exists():
        text = path.read_bytes()
        os.truncate(path, text.rfind(b"\n") + 1)


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "ft", "the run's TensorBoard files") from error
    return SummaryWriter(str(folder), flush_secs=5)
