"""The schedule of a pass without backward: evaluation.

In: a placement and the number of micro-batches. Out: a forward-only schedule of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from helixrt.schedule.ir import Op, Operation, Schedule


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Forwards alone, each in the order of the first moment it could run if all took one unit of time.

    Of a stage's operations that could begin at the same moment, the one further down the model goes first:
    others wait for what it gives. An operation stands after all that it needs in one order of the whole pipeline, so
    nothing can block.
    """
    order = sorted(
        (Operation(Op.F, chunk, m) for chunk in range(len(placement)) for m in range(microbatches)),
        key=lambda o: (o.chunk + o.microbatch, -o.chunk),
    )
    stages = max(placement) + 1
    entries = tuple(tuple(o for o in order if placement[o.chunk] == stage) for stage in range(stages))
    return Schedule("forward_only", stages, microbatches, tuple(placement), entries)
