"""Tensors as the plans and links see them: flat elements to compute on, bytes to send and receive.

In: the contiguous CPU tensors of one call. Out: `OperationMemory`, which resolves a plan's regions to byte views and
to tensors of the element type, over the very memory of the caller: nothing is copied. Scratch memory
comes from a `ScratchPool`, which a communicator keeps over calls.
"""

from __future__ import annotations

import ctypes

import torch

from helixrt.protocol.collective.plan import Region, Space

_NOTHING = memoryview(bytearray())
_VIEWED_AS = {  # what arithmetic sees instead; the bytes are the same
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes. The view keeps the tensor."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return _NOTHING
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # a NIC may have it registered for longer than it is used
    return memoryview(memory).cast("B")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a contiguous tensor in one dimension, complex ones as pairs; shares its memory."""
    tensor = tensor.detach()
    if tensor.dtype in _VIEWED_AS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(-1)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.numel() * other.element_size() and second < first + one.numel() * one.element_size()


def lies_at(part: torch.Tensor, whole: torch.Tensor, offset: int) -> bool:
    """Whether `part` begins `offset` bytes behind the beginning of `whole`."""
    return part.data_ptr() == whole.data_ptr() + offset


class ScratchPool:
    """Byte buffers that were used before and are free again; grows to what was in use at once."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least `size` bytes, with whatever is in it."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= size:
                return self._free.pop(index)
        if self._free:  # too small for what is asked now: the next one of this size fits
            self._free.pop()
        return torch.empty(max(size, 1 << 16), dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


class OperationMemory:
    """Where the regions of one running plan lie.

    `source` and `out` are flat tensors of one element type (the same tensor for a call in place);
    `scratch` is bytes.
    """

    __slots__ = ("_bytes", "_element", "_out", "_scratch", "_source", "scratch")

    def __init__(self, source: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
        assert source.dtype == out.dtype or not source.numel() or not out.numel()
        self._source, self._out, self.scratch = source, out, scratch
        self._element = out.element_size()
        self._scratch = out[:0]
        source_bytes = byte_view(source)
        out_bytes = source_bytes if source is out else byte_view(out)
        scratch_bytes = _NOTHING
        if scratch is not None:
            scratch_bytes = byte_view(scratch)
            self._scratch = scratch[: scratch.numel() - scratch.numel() % self._element].view(out.dtype)
        self._bytes = (source_bytes, out_bytes, scratch_bytes)

    def view(self, region: Region) -> memoryview:
        """The region's bytes."""
        space = region.space
        which = self._bytes[0 if space is Space.SOURCE else 1 if space is Space.OUT else 2]
        if region.offset == 0 and region.length == which.nbytes:
            return which
        view = which[region.offset : region.offset + region.length]
        assert view.nbytes == region.length, (region, which.nbytes)
        return view

    def tensor(self, region: Region) -> torch.Tensor:
        """The region's elements."""
        space = region.space
        which = self._source if space is Space.SOURCE else self._out if space is Space.OUT else self._scratch
        count = region.length // self._element
        if region.offset == 0 and count == which.numel():
            return which
        return which.narrow(0, region.offset // self._element, count)
