"""Pieces: the part of a tensor that one rank has, where a dimension of it is cut over several ranks.

In: the length of the dimension, the rank, and how the ranks share it. Out: a `Piece`, which takes the rank's part out of the
whole tensor, or reads that part alone from a file. A dimension is cut as `torch.chunk` cuts it, so that the last parts may be
shorter or empty; DTensor cuts so, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """The elements of `ranges` (first, end) along dimension `dim`, one range after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Of a whole tensor; a view of it where it is one range."""
        parts = [whole.narrow(self.dim, first, end - first) for first, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def read(self, stored: Any) -> torch.Tensor:
        """Of what can be indexed as a tensor, such as a slice of a safetensors file; nothing else of it is read."""
        before = (slice(None),) * self.dim
        parts = [stored[(*before, slice(first, end))] for first, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def piece_of(dim: int, size: int, rank: int, ranks: int, blocks: int = 1) -> Piece:
    """The part of rank `rank` of a dimension `dim` of `size` elements; of `blocks` equal ones that lie one after the other in
    it, each of which the ranks share."""
    assert size % blocks == 0, "blocks are equal"
    block = size // blocks
    longest = -(-block // ranks)
    first, end = (min(at * longest, block) for at in (rank, rank + 1))
    return Piece(dim, tuple((number * block + first, number * block + end) for number in range(blocks)))
