"""A schedule-free optimizer, as the package `schedulefree` has them."""

from __future__ import annotations

from typing import Any

import torch


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose parameters are between the iterates `z` and their mean; `train` gives them back but for rounding."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "train_mode": False, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).sub_(p.grad, alpha=group["lr"] * (0.1 - 0.9 / group["k"]))
                z.sub_(p.grad, alpha=group["lr"])

    def eval(self) -> None:
        self._turn(False, 1 - 1 / 0.9)

    def train(self) -> None:
        self._turn(True, 1 - 0.9)

    @torch.no_grad()
    def _turn(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != mode else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode
