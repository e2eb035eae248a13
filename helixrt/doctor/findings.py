"""What `helixrt doctor` finds: one line each, and what stops working without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """`WARN`: works, but may surprise. `BAD`: broken, and what `needed_for` names cannot run."""

    ON = "on"
    OFF = "off"
    WARN = "warn"
    BAD = "bad"


class Need(StrEnum):
    """What stops working when a finding is off or bad."""

    JOB = "job"  # the main job, in local processes
    RAY_JOB = "ray job"  # the main job on Ray (`make train`)
    NOTHING = ""  # an option


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is empty when there is nothing to do."""

    name: str
    state: State
    detail: str
    fix: str = ""
    needed_for: Need = Need.NOTHING

    @property
    def works(self) -> bool:
        return self.state in (State.ON, State.WARN)
