"""Many seeds of a simulated world on all cores: none may break a promise, and the hard cases must happen.

Every run of the tests draws other seeds (`--seed`). Each commit runs about ten seconds of processor time of each world; the
bulk is `slow`, in parts of SWEEP_SEEDS seeds. How many seeds of each world the slow tests run is an option (`--seeds 20000`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.ranks_context import ranks_context

Sweep = Callable[[range], tuple[Counter[str], list[str]]]  # seeds -> what happened, and violations; of a module's top level
RATED_SEEDS = 1_000  # from so many on the rate of a hard case is checked
MOST_TIMES = 5
SWEEP_SEEDS = 1_250  # of one slow part
SWEEP_LIMIT_S = 480  # of one slow part, on a busy machine
LOW_PRIORITY = 10  # its processes take what the tests beside them leave, which have deadlines in real time


@dataclass(frozen=True)
class SweepOf:
    """A Sweep of `world(seed).run()`, whose verdicts have a field for each hard case.

    Processes get it pickled: `world` is a function or a class of a module's top level.
    """

    world: Callable[[int], Any]
    hard_cases: tuple[str, ...]
    violation: type[Exception]

    def __call__(self, seeds: range) -> tuple[Counter[str], list[str]]:
        totals: Counter[str] = Counter()
        violations = []
        for seed in seeds:
            try:
                verdict = self.world(seed).run()
            except self.violation as found:
                violations.append(str(found))
            else:
                totals.update({what: getattr(verdict, what) for what in self.hard_cases})
        return totals, violations


def sweep_all(sweep: Sweep, first: int, count: int, hard_cases: Sequence[str]) -> None:
    """Each of `hard_cases` must come up: in a slow part more than once in a hundred seeds, in fewer seeds at least once.

    A rate of one in a hundred cannot be told from chance in a few hundred seeds. What has not come up often enough may come up
    in more seeds: up to MOST_TIMES as many.
    """
    swept, totals = 0, Counter[str]()
    with ranks_context().Pool(os.cpu_count(), os.nice, (LOW_PRIORITY,)) as pool:
        for _ in range(MOST_TIMES if count < RATED_SEEDS else 2):
            parts = [range(first + swept + i, first + swept + count, 32) for i in range(32)]
            results = pool.map(sweep, parts, chunksize=1)
            swept += count
            violations = [v for _, found in results for v in found]
            assert not violations, f"{len(violations)} of {swept} seeds:\n" + "\n".join(violations[:5])
            totals = sum((t for t, _ in results), totals)
            print(f"{swept} seeds from {first}: {dict(totals)}")
            rare = [what for what in hard_cases if totals[what] <= (swept / 100 if count >= RATED_SEEDS else 0)]
            if not rare:
                return
    pytest.fail(f"{rare} in {swept} seeds: {totals}")
