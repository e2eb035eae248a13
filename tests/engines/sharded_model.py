"""The model that the tests of sharded replicas train."""

from __future__ import annotations

import torch
from torch import nn

INPUTS = 6


class Block(nn.Module):
    def __init__(self, width: int, kinds: int) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({str(k): nn.Linear(width, width) for k in range(kinds)})
        self.never = nn.Linear(width, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.branches[str(kind % len(self.branches))](x)))


class Model(nn.Module):
    """Blocks of which each batch uses one branch of several; widths that no number of ranks divides; a norm with buffers."""

    def __init__(self, width: int = 7, kinds: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, width, bias=False)  # the norm takes a bias away, and Adam amplifies what is left
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Block(width, kinds) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(1))  # smaller than any number of ranks
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x, kind)
        return self.last(x * self.scale)


class Reused(Model):
    """A block that is used three times, as ALBERT's, and a parameter without dimensions, as CLIP's."""

    def __init__(self, width: int = 7, kinds: int = 2, depth: int = 2) -> None:
        super().__init__(width, kinds, depth)
        self.gain = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in (*self.blocks, self.blocks[0], self.blocks[0]):
            x = block(x, kind) * self.gain.exp()
        return self.last(x * self.scale)
