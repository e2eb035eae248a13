"""Whether a tensor has only finite numbers, in one pass that reads it once."""

from __future__ import annotations

import torch


def all_finite(tensor: torch.Tensor) -> bool:
    """True if no number of the tensor (any shape, floating point) is infinite or NaN.

    The float64 sum is not finite if any number is not. It may overflow for finite float64 numbers, so a sum
    that is not finite is confirmed number by number.
    """
    if bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return True
    return bool(torch.isfinite(tensor).all())
