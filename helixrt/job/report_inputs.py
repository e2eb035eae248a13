"""What the report reads of a run's folder, bounded however long the run was and however many ranks it had.

In: `flight/*.jsonl` and `metrics.jsonl`. Out: the events of the ranks, and the figures of steps and validations.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from helixrt.job.metrics import StepMetrics, ValidationMetrics, read_metrics
from helixrt.observe.failures import replica_of
from helixrt.record import DETAIL, ROUTINE, Event, newest_events, read_events

_MOST_FIGURES = 200_000  # of steps that are loaded, of all replicas
_MOST_EVENTS = 1_000_000  # that each step writes, of `ROUTINE` and of `DETAIL` each, of all ranks
_MOST_METRICS_BYTES = 1 << 30  # of metrics.jsonl that are read
LARGE_BYTES = 1 << 30  # of more than that the driver prints a message before it writes the report
_PAGE = re.compile(r"(\.detail)?(\.old)?\.jsonl$")


def inputs_bytes(folder: Path) -> int:
    """How much lies in the run's folder for the report. Much of it is not read."""
    paths = (*folder.glob("flight/*.jsonl"), *folder.glob("metrics.jsonl"))
    return sum(path.stat().st_size for path in paths)


def read_flight(folder: Path, most: int = _MOST_EVENTS, replica: int | None = None) -> list[Event]:
    """The events of all ranks and lives, or of those of one replica, by time: all that are rare, and of each rank the newest of
    those that each step writes: of `ROUTINE` and of `DETAIL` `most` each, of all ranks together. Files of these are read from
    their end on, as far as that takes."""
    files: defaultdict[str, list[Path]] = defaultdict(list)  # of each rank
    for path in sorted(folder.glob("*.jsonl")):
        rank = path.name.partition(".inc")[0]
        if replica is None or replica_of(rank) == replica:
            files[rank].append(path)
    share = max(1, most // max(1, len(files)))
    events: list[Event] = []
    for paths in files.values():
        events += _of_rank(paths, share)
    return sorted(events, key=lambda e: e.end_s)


def _of_rank(paths: list[Path], newest: int) -> list[Event]:
    names = {path.name for path in paths}
    rare, routine, detail = list[Event](), list[Event](), list[Event]()
    for path in paths:
        story = _PAGE.sub(".story.jsonl", path.name)
        is_page = story in names and not path.name.endswith(".story.jsonl")  # what is rare is elsewhere
        for event in newest_events(path, newest) if is_page else read_events(path):
            (routine if event.kind in ROUTINE else detail if event.kind in DETAIL else rare).append(event)
        for many in (routine, detail):
            if len(many) > newest:
                many.sort(key=lambda e: e.end_s)  # numbers of incarnations begin again with each life of the run
                del many[:-newest]
    return [*rare, *routine, *detail]


@dataclass(frozen=True)
class RunMetrics:
    """`read_bytes` of the `bytes` of metrics.jsonl were read."""

    steps: tuple[StepMetrics, ...] = ()  # the newest of each (replica, step), in order of the step; of many each n-th step
    validations: tuple[ValidationMetrics, ...] = ()
    bytes: int = 0
    read_bytes: int = 0

    @property
    def sample(self) -> str:
        """What the report says of its charts; "" if all was read."""
        if self.read_bytes >= self.bytes:
            return ""
        part = f"{self.read_bytes / 1e9:.1f} of the {self.bytes / 1e9:.1f} GB of metrics.jsonl"
        return f"Sampled: {part} were read: its begin, its end, and parts at equal distances."


def run_metrics(path: Path, most_bytes: int = _MOST_METRICS_BYTES) -> RunMetrics:
    """A run that was resumed tells some steps twice: the later word counts. Of a file that is larger than `most_bytes` so much
    is read, at even distances."""
    if not path.exists():
        return RunMetrics()
    steps: dict[tuple[int, int], StepMetrics] = {}
    validations: dict[int, ValidationMetrics] = {}
    every = 1  # of a long run each so many steps, which a chart cannot tell from all
    size = path.stat().st_size
    for line in read_metrics(path, most_bytes):
        if isinstance(line, ValidationMetrics):
            validations[line.step] = line
        elif line.step % every == 0:
            steps[line.step, line.replica] = line
            if len(steps) > _MOST_FIGURES:
                every *= 2
                steps = {at: kept for at, kept in steps.items() if at[0] % every == 0}
    in_order = tuple(steps[k] for k in sorted(steps)), tuple(validations[k] for k in sorted(validations))
    return RunMetrics(*in_order, size, min(size, most_bytes))
