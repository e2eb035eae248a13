"""Finds parameters that were changed through `.data`, which counts no version: parts of a few parameters are compared.

In: the registered parameters. `record` (after each update and load) copies one part of each of the next `PARAMETERS`
parameters; `compare` (at the end of a batch) compares them by their bits. Parameters take turns, and so do the parts of each. A
whole tensor that is changed in every step is found within (number of parameters / `PARAMETERS`) steps; a change of few elements
may not be. A part has at most `ELEMENTS` elements, so a step costs the copies and comparisons of `PARAMETERS` short parts. One
flipped bit is left to the digests that replicas compare, where there are several: memory does that, and no program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_Bits = torch.Tensor | np.ndarray
PARAMETERS, ELEMENTS = 4, 1024

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> what its bits are read as


class Samples:
    """One thread at a time. A sharded parameter (DTensor) is sampled in this rank's shard. `each`: parameters per step;
    `alone`: in a run of one replica, which compares no digests."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], each: int = PARAMETERS, alone: bool = True) -> None:
        self._each, self._alone = each, alone
        self._named = [(name, parameter) for name, parameter in named if not parameter.is_complex()]
        self._bits: list[tuple[int, _Bits | None] | None] = [None] * len(self._named)  # each one's address and flat live view
        self._turn = 0  # of all rows sampled so far
        self._kept: list[tuple[str, _Bits, torch.Tensor | bytes]] = []  # name, live row, its copy
        self._marks: torch.Tensor | None = None  # which rows differ, on a device that computes later

    def record(self) -> None:
        """The parameters are as they should be. Samples the next ones."""
        self._kept, self._marks = [], None
        for _ in range(min(self._each, len(self._named))):
            turn, index = divmod(self._turn, len(self._named))
            bits = self._flat(index)
            self._turn += 1
            if bits is None:
                continue
            row = bits
            if (size := len(bits)) > ELEMENTS:
                first = turn * ELEMENTS % size
                row = bits[first : first + ELEMENTS]
            copy = row.clone() if isinstance(row, torch.Tensor) else row.tobytes()
            self._kept.append((self._named[index][0], row, copy))

    def _flat(self, index: int) -> _Bits | None:
        """The bits of a parameter; looked up again when its memory is another. In host memory an array, whose operations cost
        a tenth. None without values to compare."""
        parameter, known = self._named[index][1], self._bits[index]
        part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        address = part.data_ptr()
        if known is None or known[0] != address:
            bits = _bits_of(part)
            there = bits.numel() > 0 and not bits.is_meta
            known = self._bits[index] = address, None if not there else bits.numpy() if bits.is_cpu else bits
        return known[1]

    def compare(self) -> str | None:
        """The name of a parameter that has changed since `record`, or None. Rows on a device are compared there and read by
        `result`, since reading waits for the device."""
        late: list[torch.Tensor] = []
        for name, row, copy in self._kept:
            if isinstance(row, torch.Tensor):
                assert isinstance(copy, torch.Tensor)
                late.append(torch.ne(row, copy).sum() > (not self._alone))
            elif (now := row.tobytes()) != copy and (self._alone or not _is_one_bit(now, copy)):
                return name
        self._marks = torch.stack([mark.to(late[0].device) for mark in late]) if late else None
        return None

    def result(self) -> str | None:
        """What `compare` found on a device; waits for it."""
        if self._marks is None:
            return None
        names = [name for name, row, _ in self._kept if isinstance(row, torch.Tensor)]
        marks, self._marks = self._marks.tolist(), None
        return next((name for name, mark in zip(names, marks, strict=True) if mark), None)


def _is_one_bit(now: bytes, then: bytes | torch.Tensor) -> bool:
    assert isinstance(then, bytes)
    return (int.from_bytes(now) ^ int.from_bytes(then)).bit_count() == 1


def _bits_of(part: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, a live view in the order of its memory; of one with gaps in it, those of its first row without."""
    part = part.detach()
    if part.numel():
        by_stride = sorted(range(part.dim()), key=part.stride, reverse=True)
        part = part.permute(by_stride)
        while not part.is_contiguous():
            part = part[0]
    return part.reshape(-1).view(BITS[part.element_size()])
