"""Activation memory of a schedule: what every stage holds before, during and after each entry of its list.

In: a schedule and its costs. Out: amounts in the costs' unit. They depend on the order alone, not on time: a forward's
activation is there from its start, B turns it into what W still needs when it ends, W frees that when it ends (see
`costs.Costs`). So a forward may start at the very instant at which a W ends without the two being held at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Op, Schedule, operations_of


def held(schedule: Schedule, costs: Costs, stage: int) -> Iterator[tuple[float, float]]:
    """Per entry of the stage's list: (held from its start, held from its end).

    Amounts are counted, never added up, so that they do not drift: equal states give equal numbers.
    """
    whole = dict.fromkeys(schedule.held[stage], 0)  # forwards whose activation is there in full, by chunk
    rest = dict.fromkeys(schedule.held[stage], 0)  # backwards whose W is still to come, where W needs less or more

    def total() -> float:
        return sum(n * costs.activation[c] for c, n in whole.items()) + sum(n * costs.kept[c] for c, n in rest.items())

    now = 0.0
    for entry in schedule.entries[stage]:
        operations = operations_of(entry)
        for operation in operations:
            if operation.op is Op.F:
                whole[operation.chunk] += 1
                now = total()
        at_start = now
        for operation in operations:
            chunk = operation.chunk
            if operation.op is Op.F or (operation.op is Op.B and costs.kept[chunk] == costs.activation[chunk]):
                continue
            if operation.op is Op.B:
                whole[chunk] -= 1
                rest[chunk] += 1
            elif operation.op is Op.BW or costs.kept[chunk] == costs.activation[chunk]:
                whole[chunk] -= 1
            else:
                rest[chunk] -= 1
            now = total()
        yield at_start, now


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Per stage, the most that is held at once, in the costs' unit."""
    return tuple(max((max(pair) for pair in held(schedule, costs, s)), default=0.0) for s in range(schedule.stages))
