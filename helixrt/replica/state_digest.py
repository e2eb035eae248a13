"""Digests of the state: whether replicas hold the same bits, while the run goes and at its end.

In: an engine, between two steps, or its state. Out: `StateWatch`: for each step a digest of one part of the state; `every`
parts make the whole. `digest`: of the whole state, and of each entry. A digest is a sum of 64-bit words, each times an odd
weight of its own: one flipped bit, wherever it is, changes it. It is computed where the tensors are.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import torch

from helixrt.replica.commands import Digested
from helixrt.replica.contracts import Engine, State
from helixrt.replica.state_shards import SCALARS, shards_of

_WORDS = 1 << 17  # that are multiplied at once
_FACTOR = 0x5851F42D4C957F2D  # odd; of Knuth's generator MMIX
_MASK = (1 << 63) - 1


class StateWatch:
    """From the main thread, while no update runs."""

    def __init__(self, engine: Engine, every: int) -> None:
        self._engine, self._every = engine, every
        self._sums = Sums()

    def part(self, step: int) -> tuple[torch.Tensor | int, str]:
        """Of the part whose turn it is before update number `step`: an int64 scalar above 0, and which entries it covers."""
        shards, part = shards_of(self._engine.state()), step % self._every
        scalars = shards.pop(SCALARS, None)
        names = sorted(shards)
        total = sum(shards[name].nbytes for name in names)
        begin, end = total * part // self._every, total * (part + 1) // self._every
        covered, found, at = [], torch.zeros((), dtype=torch.int64), 0
        if part == 0 and scalars is not None:
            covered.append(SCALARS)
            found += zlib.crc32(scalars.numpy().tobytes())
        for name in names:
            size = shards[name].nbytes
            low, high = _whole_words(begin - at, size), _whole_words(end - at, size)
            at += size
            if low < high:
                covered.append(name)
                mine = self._sums.of(shards[name], low, high)
                found = found.to(mine.device, non_blocking=True) * _FACTOR + mine
        text = covered[0] if len(covered) == 1 else f"{covered[0]} to {covered[-1]}" if covered else "nothing"
        found ^= (found >> 33) & ((1 << 31) - 1)  # the highest bit counts, too, and is cut off
        return ((found & _MASK).clamp(min=1), text) if covered else (0, text)


def digest(state: State, entries: bool = False) -> Digested:
    """Of what is called `parameter/…`, and of everything; with `entries` also of each entry. Waits for the device."""
    shards, sums = shards_of(state), Sums()
    found = {name: sums.of(tensor, 0, tensor.nbytes) for name, tensor in shards.items()}
    told = dict(zip(found, _on_host(list(found.values())), strict=True))
    lines = [f"{name} {tuple(shards[name].shape)} {told[name]}" for name in sorted(told)]
    parameters = _joined(line for line in lines if line.startswith("parameter/"))
    return Digested(parameters, _joined(lines), tuple(told.items()) if entries else ())


def _joined(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _on_host(found: list[torch.Tensor]) -> list[int]:
    """Waits once for each device."""
    values = dict[int, int]()
    for device in {each.device for each in found}:
        here = [at for at, each in enumerate(found) if each.device == device]
        values |= zip(here, torch.stack([found[at] for at in here]).tolist(), strict=True)
    return [values[at] for at in range(len(found))]


class Sums:
    """Weighted sums of the bytes of tensors, as int64 scalars where these are. It keeps the weights, 1 MiB on each device."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def of(self, tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
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


def _whole_words(at: int, size: int) -> int:
    """A place among `size` bytes, at a multiple of eight or the end."""
    return min(max(0, -(-at // 8) * 8), size)
