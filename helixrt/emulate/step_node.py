"""A simulated replica, what a run of the step world did, and the error of a broken invariant."""

from __future__ import annotations

from dataclasses import dataclass, field

from helixrt.emulate.step_store import Batch, State
from helixrt.protocol.step.machine import StepMachine


class Violation(AssertionError):
    """An invariant was broken; the message ends with the line that replays it."""


@dataclass(frozen=True)
class Verdict:
    """What a run did. `left_out` are replicas that some quorum went on without, or that were behind; `lost_steps` were
    superseded deeper than 1."""

    seed: int
    virtual_s: float
    events: int
    crashes: int
    generations: int
    superseded: int
    retried: int
    fetches: int
    repaired: int
    left_out: int
    waits: int
    lost_steps: int
    reloads: int
    held: int
    excluded: int
    not_applied: int
    sat_out: int
    lives: int
    stopped: int  # 1: a replica's program has ended the run early
    dropped: int = 0  # replicas whose copy of the log does not begin with the genesis any more
    switched: int = 0  # orders of schedules that records name, by replica
    remade: int = 0  # how often the store was lost and made again


@dataclass
class Node:
    """One replica's incarnation and all that a crash wipes out."""

    replica: int
    incarnation: int
    life: int
    machine: StepMachine
    state: State
    alive: bool = True
    paused_until: float = 0.0
    silent_since: float | None = None  # no heartbeat reached the membership service since
    work: tuple[str, int] | None = None
    gradients: bool = False
    waiting: list[tuple[int, int]] = field(default_factory=list)  # exchanges that wait for gradients
    reduced: dict[tuple[int, int], frozenset[Batch]] = field(default_factory=dict)
    generation: int = -1
    kept: dict[str, frozenset[Batch]] = field(default_factory=dict)
    offers: dict[str, State] = field(default_factory=dict)
    offered_reduced: tuple[str, frozenset[Batch]] = ("", frozenset())
    fetched: dict[str, State] = field(default_factory=dict)
