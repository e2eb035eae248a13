"""A simulated world takes nothing from the machine's clock: else a process that waits for a core changes what a seed does."""

from __future__ import annotations

import itertools
import time
from typing import Any, Protocol

import pytest

from helixrt.emulate.collective_world import CollectiveWorld
from helixrt.emulate.handoff_world import HandOffWorld
from helixrt.emulate.link_world import LinkWorld
from helixrt.emulate.memory_world import MemoryWorld
from helixrt.emulate.path_world import PathWorld
from helixrt.emulate.step_world import StepWorld
from helixrt.emulate.verbs_world import VerbsWorld

SEEDS, LEAP_S = 40, 40.0


class World(Protocol):
    def __init__(self, seed: int) -> None: ...

    def run(self) -> Any: ...


@pytest.mark.parametrize(
    "world", [CollectiveWorld, HandOffWorld, LinkWorld, MemoryWorld, PathWorld, StepWorld, VerbsWorld], ids=lambda w: w.__name__
)
def test_a_seed_does_the_same_on_a_machine_whose_clock_leaps_at_each_look(
    world: type[World], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(seed, seed + SEEDS)
    expected = [world(each).run() for each in seeds]
    with monkeypatch.context() as patch:
        for name in ("monotonic", "time", "perf_counter"):
            leaps = itertools.count()
            patch.setattr(time, name, lambda leaps=leaps: LEAP_S * next(leaps))
        found = [world(each).run() for each in seeds]
    assert found == expected
