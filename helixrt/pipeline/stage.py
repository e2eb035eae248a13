"""Forward and backward of one micro-batch through one chunk of the model, by autograd.

In: tokens or hidden states, then the gradient of the output. Out: the output (or the loss, in the last
chunk), then the gradient of the input. Parameter gradients add up in `p.grad`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class StageChunk:
    """One chunk. `loss(output, target)`, a mean, is given to the last chunk only.

    Between F and B of a micro-batch it keeps the input and the graph, not the output itself.
    """

    def __init__(self, module: nn.Module, loss: Loss | None = None) -> None:
        self.module, self.loss = module, loss
        self._stash: dict[int, tuple[torch.Tensor, GradientEdge]] = {}

    def reset(self) -> None:
        """Forget micro-batches whose backward never came (a step that broke)."""
        self._stash.clear()

    def forward(self, microbatch: int, x: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        """The chunk's output without its graph, or the micro-batch's loss (a scalar) in the last chunk.

        The graph is kept for `backward` if grad mode is on.
        """
        keep = torch.is_grad_enabled()
        if keep and x.is_floating_point():
            x.requires_grad_()
        y = self.module(x)
        if self.loss is not None:
            assert target is not None
            y = self.loss(y, target)
        if keep:
            self._stash[microbatch] = (x, get_gradient_edge(y))
        return y.detach()

    def backward(self, microbatch: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Gradient of the input (None for tokens), given that of the output or a scale for the loss."""
        x, edge = self._stash.pop(microbatch)
        torch.autograd.backward((edge,), (grad,))
        return x.grad
