"""A digest of a batch: 63 bits that are equal where two streams, or one stream at two times, give the same.

In: a batch as the loader gave it, of any type. Out: a positive number; a tensor where some of the batch lies on an accelerator,
which computes it later; 0 where the batch holds nothing whose content is known. Tensors of up to `WHOLE_BYTES` count whole, of
larger ones parts that are spread evenly. Objects of other kinds do not count; the caller is told of them, and the highest
of the 63 bits is set (`PARTIAL`): another digest is another batch, but an equal one need not be the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from helixrt.protocol.step.batches import PARTIAL

WHOLE_BYTES, PART_BYTES = 1 << 20, 4 << 10
_MASK = PARTIAL - 1
_DEPTH = 8  # of containers in containers
_FACTOR = 0x5851F42D4C957F2D  # of Knuth's generator MMIX: spreads the digests of parts

Digest = int | torch.Tensor


@dataclass(frozen=True)
class _Unread:
    """A part of a batch whose content is not known."""

    kind: str


def batch_digest(batch: Any, unread: Callable[[str], None] = lambda kind: None) -> Digest:
    """Of one batch. On an accelerator nothing is waited for. `unread` gets the kind of each part that does not count."""
    hasher = hashlib.blake2b(digest_size=8)
    later: list[torch.Tensor] = []
    known, partial = False, 0
    for leaf in _leaves(batch, _DEPTH):
        if isinstance(leaf, _Unread):
            unread(leaf.kind)
            partial = PARTIAL
            continue
        if isinstance(leaf, str):
            hasher.update(leaf.encode())
            continue
        if isinstance(leaf, torch.Tensor) and not leaf.is_cpu:
            hasher.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            later.append(_on_device(leaf))
        else:
            hasher.update(leaf if isinstance(leaf, bytes) else _content(leaf))
        known = True
    if not known:
        return 0
    return _marked(_mixed([int.from_bytes(hasher.digest()) & _MASK, *later]), partial)


def together(digests: Iterable[Digest]) -> Digest:
    """Of several batches, in their order; 0 if one of them is not known."""
    every = list(digests)
    partial: Digest = 0
    for digest in every:
        if isinstance(digest, int) and digest == 0:
            return 0
        partial = partial | digest & PARTIAL
    return _marked(_mixed(every), partial)


def _mixed(digests: Iterable[Digest]) -> Digest:
    total: Digest = 0
    for digest in digests:
        if isinstance(total, int) and isinstance(digest, int):
            total = (total * _FACTOR + digest) & _MASK
        else:  # int64 arithmetic of the device wraps; its lower bits are the same
            device = next(each.device for each in (total, digest) if isinstance(each, torch.Tensor))
            total, digest = (torch.as_tensor(each, dtype=torch.int64, device=device) for each in (total, digest))
            total = (total * _FACTOR + digest) & _MASK
    return total


def _marked(total: Digest, partial: Digest) -> Digest:
    return (max(total, 1) if isinstance(total, int) else total.clamp(min=1)) | partial


def _leaves(part: Any, depth: int) -> Iterator[Any]:
    """What of a batch has content that can be read: tensors, arrays, and numbers and texts as bytes. Between them, as texts,
    the lengths of lists and the keys of mappings; and what cannot be read."""
    if _is_plain(part):
        yield part.detach() if isinstance(part, torch.Tensor) else part
    elif isinstance(part, (str, bytes, bytearray, int, float, complex, np.generic)) or part is None:
        yield repr(part).encode() if not isinstance(part, (bytes, bytearray)) else bytes(part)
    elif depth > 0 and isinstance(part, Mapping):
        for key, value in part.items():
            yield repr(key)
            yield from _leaves(value, depth - 1)
    elif depth > 0 and isinstance(part, (list, tuple)):
        yield f"{len(part)}"
        for each in part:
            yield from _leaves(each, depth - 1)
    elif depth > 0 and is_dataclass(part):
        slots = {each.name: getattr(part, each.name, None) for each in fields(part)}
        yield from _leaves({**slots, **getattr(part, "__dict__", {})}, depth - 1)
    else:
        of = f"{part.layout}, {part.dtype}" if isinstance(part, torch.Tensor) else ""
        yield _Unread(f"{type(part).__module__}.{type(part).__qualname__}" + (f" ({of})" if of else ""))


def _is_plain(part: Any) -> bool:
    """A tensor or an array that is its bytes in memory."""
    if isinstance(part, torch.Tensor):
        return type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided and not part.is_quantized
    return isinstance(part, np.ndarray) and not part.dtype.hasobject


def _content(values: torch.Tensor | np.ndarray) -> bytes:
    """Of a tensor or array in host memory: its kind, and its bytes or parts of them."""
    if isinstance(values, torch.Tensor):
        flat = values.contiguous().reshape(-1).view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8)
    else:
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if len(flat) > WHOLE_BYTES:
        parts = WHOLE_BYTES // PART_BYTES
        begins = np.linspace(0, len(flat) - PART_BYTES, parts).astype(np.int64)
        flat = np.concatenate([flat[begin : begin + PART_BYTES] for begin in begins])
    return f"{values.dtype} {list(values.shape)}".encode() + flat.tobytes()


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 scalar: a sum of the tensor's bytes, or of parts of them, each with a weight of its own."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() > WHOLE_BYTES:
        flat = flat[: flat.numel() - flat.numel() % PART_BYTES].view(-1, PART_BYTES)
        flat = flat[:: -(-len(flat) * PART_BYTES // WHOLE_BYTES)].reshape(-1)
    numbers = flat.to(torch.int64) + 1
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.int64, device=flat.device) * _FACTOR
    weights = (weights ^ (weights >> 29)) * _FACTOR | 1
    return ((numbers * weights).sum() & _MASK).clamp(min=1)
