"""Pairing: two strands merged into one issue order, so that each hides its communication behind the other.

DHelix, section 4.2, over the whole stage's graphs. Candidate lines of both strands (`sequence`) are cut into steps
(`segment`) and merged by dynamic programming (`search`); the best order found, the published search and the simpler
policies of `baselines` are timed by the same model (`timing`), and the fastest is taken, so that a pairing is never
slower than any of them by its prediction.

In: a forward of one micro-batch, a backward of another, measured overlap. Out: a `Pairing`. Equal inputs give equal
orders; ranks whose measurements differ must agree on one rank's before they pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from helixrt.errors import ConfigError
from helixrt.passes.baselines import BASELINES
from helixrt.passes.operators import COMMUNICATION, Kind, Operator, Overlap
from helixrt.passes.search import Problem, issue_order, search
from helixrt.passes.segment import steps
from helixrt.passes.sequence import candidates
from helixrt.passes.timing import BACKWARD, FORWARD, Place, Slowdowns, Span, Timing, bound_us, simulate, work_us

STRANDS = ("forward", "backward")
POLICIES = (*BASELINES, "helix")
CLOSE = 1.0005  # of the bound: no further search
WEIGHTS = (0.1, 0.001)  # of idle lanes against the bound, see `search`
WIDE = 2  # how many of the narrow searches are repeated wide


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a pairing may do.

    `ahead`: layers the forward may be ahead of what the backward has released. `backlog`: layers that movable operators
    may stay behind. `reorder`: whether movable operators move. `cross`: whether communication inside a node may run
    beside communication between nodes. `labels`: how many labels one run of the search may look at; time goes with it.
    """

    ahead: int = 1
    backlog: int = 1
    reorder: bool = True
    cross: bool = True
    labels: int = 40_000

    def __post_init__(self) -> None:
        for key, least in (("ahead", 0), ("backlog", 0), ("labels", 1)):
            if getattr(self, key) < least:
                raise ConfigError(f"strands.{key}", getattr(self, key), f"at least {least}")


@dataclass(frozen=True, slots=True)
class Pair:
    """A collective and what it hides behind: operators of either strand that kept the processor busy meanwhile, and
    the collectives of the other lane. `exposed_us` is how long the processor waited for it."""

    collective: Place
    behind: tuple[Place, ...]
    beside: tuple[Place, ...]
    hidden_us: float
    exposed_us: float


@dataclass(frozen=True)
class Pairing:
    """An issue order of both strands: (strand, operator), strand 0 the forward and 1 the backward.

    `policy` made the order (of `POLICIES`). `bound_us`: no order takes less. `sequential_us`: one strand after the
    other, as captured.
    """

    policy: str
    order: tuple[Place, ...]
    timing: Timing
    pairs: tuple[Pair, ...]
    sequential_us: float
    bound_us: float
    compute_us: float
    communication_us: float

    @property
    def predicted_us(self) -> float:
        return self.timing.total_us

    @property
    def hidden_us(self) -> float:
        """Communication behind which the processor worked or other communication ran."""
        return self.communication_us - self.timing.stalled_us

    @property
    def hidden_share(self) -> float:
        """Of the time a perfect plan would save, the share that is saved (1 where there is nothing to save)."""
        most = self.sequential_us - self.bound_us
        return 1.0 if most <= 0.0 else (self.sequential_us - self.predicted_us) / most


def pair(forward: Sequence[Operator], backward: Sequence[Operator], overlap: Overlap, rules: Rules | None = None) -> Pairing:
    """The fastest order found. Raises VerifyError when a strand is not listed in an order that respects its needs."""
    rules = rules or Rules()
    strands = tuple(forward), tuple(backward)
    bound = bound_us(strands, overlap)
    best = baseline("sequential", *strands, overlap, rules)
    for variant in _variants(strands, rules):
        if best.predicted_us <= bound * CLOSE:
            break
        for order in _searched(strands, overlap, variant, bound):
            timing = simulate(strands, order, overlap)
            if timing.total_us < best.predicted_us:
                best = _pairing("helix", strands, order, timing, bound, best.sequential_us)
    for policy in BASELINES:
        if best.predicted_us > bound * (1.0 + 1e-9) and policy != "sequential":
            other = baseline(policy, *strands, overlap, rules)
            best = other if other.predicted_us < best.predicted_us else best
    return best


def baseline(
    policy: str, forward: Sequence[Operator], backward: Sequence[Operator], overlap: Overlap, rules: Rules | None = None
) -> Pairing:
    """The order of a simpler policy, or of the published search. Raises ConfigError for a policy that is not known."""
    if policy not in BASELINES:
        raise ConfigError("strands.policy", policy, "one of " + ", ".join(BASELINES))
    strands = tuple(forward), tuple(backward)
    order = BASELINES[policy](*strands, overlap, (rules or Rules()).ahead)
    listed = simulate(strands, BASELINES["sequential"](*strands, overlap, 0), overlap).total_us
    return _pairing(policy, strands, order, simulate(strands, order, overlap), bound_us(strands, overlap), listed)


def retimed(
    pairing: Pairing, forward: Sequence[Operator], backward: Sequence[Operator], order: Sequence[Place], overlap: Overlap
) -> Pairing:
    """`pairing` with another order (one that a later pass made of its own). Raises VerifyError as `simulate` does."""
    strands = tuple(forward), tuple(backward)
    timing = simulate(strands, order, overlap)
    return replace(pairing, order=tuple(order), timing=timing, pairs=_pairs(strands, timing))


def _variants(strands: tuple[Sequence[Operator], ...], rules: Rules) -> list[Rules]:
    """The rules, and stricter ones: a search that does not count on both lanes at once sometimes uses them better."""
    kinds = {operator.kind for strand in strands for operator in strand}
    both = rules.cross and kinds >= COMMUNICATION
    return [rules, replace(rules, cross=False, labels=max(rules.labels // 2, 1))] if both else [rules]


def _searched(strands: tuple[Sequence[Operator], ...], overlap: Overlap, rules: Rules, bound: float) -> list[list[Place]]:
    """Orders found: narrow searches of every pair of candidate lines in several manners, and wide ones of the best.

    No manner is best everywhere, and what a long stage loses in each layer adds up, so variety pays more than width.
    """
    planned = strands if rules.cross else tuple(tuple(map(_one_lane, strand)) for strand in strands)
    slowdowns = Slowdowns(planned, overlap)
    grain = _grain_us(planned)
    cuts = [[steps(line, grain, rules.backlog) for line in candidates(s, reorder=rules.reorder)] for s in planned]
    problems = [Problem(f, b, slowdowns, rules.ahead) for f in cuts[FORWARD] for b in cuts[BACKWARD]]
    narrow: list[tuple[float, int, _Run, list[tuple[int, int]]]] = []
    for problem in problems:
        for weight, hold in itertools.product(WEIGHTS, (False, True) if len(problem.tracks[3]) > 1 else (False,)):
            time, found = search(problem, max(_width(problem, rules) // 3, 4), weight=weight, hold=hold)
            narrow.append((time, len(narrow), _Run(problem, weight, hold), found))
            if time <= bound * CLOSE:
                return [issue_order(problem, found)]
    narrow.sort(key=lambda run: run[:2])
    best_us, _, run, found = narrow[0]
    orders = [issue_order(run.problem, found)]
    for _, _, run, _ in narrow[:WIDE]:
        time, found = search(
            run.problem, max(_width(run.problem, rules), 12), weight=run.weight, hold=run.hold, best_us=best_us
        )
        if found:
            best_us = time
            orders.append(issue_order(run.problem, found))
    return orders


@dataclass(frozen=True)
class _Run:
    """A manner to search a problem."""

    problem: Problem
    weight: float
    hold: bool


def _width(problem: Problem, rules: Rules) -> int:
    return rules.labels // max(sum(map(len, problem.tracks)), 1)


def _one_lane(operator: Operator) -> Operator:
    return replace(operator, kind=Kind.INTRA) if operator.kind is Kind.INTER else operator


def _grain_us(strands: Sequence[Sequence[Operator]]) -> float:
    """Compute that need not be cut further: a sixth of a collective, or of the time between two; never so fine that a
    long stage has too many steps."""
    times = [operator.time_us for strand in strands for operator in strand if operator.kind in COMMUNICATION]
    compute = sum(operator.time_us for strand in strands for operator in strand if operator.kind is Kind.COMPUTE)
    if not times:
        return compute
    return max(min(sum(times), compute) / len(times) / 6.0, compute / 4000.0, 1e-9)


def _pairing(
    policy: str, strands: tuple[Sequence[Operator], ...], order: Sequence[Place], timing: Timing, bound: float, listed: float
) -> Pairing:
    operators = [operator for strand in strands for operator in strand]
    talk = sum(operator.time_us for operator in operators if operator.kind in COMMUNICATION)
    compute = sum(map(work_us, operators))
    return Pairing(policy, tuple(order), timing, _pairs(strands, timing), listed, bound, compute, talk)


def _pairs(strands: Sequence[Sequence[Operator]], timing: Timing) -> tuple[Pair, ...]:
    found = []
    spans = timing.processor
    first = 0
    for span in timing.network:
        while first < len(spans) and spans[first].end_us <= span.start_us:
            first += 1
        behind: list[Place] = []
        busy = waiting = 0.0
        for at in range(first, len(spans)):
            other = spans[at]
            if other.start_us >= span.end_us:
                break
            shared = min(other.end_us, span.end_us) - max(other.start_us, span.start_us)
            if other.kind is Kind.WAIT:
                waiting += shared
            elif other.kind is Kind.COMPUTE and shared > 0.0:
                behind.append(other.place)
                busy += shared
        beside = tuple(other.place for other in timing.network if _beside(span, other))
        found.append(Pair(span.place, tuple(behind), beside, busy, waiting))
    return tuple(found)


def _beside(span: Span, other: Span) -> bool:
    return other.kind is not span.kind and other.start_us < span.end_us and span.start_us < other.end_us
