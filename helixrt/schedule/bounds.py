"""What no schedule can beat: a lower bound for the makespan, and the smallest memory that will do.

In: costs and a number of micro-batches. Out: milliseconds, proven for every valid schedule of these costs, with
pairs and whole backwards, in any order of micro-batches, with delegated or direct communication.
"""

from __future__ import annotations

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Op, Operation, Pair

SLIP = 1e-9  # relative; sums of memory in floats may be off by this


def smallest_memory(costs: Costs) -> tuple[float, ...]:
    """Per stage, the smallest cap under which a schedule exists, in the costs' unit.

    A micro-batch's backward begins only after all of its forwards, so a stage holds at least one micro-batch in all of
    its chunks at once; and running one micro-batch at a time, with whole backwards, needs no more.
    """
    return tuple(
        sum(size for size, home in zip(costs.activation, costs.placement, strict=True) if home == stage)
        for stage in range(costs.stages)
    )


def check_reachable(costs: Costs) -> None:
    """Raise ConfigError for the first cap that no schedule fits, with the smallest that would do."""
    for stage, (least, cap) in enumerate(zip(smallest_memory(costs), costs.memory, strict=True)):
        if cap * (1 + SLIP) < least:
            raise ConfigError(f"memory[{stage}]", cap, f"no schedule fits; the smallest that would do is {least:g}")


def lower_bound(costs: Costs, microbatches: int) -> float:
    """No schedule of `microbatches` micro-batches finishes earlier than this many ms.

    For each stage: the earliest start of its first forward, all its work, and the shortest way from its last
    operation to the end of the step.
    """
    if microbatches < 1:
        raise ConfigError("microbatches", microbatches, "must be at least 1")
    least = _Least(costs)
    chunks = costs.chunks
    ahead = [0.0] * chunks  # earliest start of a chunk's first F
    for c in range(1, chunks):
        link = costs.link(costs.placement[c - 1], costs.placement[c])
        moving = link.delay_ms + link.wire_ms if costs.placement[c - 1] != costs.placement[c] else 0.0
        ahead[c] = ahead[c - 1] + least.forward[c - 1] + moving
    behind = [0.0] * chunks  # from the end of a chunk's last B to the end of the step, W apart
    for c in range(1, chunks):
        link = costs.link(costs.placement[c], costs.placement[c - 1])
        moving = link.delay_ms + link.wire_ms if costs.placement[c - 1] != costs.placement[c] else 0.0
        behind[c] = moving + max(behind[c - 1] + least.backward[c - 1], least.whole[c - 1])
    best = ahead[-1] + least.forward[-1] + max(behind[-1] + least.backward[-1], least.whole[-1])
    for stage in range(costs.stages):
        held = [c for c, home in enumerate(costs.placement) if home == stage]
        work = sum(costs.forward[c] + costs.backward[c] + costs.weight[c] for c in held) * microbatches
        work -= least.saved(held) * (microbatches - 1)
        # After the stage's last B, of whichever chunk, it has only W left, at most all of them.
        left = sum(costs.weight[c] for c in held) * microbatches
        tail = min(max(0.0, behind[c] - left) for c in held)
        best = max(best, min(ahead[c] for c in held) + work + tail)
    return best * (1 - 1e-12)


class _Least:
    """The least times of F, of B and of B and W together, per chunk, when the best pairs are at hand."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.forward, self.backward = list(costs.forward), list(costs.backward)
        self.whole = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)]
        self.gain: dict[tuple[int, int], float] = {}
        if not costs.pair_ms and costs.pair_factor >= 1.0:
            return
        for ahead, home in enumerate(costs.placement):
            for back in (c for c, stage in enumerate(costs.placement) if stage == home):
                for op in (Op.B, Op.BW):
                    pair = Pair(Operation(Op.F, ahead, 0), Operation(op, back, 0))
                    ms = costs.duration_ms(pair)
                    apart = costs.duration_ms(pair.forward) + costs.duration_ms(pair.backward)
                    self.gain[ahead, back] = max(self.gain.get((ahead, back), 0.0), apart - ms)
                    self.forward[ahead] = min(self.forward[ahead], ms)
                    self.backward[back] = min(self.backward[back], ms)
                    self.whole[back] = min(self.whole[back], ms + (costs.weight[back] if op is Op.B else 0.0))

    def saved(self, held: list[int]) -> float:
        """The most that pairs save a stage per micro-batch: each forward in the pair that saves most."""
        return sum(max((self.gain.get((a, b), 0.0) for b in held), default=0.0) for a in held)
