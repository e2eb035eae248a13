"""Where a strand's line can be cut.

Two cuts of the same line. `segments` are DHelix's (section 4.2): between two barriers the strand is at rest, so a
collective is not separated from its wait, and a collective that runs behind compute of its own strand counts as one with
it. `steps` are finer: the places where it may pay to go over to the other strand, which are every launch, every wait
and, in between, stretches of compute of at least `grain_us`. The pairing search works on steps, the published one on
segments.

In: a `Line`. Out: tuples of operators, in issue order, and for steps what must have come before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from helixrt.passes.operators import COMMUNICATION, Kind
from helixrt.passes.sequence import Line, layer_ranks
from helixrt.passes.timing import collective_of


@dataclass(frozen=True, slots=True)
class Step:
    """Operators issued without a look at the other strand.

    `after` is how many steps of the strand's other part (fixed for a deferred step, deferred for a fixed one) must have
    been issued before, `needs` which steps of its own part. `rank` is the latest layer it works on, counted in the
    order of the strand.
    """

    operators: tuple[int, ...]
    after: int
    needs: frozenset[int]
    rank: int


@dataclass(frozen=True)
class Steps:
    """A line cut into steps. `finished[part][n]`: how many layers are done, as far as a part's first n steps tell."""

    line: Line
    fixed: tuple[Step, ...]
    deferred: tuple[Step, ...]
    layers: int
    finished: tuple[tuple[int, ...], tuple[int, ...]]


def segments(line: Line, grain_us: float = 0.0) -> tuple[tuple[int, ...], ...]:
    """The line between possible barriers; compute operators are joined until they take `grain_us`."""
    found: list[tuple[int, ...]] = []
    current: list[int] = []
    flying: set[int] = set()
    work = 0.0

    def cut() -> None:
        nonlocal work
        if current:
            found.append(tuple(current))
            current.clear()
            work = 0.0

    for index in line.order:
        operator = line.operators[index]
        if operator.kind in COMMUNICATION and not flying:
            cut()
        current.append(index)
        if operator.kind is Kind.COMPUTE:
            work += operator.time_us
        elif operator.kind in COMMUNICATION:
            flying.add(index)
        elif operator.kind is Kind.WAIT:
            flying.discard(collective_of(line.operators, index))
            if not flying:
                cut()
        if not flying and operator.kind is Kind.COMPUTE and work >= grain_us:
            cut()
    cut()
    return tuple(found)


def steps(line: Line, grain_us: float = 0.0, backlog: int = 1) -> Steps:
    """The line's two parts, cut into steps.

    No step of a layer is issued before all deferred ones of layers more than `backlog` before it, so that what they
    hold in memory is freed. With `grain_us` 0 every operator is a step.
    """
    ranks = layer_ranks(line.operators)
    fixed_at = {index: at + 1 for at, index in enumerate(line.fixed)}
    deferred_at = {index: at + 1 for at, index in enumerate(line.deferred)}
    ready = _needed(line, line.deferred, fixed_at)
    due = _needed(line, line.fixed, deferred_at)
    due = _kept_up(line, due, ready, ranks, backlog)
    fixed_cuts = list(_cut(line, line.fixed, due, ranks, grain_us))
    deferred_cuts = list(_cut(line, line.deferred, ready, ranks, grain_us))
    fixed = _steps(line, line.fixed, fixed_cuts, due, deferred_cuts, ranks)
    deferred = _steps(line, line.deferred, deferred_cuts, ready, fixed_cuts, ranks)
    layers = max(ranks, default=-1) + 1
    finished = _finished(fixed, ranks, layers), _finished(deferred, ranks, layers)
    return Steps(line, fixed, deferred, layers, finished)


def _needed(line: Line, part: Sequence[int], other_at: dict[int, int]) -> list[int]:
    """How many operators of the other part stand before each of this one, by what they need."""
    found, reach = [], 0
    for index in part:
        reach = max([reach, *(other_at.get(need, 0) for need in line.operators[index].needs)])
        found.append(reach)
    return found


def _kept_up(line: Line, due: Sequence[int], ready: Sequence[int], ranks: Sequence[int], backlog: int) -> list[int]:
    """`due`, with the rule that deferred operators stay at most `backlog` layers behind."""
    kept, reach = [], 0
    for at, index in enumerate(line.fixed):
        while reach < len(line.deferred) and ready[reach] <= at and ranks[line.deferred[reach]] < ranks[index] - backlog:
            reach += 1
        reach = max(reach, due[at])
        kept.append(reach)
    return kept


def _cut(line: Line, part: Sequence[int], after: Sequence[int], ranks: Sequence[int], grain_us: float) -> Iterator[int]:
    """Ends of the steps, as positions in the part."""
    work, last = 0.0, Kind.FREE
    for at, index in enumerate(part):
        operator = line.operators[index]
        turns = operator.kind is Kind.WAIT and last is not Kind.WAIT
        parts = at and (after[at] != after[at - 1] or ranks[index] != ranks[part[at - 1]])
        leaves = last in COMMUNICATION and operator.kind not in COMMUNICATION
        full = operator.kind is Kind.COMPUTE and 0.0 < grain_us <= work
        turns = (turns or leaves or full) and operator.kind is not Kind.FREE
        if at and (grain_us <= 0.0 or turns or parts):
            yield at
            work = 0.0
        work += operator.time_us if operator.kind is Kind.COMPUTE else 0.0
        if operator.kind is not Kind.FREE:
            last = operator.kind
    if part:
        yield len(part)


def _steps(
    line: Line, part: Sequence[int], cuts: Sequence[int], after: Sequence[int], other: Sequence[int], ranks: Sequence[int]
) -> tuple[Step, ...]:
    made: list[Step] = []
    step_of: dict[int, int] = {}
    begin = 0
    for end in cuts:
        operators = tuple(part[begin:end])
        before = bisect_left(other, after[begin]) + 1 if after[begin] else 0
        needs = frozenset(step_of[n] for index in operators for n in line.operators[index].needs if n in step_of)
        step_of.update(dict.fromkeys(operators, len(made)))
        made.append(Step(operators, before, needs, max(ranks[index] for index in operators)))
        begin = end
    return tuple(made)


def _finished(part: Sequence[Step], ranks: Sequence[int], layers: int) -> tuple[int, ...]:
    left = [0] * layers
    for step in part:
        for index in step.operators:
            left[ranks[index]] += 1
    done, found = 0, []
    for operators in ((), *(step.operators for step in part)):
        for index in operators:
            left[ranks[index]] -= 1
        while done < layers and not left[done]:
            done += 1
        found.append(done)
    return tuple(found)
