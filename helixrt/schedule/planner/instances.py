"""Random planning problems, reproducible from a seed, on which planners are tested and compared.

In: a seed. Out: `Costs` and a number of micro-batches. 3 to 8 stages, 6 to 32 micro-batches; even seeds have
near-uniform costs (within a tenth, where the order matters most), odd seeds costs spread fourfold; delays on random
links, of up to three operations, equal or different both ways; caps of 1, 1.25, 1.5 and 2 times the peak of 1F1B, or
none. All times are whole milliseconds, so that solvers over integers are exact.
"""

from __future__ import annotations

import math
import random

from helixrt.schedule.costs import Costs, Link
from helixrt.schedule.ir import linear

CAPS = (1.0, 1.25, 1.5, 2.0, math.inf)


def random_instance(seed: int) -> tuple[Costs, int]:
    """(costs of one chunk per stage, micro-batches) of the seed; activations are held from F to W."""
    draw = random.Random(seed)
    stages, microbatches = draw.randint(3, 8), draw.randint(6, 32)
    low, high = (19, 21) if seed % 2 == 0 else (10, 40)
    forward, backward, weight = ([float(draw.randint(low, high)) for _ in range(stages)] for _ in range(3))
    links: dict[tuple[int, int], Link] = {}
    for stage in range(stages - 1):
        if draw.random() < 0.4:
            there, back = draw.randint(1, 60), draw.randint(1, 60)
            links[stage, stage + 1] = Link(float(there))
            links[stage + 1, stage] = Link(float(there if draw.random() < 0.5 else back))
    activation = [1.0] * stages
    if draw.random() < 0.25:
        activation = [float(draw.randint(2, 6)) for _ in range(stages)]
    peak = max(activation[stage] * min(stages - stage, microbatches) for stage in range(stages))
    cap = draw.choice(CAPS) * peak
    costs = Costs(
        placement=linear(stages),
        forward=tuple(forward),
        backward=tuple(backward),
        weight=tuple(weight),
        links=links,
        activation=tuple(activation),
        memory=(cap,) * stages,
    )
    return costs, microbatches
