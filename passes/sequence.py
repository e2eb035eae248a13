"""In which order one strand issues its operators, and which of them may be put off.

In: a strand's operators, listed in an order that respects what they need. Out: candidate `Line`s of it. In each,
collectives are launched as soon as what they send is there, waits stand right before the first operator that needs
their result, and views follow what they look at (those of parameters and inputs come when they are needed: at the front
they would look like work on every layer). Candidates differ in the order of compute operators: as captured,
or those first that the longest chain hangs on, which puts other work of the strand behind its own collectives.

DHelix (section 4.2) enumerates the topological orders of one layer. Here the operators whose place matters, weight
gradients and routers (`Operator.movable`), are taken out of the line: the pairing search decides when each of them
runs, in the order in which they become ready. The rest has the few orders above.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from helixrt.passes.operators import COMMUNICATION, Kind, Operator
from helixrt.passes.timing import collective_of, tails_us


@dataclass(frozen=True)
class Line:
    """One order of a strand. `order` holds every operator; `fixed` and `deferred` share them out, in issue order.

    `deferred` are the movable operators, with views, launches and waits that serve them alone.
    """

    name: str
    operators: tuple[Operator, ...]
    order: tuple[int, ...]
    fixed: tuple[int, ...]
    deferred: tuple[int, ...]


def captured(operators: Sequence[Operator], *, reorder: bool = True) -> Line:
    """The order of the listing, with launches early and waits late. Without `reorder` nothing is deferred."""
    compute = [index for index, operator in enumerate(operators) if operator.kind is Kind.COMPUTE]
    return _line("captured", operators, compute, reorder)


def candidates(operators: Sequence[Operator], *, reorder: bool = True) -> tuple[Line, ...]:
    """The orders worth searching, the listing's own first."""
    first = captured(operators, reorder=reorder)
    second = _line("critical", operators, critical(operators), reorder)
    same = (second.fixed, second.deferred) == (first.fixed, first.deferred)
    return (first,) if same else (first, second)


def critical(operators: Sequence[Operator]) -> list[int]:
    """Compute operators in the order of a list schedule of the strand alone.

    Of the operators that need not wait for a collective, the one with the longest chain behind it goes first; no layer
    begins before the one before the last is finished, so that memory stays what it is.
    """
    tails = tails_us(operators)
    users = users_of(operators)
    missing = [len(set(operator.needs)) for operator in operators]
    ready_at = [0.0] * len(operators)
    ranks = layer_ranks(operators)
    left = [0] * (max(ranks, default=0) + 1)
    for operator, rank in zip(operators, ranks, strict=True):
        left[rank] += operator.kind is Kind.COMPUTE
    oldest, now = 0, 0.0
    lanes = dict.fromkeys(COMMUNICATION, 0.0)
    ready: list[int] = []
    order: list[int] = []

    def finish(index: int, end: float) -> None:
        """Mark done at `end`; everything but compute follows at once."""
        for user in users[index]:
            ready_at[user] = max(ready_at[user], end)
            missing[user] -= 1
            if not missing[user]:
                begin(user)

    def begin(index: int) -> None:
        operator = operators[index]
        if operator.kind is Kind.COMPUTE:
            ready.append(index)
        elif operator.kind in COMMUNICATION:
            lanes[operator.kind] = max(lanes[operator.kind], ready_at[index]) + operator.time_us
            finish(index, lanes[operator.kind])
        else:
            finish(index, ready_at[index])

    for index, operator in enumerate(operators):
        if not operator.needs:
            begin(index)
    while ready:
        while oldest < len(left) - 1 and not left[oldest]:
            oldest += 1
        allowed = [index for index in ready if ranks[index] <= oldest + 1] or ready
        chosen = min(allowed, key=lambda index: (max(ready_at[index], now), -tails[index], index))
        ready.remove(chosen)
        order.append(chosen)
        left[ranks[chosen]] -= 1
        now = max(now, ready_at[chosen]) + operators[chosen].time_us
        finish(chosen, now)
    return order


def users_of(operators: Sequence[Operator]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in operators]
    for index, operator in enumerate(operators):
        for need in set(operator.needs):
            users[need].append(index)
    return users


def layer_ranks(operators: Sequence[Operator]) -> list[int]:
    """For each operator how many layers of the strand were entered before its own, by first appearance.

    An operator of no layer counts to the one entered last.
    """
    ranks: dict[int, int] = {}
    found, last = [], 0
    for operator in operators:
        if operator.layer is not None:
            last = ranks.setdefault(operator.layer, len(ranks))
        found.append(last)
    return found


def _line(name: str, operators: Sequence[Operator], compute: Sequence[int], reorder: bool) -> Line:
    operators = tuple(operators)
    order = _placed(operators, compute)
    deferred = _deferred(operators, order) if reorder else set()
    fixed = tuple(index for index in order if index not in deferred)
    ready = _ready(operators, order, fixed, deferred)
    later = tuple(sorted((index for index in order if index in deferred), key=ready))
    return Line(name, operators, tuple(order), fixed, later)


def _placed(operators: Sequence[Operator], compute: Sequence[int]) -> list[int]:
    """Compute operators in the order given; launches and views as early, waits as late as they can be."""
    users = users_of(operators)
    missing = [len(set(operator.needs)) for operator in operators]
    placed = [False] * len(operators)
    order: list[int] = []

    def place(index: int) -> None:
        stack = [index]  # what `index` needs first; deep graphs would break recursion
        while stack:
            top = stack[-1]
            needs = [need for need in reversed(operators[top].needs) if not placed[need]]
            if placed[top] or not needs:
                stack.pop()
                if not placed[top]:
                    emit(top)
            else:
                stack.extend(needs)

    def emit(index: int) -> None:
        eager = [index]
        while eager:
            at = heapq.heappop(eager)
            placed[at] = True
            order.append(at)
            for user in users[at]:
                missing[user] -= 1
                if not missing[user] and operators[user].kind not in (Kind.COMPUTE, Kind.WAIT):
                    heapq.heappush(eager, user)

    for index, operator in enumerate(operators):
        if not operator.needs and operator.kind in COMMUNICATION:
            emit(index)
    for index in (*compute, *range(len(operators))):
        if not placed[index]:
            place(index)
    return order


def _deferred(operators: Sequence[Operator], order: Sequence[int]) -> set[int]:
    """Movable operators, and what can only run after them or serves them alone."""
    users = users_of(operators)
    deferred = {index for index, operator in enumerate(operators) if operator.movable and operator.kind is Kind.COMPUTE}
    for index in order:
        operator = operators[index]
        if operator.kind is Kind.FREE or operator.kind in COMMUNICATION:
            if any(need in deferred for need in operator.needs):
                deferred.add(index)
    for index in reversed(order):
        kind = operators[index].kind
        alone = bool(users[index]) and all(user in deferred for user in users[index])
        if kind is Kind.WAIT and (alone or (not users[index] and collective_of(operators, index) in deferred)):
            deferred.add(index)
        elif kind is Kind.FREE and alone:
            deferred.add(index)
    return deferred


def _ready(
    operators: Sequence[Operator], order: Sequence[int], fixed: Sequence[int], deferred: set[int]
) -> Callable[[int], int]:
    """Key: how far the fixed order must have come before a deferred operator can run; for a wait, before its user can."""
    position = {index: at + 1 for at, index in enumerate(fixed)}
    users = users_of(operators)
    reach: dict[int, int] = {}
    for index in order:
        if index in deferred:
            reach[index] = max((position.get(need, reach.get(need, 0)) for need in operators[index].needs), default=0)
    for index in reversed(order):
        if index in deferred and operators[index].kind in (Kind.WAIT, Kind.FREE):
            reach[index] = min((reach[user] for user in users[index] if user in deferred), default=reach[index])
    return reach.__getitem__
