"""The conditions under which one call of a collective is measured: what each rank does before it.

A collective that follows another finds all threads awake. In training it follows compute, or it is the first after a pause;
then each side must be woken, and the ranks do not begin at the same moment.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

PAUSE_S = 0.003  # of compute or of idle time before a call
_DIM = 128


class Condition(enum.Enum):
    BACK_TO_BACK = "back_to_back"
    """Nothing: the call before has just returned."""
    AFTER_COMPUTE = "after_compute"
    """PAUSE_S of matrix products on each rank; no rank waits for another."""
    FROM_IDLE = "from_idle"
    """PAUSE_S of sleep, then a barrier of Gloo."""

    @property
    def prepares(self) -> bool:
        return self is not Condition.BACK_TO_BACK


def preparation(condition: Condition) -> Callable[[], None]:
    """What a rank calls before each measured call. `AFTER_COMPUTE` is calibrated here, to PAUSE_S on this machine.

    The number of products is fixed then: on a busy machine they take longer, as compute does.
    """
    if condition is Condition.FROM_IDLE:
        return _idle
    if condition is Condition.BACK_TO_BACK:
        return _nothing
    square = torch.full((_DIM, _DIM), 1.0 / _DIM)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        torch.mm(square, square)
        times.append(time.perf_counter() - begin)
    products = max(1, round(PAUSE_S / sorted(times)[len(times) // 2]))

    def compute() -> None:
        for _ in range(products):
            torch.mm(square, square)

    return compute


def _nothing() -> None:
    pass


def _idle() -> None:
    time.sleep(PAUSE_S)
    dist.barrier()
