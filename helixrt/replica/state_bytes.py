"""A named set of tensors seen as one run of bytes, in the order of its layout.

In: tensors, or a layout. Out: any range of those bytes, as views without a copy. Donor and fetcher
share the layout, so a range means the same on both sides; `layout_digest` differs if the layouts differ.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import torch

from helixrt.protocol.catchup import Piece
from helixrt.replica.contracts import Shard, layout_of


def layout_digest(layout: Sequence[Shard]) -> str:
    """Equal for equal names, shapes, dtypes and sizes in the same order."""
    text = json.dumps([[s.name, list(s.shape), s.dtype, s.nbytes] for s in layout])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def allocate(layout: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """Uninitialised CPU tensors of a layout. Raises ValueError when a shard's size is not its shape's."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in layout:
        tensor = torch.empty(shard.shape, dtype=getattr(torch, shard.dtype))
        if tensor.numel() * tensor.element_size() != shard.nbytes:
            raise ValueError(f"shard {shard.name!r} of {shard.dtype}{list(shard.shape)} cannot have {shard.nbytes} bytes")
        tensors[shard.name] = tensor
    return tensors


class StateBytes:
    """The bytes of `tensors`, which it keeps alive. Tensors elsewhere than in host memory, or not contiguous, are copied.

    Layout and views are made when they are first asked for: of what each step offers hardly anything is. Any thread may ask.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}

    @cached_property
    def layout(self) -> tuple[Shard, ...]:
        return layout_of(self.tensors)

    @cached_property
    def digest(self) -> str:
        return layout_digest(self.layout)

    @cached_property
    def starts(self) -> list[int]:
        """Where each shard begins."""
        return [0, *accumulate(shard.nbytes for shard in self.layout)][:-1]

    @cached_property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.layout)

    @cached_property
    def _views(self) -> list[memoryview]:
        # Any dtype as bytes: numpy has no bfloat16, so the view is made by torch.
        empty = torch.empty(0, dtype=torch.uint8)
        flat = (t.reshape(-1).view(torch.uint8) if t.numel() else empty for t in self.tensors.values())
        return [each.numpy().data for each in flat]

    def shards_of(self, piece: Piece) -> range:
        """The indices of the shards that a piece touches."""
        return range(self._shard_at(piece.begin), self._shard_at(piece.end - 1) + 1)

    def views(self, piece: Piece) -> list[memoryview]:
        """The bytes of a piece, in one view per shard that it touches."""
        found = []
        for i in self.shards_of(piece):
            begin = max(piece.begin - self.starts[i], 0)
            end = min(piece.end - self.starts[i], self.layout[i].nbytes)
            if begin < end:
                found.append(self._views[i][begin:end])
        return found

    def write(self, piece: Piece, data: memoryview) -> None:
        """Put the bytes of a piece where they belong."""
        assert len(data) == piece.nbytes
        at = 0
        for view in self.views(piece):
            view[:] = data[at : at + len(view)]
            at += len(view)

    def _shard_at(self, byte: int) -> int:
        return bisect_right(self.starts, byte) - 1
