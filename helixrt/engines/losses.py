"""What a loop may hand in as a loss."""

from __future__ import annotations

import torch

from helixrt.errors import MisuseError


def check_loss(loss: object) -> None:
    """Raises MisuseError for what is not a tensor with one element that depends on a parameter."""
    if not isinstance(loss, torch.Tensor):
        raise MisuseError(f"the loss is a {type(loss).__name__}, not a tensor; pass it before .item(), or call step.skip()")
    if loss.numel() != 1:
        raise MisuseError(f"the loss has shape {list(loss.shape)}; it must be one number: sum it, and pass weight=")
    if not loss.requires_grad:
        raise MisuseError("the loss depends on no parameter that requires a gradient (no_grad, detach, or all frozen?)")
