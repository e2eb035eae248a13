"""The figures of a step that a rank tells the driver, as one line of JSON each way.

In and out: `StepMetrics` (one per replica and step) and `ValidationMetrics`; ranks send them as text
through the run's store, the driver hands them to `RunOutput`, and `metrics.jsonl` keeps them. A `Notice`
travels the same way, and is printed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from helixrt.record import compact_encoder

BITS_PER_NAT = 1 / math.log(2)
_PARTS = 512  # of a long file that is not read whole


@dataclass(frozen=True)
class StepMetrics:
    """One update as one replica saw it. `loss_nats` is None where it caught up and contributed nothing."""

    replica: int
    rank: str  # the label of the rank that reports
    step: int
    loss_nats: float | None  # per byte, mean over the replica's batch
    tokens: int
    seconds: float  # since the replica's update before
    participants: int  # replicas whose gradients are in the update
    stall_s: float  # the rank had nothing to compute
    grad_norm: float
    learning_rate: float
    generation: int

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.loss_nats is None else self.loss_nats * BITS_PER_NAT

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> str:
        return _line("step", self)


@dataclass(frozen=True)
class ValidationMetrics:
    """Mean validation loss per byte of the state that a replica had after `step` updates."""

    replica: int
    step: int
    loss_nats: float
    tokens: int
    rank: str = ""  # the label of the ranks whose figure this is
    parts: int = 0  # that the validation was dealt over; 0: one replica has evaluated all
    partial: str = ""  # over which parts it was taken; "": over all

    @property
    def bits_per_byte(self) -> float:
        return self.loss_nats * BITS_PER_NAT

    def to_json(self) -> str:
        return _line("validation", self)


@dataclass(frozen=True)
class Logged:
    """What a user's loop or evaluation logged for the state after `step` updates; `what` is STEP or VALIDATION."""

    what: str
    replica: int
    rank: str
    step: int
    values: dict[str, float]
    seconds: float  # between the replica's newest two updates
    participants: int  # replicas whose gradients are in the update
    stall_s: float  # the rank had nothing to compute
    generation: int = 0  # of the record; 0 for a validation
    weight: float = 0.0  # of a validation that was shared: over so many items
    parts: int = 0  # that a validation was dealt over; 0: one replica has evaluated all
    partial: str = ""  # over which parts it was taken; "": over all

    STEP: ClassVar[str] = "step"
    VALIDATION: ClassVar[str] = "validation"

    def to_json(self) -> str:
        return _line("logged", self)


@dataclass(frozen=True)
class ValidationPart:
    """What a replica measured for a validation of the state of the record `lineage`: sums over `weight` items, of the part of
    replica `of` among those of the replicas `among`; without a weight means, of one replica for all. Joined by the driver
    (`shared_validation`)."""

    replica: int
    rank: str
    step: int
    lineage: str
    of: int
    among: list[int]
    sums: dict[str, float]
    weight: float | None

    def to_json(self) -> str:
        return _line("validation_part", self)


@dataclass(frozen=True)
class Notice:
    """Something for the console that is no figure: what could not be written, and that it was written later."""

    rank: str
    text: str

    def to_json(self) -> str:
        return _line("notice", self)


_ENCODE = compact_encoder()


def _line(kind: str, of: object) -> str:
    """The fields of a dataclass; none of them is a dataclass itself."""
    return _ENCODE({"kind": kind, **vars(of)})


MetricsLine = StepMetrics | ValidationMetrics | Logged | ValidationPart | Notice
_KINDS: dict[str, Callable[..., MetricsLine]] = {
    "step": StepMetrics,
    "validation": ValidationMetrics,
    "logged": Logged,
    "validation_part": ValidationPart,
    "notice": Notice,
}


def read_metrics_line(line: str) -> MetricsLine:
    """Inverse of `to_json`."""
    raw = json.loads(line)
    return _KINDS[raw.pop("kind")](**raw)


def ranks_of(replicas: Sequence[int]) -> str:
    """Whose figures: `r0-r3` for the replicas 0 to 3, `r0,r2` for two that do not stand side by side."""
    if len(replicas) > 1 and list(replicas) == list(range(replicas[0], replicas[-1] + 1)):
        return f"r{replicas[0]}-r{replicas[-1]}"
    return ",".join(f"r{replica}" for replica in replicas)


def read_metrics(path: Path, most_bytes: int | None = None) -> Iterator[StepMetrics | ValidationMetrics]:
    """The figures of the built-in job in a `metrics.jsonl`; a last line cut short is left out. Of a file that is larger than
    `most_bytes` the lines of its `spans` alone."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        for begin, end in spans(size, size if most_bytes is None else most_bytes):
            file.seek(begin)
            at = begin + (len(file.readline()) if begin > 0 else 0)  # from the first whole line on
            while at < end and (line := file.readline()).endswith(b"\n"):
                at += len(line)
                if isinstance(figures := read_metrics_line(line.decode()), StepMetrics | ValidationMetrics):
                    yield figures


def spans(size: int, most: int) -> list[tuple[int, int]]:
    """Parts of a file of `size` bytes, from where and up to where: all of it, or of a file that is larger than `most` so much:
    a quarter of that from its begin, another up to its end, and of what is between `_PARTS` parts at equal distances."""
    if size <= most:
        return [(0, size)]
    edge, part = most // 4, most // 2 // _PARTS
    begins = [edge + (size - 2 * edge) * number // _PARTS for number in range(_PARTS)]
    return [(0, edge), *((begin, begin + part) for begin in begins), (size - edge, size)]
