"""Many seeds of a simulated world on all cores: none may break a promise, and the hard cases must happen.

Every run of the tests draws other seeds (`--seed`). Each commit sees as many as fit into some ten seconds of two cores; the
bulk is `slow`, in parts of which each takes half a minute there.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Sequence

Sweep = Callable[[range], tuple[Counter[str], list[str]]]  # seeds -> what happened, and violations; of a module's top level
SWEEP_LIMIT_S = 400  # of one slow part, on a busy machine


def sweep_all(sweep: Sweep, first: int, count: int, hard_cases: Sequence[str]) -> None:
    """Each of `hard_cases` must come up more than once in a hundred seeds: without them a sweep is worth nothing."""
    parts = [range(first + i, first + count, 32) for i in range(32)]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        results = pool.map(sweep, parts, chunksize=1)
    violations = [v for _, found in results for v in found]
    assert not violations, f"{len(violations)} of {count} seeds:\n" + "\n".join(violations[:5])
    totals: Counter[str] = sum((t for t, _ in results), Counter())
    print(f"{count} seeds from {first}: {dict(totals)}")
    for what in hard_cases:
        assert totals[what] > count / 100, (what, totals)
