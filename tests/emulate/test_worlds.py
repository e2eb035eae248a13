"""What holds for each simulated world: no seed breaks a promise, a violation prints the line that replays it, no clock is read.

In: the worlds, with how many seeds each commit runs, what must come up in them, and a limit that ends a run too early.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest

from helixrt.emulate import (
    collective_world,
    handoff_world,
    link_world,
    memory_world,
    path_world,
    step_node,
    step_world,
    verbs_world,
)
from helixrt.emulate.seeded import Violation
from tests.emulate import test_collective_world, test_step_world
from tests.emulate.sweeps import SWEEP_LIMIT_S, SWEEP_SEEDS, SweepOf, sweep_all

CLOCK_SEEDS, LEAP_S = 40, 40.0


@dataclass(frozen=True)
class Case:
    """`seeds`: of each commit. `hard_cases`: fields of the verdict that must come up. `short`: a limit of the world, a value
    that is too small for this seed, and the options of the line that replays the violation."""

    world: type
    seeds: int
    hard_cases: tuple[str, ...]
    make: Callable[[int], Any] | None = None
    violation: type[Exception] = Violation
    short: tuple[str, float, int, str] | None = None

    @property
    def sweep(self) -> SweepOf:
        return SweepOf(self.make or self.world, self.hard_cases, self.violation)


def names(verdict: Any, first: int) -> tuple[str, ...]:
    return tuple(field.name for field in fields(verdict)[first:])


IN_PATHS = tuple(name for name in names(path_world.PathVerdict, 4) if name != "blocked")  # no connection is full there
CASES = [
    Case(link_world.LinkWorld, 200, names(link_world.Verdict, 4), short=("link_world.END_S", 0.01, 3, " --text")),
    Case(path_world.PathWorld, 80, IN_PATHS, short=("link_world.END_S", 0.02, 3, " --text")),
    Case(verbs_world.VerbsWorld, 300, names(verbs_world.Verdict, 2), short=("verbs_world.STEPS", 10, 3, "")),
    Case(memory_world.MemoryWorld, 600, names(memory_world.Verdict, 2), short=("memory_world.STEPS", 2, 35, "")),
    Case(handoff_world.HandOffWorld, 400, names(handoff_world.Verdict, 2), short=("threads.STEPS", 5, 35, "")),
    Case(collective_world.CollectiveWorld, 120, test_collective_world.HARD_CASES, test_collective_world.world),
    Case(step_world.StepWorld, 250, test_step_world.HARD_CASES, test_step_world.world, step_node.Violation),
]
each_world = pytest.mark.parametrize("case", CASES, ids=lambda case: case.world.__name__)


@pytest.mark.system
@each_world
def test_many_seeds(case: Case, seed: int) -> None:
    sweep_all(case.sweep, seed, case.seeds, case.hard_cases)


@pytest.mark.slow
@pytest.mark.timeout(SWEEP_LIMIT_S)
@each_world
def test_thousands_of_seeds(case: Case, sweep_part: int, seed: int) -> None:
    sweep_all(case.sweep, seed, SWEEP_SEEDS, case.hard_cases)


@pytest.mark.parametrize("case", [case for case in CASES if case.short], ids=lambda case: case.world.__name__)
def test_a_violation_prints_the_line_that_replays_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case.short is not None
    name, value, seed, options = case.short
    monkeypatch.setattr(f"helixrt.emulate.{name}", value)
    with pytest.raises(Violation) as first:
        case.world(seed).run()
    line, module = str(first.value).split("; replay: ")[1], case.world.__module__
    assert line == f"python -m {module} --seed {seed}{options}"
    with pytest.raises(Violation) as again:
        importlib.import_module(module).main(line.split()[3:])
    assert str(again.value) == str(first.value)


@pytest.mark.system
@each_world
def test_a_seed_replays_exactly_also_on_a_machine_whose_clock_leaps_at_each_look(
    case: Case, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process that waits for a core changes what a seed does."""
    seeds = range(seed, seed + CLOCK_SEEDS)
    expected = [case.world(each).run() for each in seeds]
    with monkeypatch.context() as patch:
        for name in ("monotonic", "time", "perf_counter"):
            leaps = itertools.count()
            patch.setattr(time, name, lambda leaps=leaps: LEAP_S * next(leaps))
        found = [case.world(each).run() for each in seeds]
    assert found == expected
