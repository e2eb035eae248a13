"""What captured graphs draw on all ranks together, for a plain loop: an oracle for dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helixrt.engines.random_state import micro_batch_seed
from helixrt.parallel.attention import context_part
from helixrt.parallel.group import Group
from helixrt.passes.seeding import OWN, mixed, seed_of

Divided = Callable[[torch.Size], tuple[int, Sequence[torch.Tensor]] | None]


def nowhere(shape: torch.Size) -> None:
    """No tensor is divided over ranks."""
    return


def over_heads(ranks: int) -> Divided:
    """Attention weights, [rows, heads, positions, positions], are over so many ranks; by their heads."""
    return lambda shape: (1, torch.arange(shape[1]).chunk(ranks)) if len(shape) == 4 else None


def over_positions(ranks: int) -> Divided:
    """Hidden states, [rows, positions, width], are over so many ranks; by the positions that each has of a whole sequence."""

    def divided(shape: torch.Size) -> tuple[int, Sequence[torch.Tensor]]:
        assert len(shape) == 3
        positions = torch.arange(shape[1])
        return 1, [context_part(positions, 0, Group("", rank, ranks)) for rank in range(ranks)]

    return divided


class Drawn(TorchDispatchMode):
    """Around the forward of one micro-batch: each dropout drops what the ranks drop. `divided` gives, for the shape of what is
    dropped from, the dimension along which ranks have parts of it, and the places of each; None where all have it whole."""

    def __init__(self, seed: int, position: int, microbatch: int, divided: Divided, replica: int = 0) -> None:
        super().__init__()
        self._seed = int(seed_of(micro_batch_seed(seed, replica, 0, position), microbatch))
        self._divided, self.count = divided, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **kwargs or {})
        kept, share = args
        number, self.count = self.count, self.count + 1
        cut = self._divided(kept.shape)
        if cut is None:
            return kept.copy_(self._kept(kept, number, share))
        dim, places = cut
        for rank, at in enumerate(places):
            kept.index_copy_(dim, at, self._kept(kept.index_select(dim, at), number + OWN * (rank + 1), share))
        return kept

    def _kept(self, like: torch.Tensor, number: int, share: float) -> torch.Tensor:
        """1 for what is kept."""
        torch.manual_seed(mixed(self._seed, number))
        dropped, _ = torch.native_dropout(torch.ones_like(like), round(1 - share, 12), True)
        return (dropped != 0).to(like.dtype)
