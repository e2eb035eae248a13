"""AdamW over the parameters of one rank, with gradients read from flat buckets.

In: parameters with their slots, reduced buckets, rate and clipping scale. Out: updated parameters. The
buckets are left as they are. The update is torch's own fused AdamW (Loshchilov & Hutter, 2019); its
state exists from the start, so that its layout is known before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from helixrt.pipeline.buckets import Slot
from helixrt.train.config import OptimConfig


class BucketAdamW:
    """Decoupled weight decay on matrices only (parameters with two or more dimensions)."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]], slots: Sequence[Slot], config: OptimConfig) -> None:
        assert [n for n, _ in parameters] == [s.name for s in slots]
        self.config, self.slots = config, slots
        self.parameters = [p.detach() for _, p in parameters]
        self.exp_avg = [torch.zeros_like(p) for p in self.parameters]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.parameters]
        self.step = torch.zeros((), dtype=torch.int64)  # updates done
        self._steps = torch.zeros(len(self.parameters), dtype=torch.float32)
        self._scaled: list[torch.Tensor] = []
        matrices = [i for i, p in enumerate(self.parameters) if p.dim() >= 2]
        others = [i for i, p in enumerate(self.parameters) if p.dim() < 2]
        self._groups = [g for g in ((matrices, config.weight_decay), (others, 0.0)) if g[0]]

    def state(self) -> dict[str, torch.Tensor]:
        """Live tensors by name, in a fixed order."""
        names = [slot.name for slot in self.slots]
        tensors = {f"parameter/{n}": t for n, t in zip(names, self.parameters, strict=True)}
        tensors |= {f"exp_avg/{n}": t for n, t in zip(names, self.exp_avg, strict=True)}
        tensors |= {f"exp_avg_sq/{n}": t for n, t in zip(names, self.exp_avg_sq, strict=True)}
        return tensors | {"optimizer/step": self.step}

    @torch.no_grad()
    def update(self, step: int, buckets: Sequence[torch.Tensor], scale: float, rate: float) -> None:
        """Update number `step` (first is 1) with gradients `scale * buckets`."""
        if scale != 1.0:
            self._scaled = self._scaled or [torch.empty_like(b) for b in buckets]
            buckets = [torch.mul(b, scale, out=s) for b, s in zip(buckets, self._scaled, strict=True)]
        grads = [slot.view(buckets) for slot in self.slots]
        self._steps.fill_(step - 1)
        steps = list(self._steps.unbind())
        beta1, beta2 = self.config.betas
        for members, decay in self._groups:
            adamw(
                [self.parameters[i] for i in members],
                [grads[i] for i in members],
                [self.exp_avg[i] for i in members],
                [self.exp_avg_sq[i] for i in members],
                [],
                [steps[i] for i in members],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=rate,
                weight_decay=decay,
                eps=self.config.eps,
                maximize=False,
            )
        self.step.fill_(step)
