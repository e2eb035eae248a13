"""The simulator's result for a schedule: when each operation ran, and why stages were idle.

Made by `simulate.simulate`; drawn by the exchange formats. Times are in ms from the start of the step, memory in the
unit of the costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Entry, Operation, Schedule


class Cause(StrEnum):
    """Why a stage is idle."""

    WARM_UP = "warm-up"  # before its first operation
    DEPENDENCY = "dependency"  # an input is still being computed, or on its way over a slow link
    BLOCKING = "head-of-line blocking"  # its input or its own queue stands behind a slow message (direct only)
    COOL_DOWN = "cool-down"  # after its last operation


@dataclass(frozen=True, slots=True)
class Span:
    """One entry of a stage's list, from `start_ms` to `end_ms`."""

    entry: Entry
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Message:
    """The output of `operation` on its way from one stage to another.

    Ready when the operation ends, on the wire from `begin_ms`, there at `arrive_ms`.
    """

    operation: Operation
    source: int
    target: int
    ready_ms: float
    begin_ms: float
    arrive_ms: float


@dataclass(frozen=True, slots=True)
class Bubble:
    """A time in which a stage computes nothing, up to the makespan; `cause` and the entry that waited (None at the end)."""

    start_ms: float
    end_ms: float
    cause: Cause
    waiting: Entry | None


@dataclass(frozen=True)
class Timeline:
    """Exact timing of a schedule under costs. Everything per stage is in order of time.

    `memory[stage]` is a step function: (time, held from then on), starting at (0, 0).
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    messages: tuple[Message, ...]
    bubbles: tuple[tuple[Bubble, ...], ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def makespan_ms(self) -> float:
        return max((spans[-1].end_ms for spans in self.spans if spans), default=0.0)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Per stage, the most that is held at once."""
        return tuple(max(held for _, held in steps) for steps in self.memory)

    @property
    def bubble_rate(self) -> float:
        """The share of all stages' time in which they stand idle, 0 to 1."""
        total = self.makespan_ms * len(self.spans)
        busy = sum(span.end_ms - span.start_ms for spans in self.spans for span in spans)
        return 1.0 - busy / total if total else 0.0

    def bubble_ms(self) -> Mapping[Cause, float]:
        """Idle time of all stages together, by cause."""
        sums = dict.fromkeys(Cause, 0.0)
        for bubbles in self.bubbles:
            for bubble in bubbles:
                sums[bubble.cause] += bubble.end_ms - bubble.start_ms
        return sums
