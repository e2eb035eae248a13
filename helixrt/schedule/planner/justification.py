"""Lists forwards and backwards in time, each made by the ends of the one before.

In: costs and a number of micro-batches. Out: the best order met. A list made backwards in time puts every operation as
late as it can come, so what ends late there may wait here: those ends are the priorities of the next list forwards, and
the other way round (Li and Willis, "An iterative scheduling technique for resource-constrained project scheduling",
EJOR 1992). The first sweeps begin with priorities by kind, as ADAPTRA's Algorithm 4 has them; later ones with the best
priorities met, every lane shifted and every operation disturbed at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from helixrt.schedule.costs import Costs
from helixrt.schedule.planner.lanes import TOLERANCE, Form, Lanes, Order
from helixrt.schedule.planner.list_scheduling import Priority, dispatch

PATIENCE = (0.5, 0.9, 0.0, 0.3)  # of the first sweeps; see `dispatch`
SPARE = (0.5, 0.75, 1.0, None)  # with more chunks per stage, of the first sweeps; see `_shares`
ROUNDS = 2  # lists in each direction per sweep
SHIFT, NOISE = 1.0, 0.5  # standard deviations in mean operation times: of a lane, of each operation
LIST_COST = 8  # work counted per operation of a list, in operations timed in a fixed order


class Justifier:
    """Makes lists of one problem. `best_ms` and `best` are the best order so far: infinite and empty before the first.

    `exact_ms(order)` returns an order's makespan. It is asked for lists made backwards where messages take time on the
    wire: which one goes first on a link is not known backwards.
    """

    def __init__(
        self, costs: Costs, microbatches: int, exact_ms: Callable[[Lanes, Order], float], draw: random.Random, form: Form
    ) -> None:
        self.problem = Lanes.of(costs, microbatches, form=form)
        self.cost = 2 * ROUNDS * LIST_COST * self.problem.operations  # work of one sweep
        self.best_ms = math.inf
        self.best: Order = []
        self._back = Lanes.of(costs, microbatches, mirrored=True, form=form)
        self._exact_ms, self._draw = exact_ms, draw
        self._good: Priority = ()
        several = math.isfinite(min(self.problem.cap)) and self.problem.chunks > self.problem.stages
        spares = SPARE if several else SPARE[-1:]
        self._shares = [_shares(self.problem, spare) if spare is not None else [] for spare in spares]
        self._share = self._good_share = self._shares[0]
        self.first = len(PATIENCE) * len(self._shares)  # sweeps until every beginning has been tried
        self._swept = 0

    def run(self, bound_ms: float, work: float) -> None:
        """Sweep until the bound is met or the work would not do for another sweep; at least once if there is no order yet."""
        while self.best_ms > bound_ms * (1 + TOLERANCE) and (work >= self.cost or not self._swept):
            early = self._swept < self.first or not self.best
            turned = self._swept // len(PATIENCE) % len(self._shares)
            self._share = self._shares[turned] if early else self._good_share
            patience = PATIENCE[self._swept % len(PATIENCE)] if early else self._draw.choice(PATIENCE[:2])
            priority: Priority | None = _by_kind(self.problem) if early else self._disturbed()
            for turn in range(2 * ROUNDS):
                if priority is None or self.best_ms <= bound_ms * (1 + TOLERANCE):
                    break
                priority = self._backwards(priority, patience) if turn % 2 else self._forwards(priority, patience)
            self._swept += 1
            work -= self.cost

    def offer(self, makespan_ms: float, order: Order) -> None:
        """An order of this problem from elsewhere; where messages take time on the wire its makespan may be an estimate."""
        if any(self.problem.wire):
            makespan_ms = self._exact_ms(self.problem, order)
        if makespan_ms < self.best_ms:
            self.best_ms, self.best = makespan_ms, order

    def _forwards(self, priority: Priority, patience: float) -> Priority | None:
        listed = dispatch(self.problem, priority, patience, self._share)
        if listed is None:
            return None
        if listed.makespan_ms <= self.best_ms:
            self.best_ms, self.best, self._good = listed.makespan_ms, listed.order, priority
            self._good_share = self._share
        return _mirror(listed.ends)

    def _backwards(self, priority: Priority, patience: float) -> Priority | None:
        listed = dispatch(self._back, priority, patience, self._share)
        if listed is None:
            return None
        ahead = _mirror(listed.ends)
        if listed.makespan_ms <= self.best_ms:
            order = [codes[::-1] for codes in listed.order]
            wired = any(self.problem.wire)
            makespan_ms = self._exact_ms(self.problem, order) if wired else listed.makespan_ms
            if makespan_ms <= self.best_ms:
                self.best_ms, self.best, self._good = makespan_ms, order, ahead
                self._good_share = self._share
        return ahead

    def _disturbed(self) -> Priority:
        unit = sum(self.problem.duration) / self.problem.lanes
        draw = self._draw.gauss
        shifts = [draw(0.0, SHIFT * unit) for _ in self._good]
        return [
            [value + shift + draw(0.0, NOISE * unit) for value in lane] for shift, lane in zip(shifts, self._good, strict=True)
        ]


def _by_kind(problem: Lanes) -> Priority:
    """B before F before W, and older micro-batches before newer ones; of one micro-batch, the later chunk."""
    chunks, count = problem.chunks, problem.microbatches
    rank = (1, 0, 2)
    return [
        [float((rank[lane // chunks] * count + m) * chunks - lane % chunks) for m in range(count)]
        for lane in range(problem.lanes)
    ]


def _shares(problem: Lanes, spare: float) -> list[float]:
    """The most memory each chunk may hold: of its stage's cap in proportion to how long it holds it, and `spare` more.

    In steady state a chunk holds its activations for the way to the end of the model and back, one micro-batch every
    period (Little's law), so no other division of a cap lets micro-batches follow each other faster. Left to
    themselves the first chunks take what the last ones need. `spare` is in activations of the chunk.
    """
    chunks, duration = problem.chunks, problem.duration
    whole = [max(problem.take[lane] for lane in range(c, problem.lanes, chunks)) for c in range(chunks)]
    span, way_ms = [0.0] * chunks, 0.0
    for c in reversed(range(chunks)):
        for lane in (c + 1, chunks + c) if c + 1 < chunks else ():
            way_ms += problem.latency[lane] + problem.wire[lane]
        way_ms += duration[c] + duration[chunks + c]
        span[c] = whole[c] * (way_ms + (0.0 if problem.fused else duration[2 * chunks + c]))
    total = [0.0] * problem.stages
    for c in range(chunks):
        total[problem.stage[c]] += span[c]
    found = []
    for c, stage in enumerate(problem.stage[:chunks]):
        part = problem.cap[stage] * span[c] / total[stage] if span[c] else 0.0
        found.append(max(whole[c], part + spare * whole[c]) * (1 + TOLERANCE))
    return found


def _mirror(ends: list[list[float]]) -> Priority:
    """What ends last in one direction of time goes first in the other."""
    return [[-end for end in reversed(lane)] for lane in ends]
