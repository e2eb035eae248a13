"""Whether tensors have only finite numbers, in one pass that reads them once."""

from __future__ import annotations

import math

import torch

from helixrt.replica.contracts import Engine


def all_finite(*tensors: torch.Tensor) -> bool:
    """True if no number of the tensors (any shape, floating point) is infinite or NaN. Waits once for a device.

    The smallest and the largest number are finite exactly then: NaN propagates into both. Of torch's reductions this is
    the cheapest on a CPU (4 Mi float32: 2 ms, against 4 ms for a sum that may overflow and over 40 ms in float64).
    """
    late: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        low, high = torch.aminmax(tensor)
        if not tensor.is_cpu:
            late += (torch.isfinite(low), torch.isfinite(high))
        elif not (math.isfinite(low.item()) and math.isfinite(high.item())):
            return False
    return not late or bool(torch.stack(late).all())


def finite_buckets(engine: Engine) -> bool:
    """Whether the engine's own gradients are finite where they must be. They were handed out."""
    buckets = engine.buckets
    for index in range(len(buckets)):
        engine.ready(index)
    return all_finite(*(engine.finite_part(index, bucket) for index, bucket in enumerate(buckets)))
