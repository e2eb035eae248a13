"""Random planning problems of folded pipelines, reproducible from a seed."""

from __future__ import annotations

from dataclasses import replace

from helixrt.schedule.costs import Costs, Link
from helixrt.schedule.ir import folded
from helixrt.schedule.planner.instances import random_instance


def random_folded_instance(seed: int) -> tuple[Costs, int]:
    """The same problem with every stage cut into two equal chunks, folded; the numbers are scaled to stay whole."""
    costs, microbatches = random_instance(seed)
    halves = costs.split(folded(costs.stages))
    whole = replace(
        halves,
        forward=tuple(2 * v for v in halves.forward),
        backward=tuple(2 * v for v in halves.backward),
        weight=tuple(2 * v for v in halves.weight),
        links={way: Link(2 * link.delay_ms, 2 * link.wire_ms) for way, link in costs.links.items()},
    )
    return whole, microbatches
