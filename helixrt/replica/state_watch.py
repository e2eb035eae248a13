"""Digests of the replicated state while the run goes: replicas whose bits differ are found within so many steps.

In: an engine, between two steps. Out: for each step a digest of one part of the state; `every` parts make the whole. A digest
is a sum of the part's 64-bit words, each times an odd weight of its own: one flipped bit, wherever it is, changes it. It is
computed where the tensors are, and nothing is waited for.
"""

from __future__ import annotations

import zlib

import torch

from helixrt.replica.contracts import Engine
from helixrt.replica.state_shards import SCALARS, shards_of

_WORDS = 1 << 17  # that are multiplied at once
_FACTOR = 0x5851F42D4C957F2D  # odd; of Knuth's generator MMIX
_MASK = (1 << 63) - 1


class StateWatch:
    """From the main thread, while no update runs."""

    def __init__(self, engine: Engine, every: int) -> None:
        self._engine, self._every = engine, every
        self._weights: dict[torch.device, torch.Tensor] = {}

    def digest(self, step: int) -> tuple[torch.Tensor | int, str]:
        """Of the part whose turn it is before update number `step`: an int64 scalar above 0, and which entries it covers."""
        shards, part = shards_of(self._engine.state()), step % self._every
        scalars = shards.pop(SCALARS, None)
        names = sorted(shards)
        total = sum(_nbytes(shards[name]) for name in names)
        begin, end = total * part // self._every, total * (part + 1) // self._every
        covered, found, at = [], torch.zeros((), dtype=torch.int64), 0
        if part == 0 and scalars is not None:
            covered.append(SCALARS)
            found += zlib.crc32(scalars.numpy().tobytes())
        for name in names:
            size = _nbytes(shards[name])
            low, high = _whole_words(begin - at, size), _whole_words(end - at, size)
            at += size
            if low < high:
                covered.append(name)
                mine = self._sum(shards[name], low, high)
                found = found.to(mine.device, non_blocking=True) * _FACTOR + mine
        text = covered[0] if len(covered) == 1 else f"{covered[0]} to {covered[-1]}" if covered else "nothing"
        found ^= (found >> 33) & ((1 << 31) - 1)  # the highest bit counts, too, and is cut off
        return ((found & _MASK).clamp(min=1), text) if covered else (0, text)

    @torch.no_grad()
    def _sum(self, tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Of the bytes from `low` to `high` of a tensor; `low` is a multiple of eight."""
        if tensor.numel() == 1 or not tensor.is_contiguous():  # whose bytes are not all of its memory's, or not in order
            tensor = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
        flat = tensor.reshape(-1).view(torch.uint8)[low:high]
        whole = len(flat) - len(flat) % 8
        words = flat[:whole]
        words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
        weights = self._weights_on(flat.device)
        found = (flat[whole:].to(torch.int64) * weights[: len(flat) - whole]).sum()
        for first in range(0, len(words), _WORDS):
            piece = words[first : first + _WORDS]
            found = found * _FACTOR + (piece * weights[: len(piece)]).sum()
        return found

    def _weights_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._weights:
            self._weights[device] = torch.arange(1, 2 * _WORDS, 2, dtype=torch.int64, device=device) * _FACTOR
        return self._weights[device]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _whole_words(at: int, size: int) -> int:
    """A place among `size` bytes, at a multiple of eight or the end."""
    return min(max(0, -(-at // 8) * 8), size)
