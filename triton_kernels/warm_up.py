"""Compiling a reduction's kernel before it is needed: Triton compiles at the first launch, which takes up to seconds.

In: what a launch will be like (`Variant`), worked out from addresses alone. Out: the same kernel, compiled, by a launch on a
few elements of memory of its own. Triton compiles again for each type, operation, number of destinations, whether there is a
division, and for which pointers are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from helixrt.triton_kernels.oracle import Op

_BOUNDARY = 16  # bytes: `kernels.VECTOR_BYTES`, without importing Triton
_ELEMENTS = 2 * _BOUNDARY


@dataclass(frozen=True)
class Variant:
    """A kernel that Triton compiles. `aligned`: left, right, out and, with two destinations, also."""

    dtype: torch.dtype
    op: Op
    divides: bool
    aligned: tuple[bool, ...]


def variant_of(addresses: Sequence[int], length: int, dtype: torch.dtype, op: Op, divisor: int) -> Variant:
    """Of a `reduce_copy` of `length` elements at these addresses: left, right, out and perhaps also."""
    offsets = {address % _BOUNDARY for address in addresses}
    if len(offsets) == 1:  # the kernel begins at the first boundary, if there is one
        offset = offsets.pop()
        whole = not offset or (_BOUNDARY - offset) // dtype.itemsize < length
        aligned = (whole,) * len(addresses)
    else:
        aligned = tuple(address % _BOUNDARY == 0 for address in addresses)
    return Variant(dtype, op, divisor != 1, aligned)


def tensors_like(variant: Variant, device: torch.device) -> list[torch.Tensor]:
    """Zeros with the variant's alignment, which no launch moves to a boundary."""
    found = []
    for number, aligned in enumerate(variant.aligned):
        memory = torch.zeros(_ELEMENTS, dtype=variant.dtype, device=device)
        shift = 0 if aligned else 1 if number or variant.dtype.itemsize == 8 else 2
        found.append(memory[shift : shift + 1])
    return found


def warm_up(variant: Variant, device: torch.device) -> None:
    """Compile it for `device`; on a host there is nothing to compile. Raises MissingExtra without Triton."""
    if device.type != "cuda":
        return
    from helixrt.triton_kernels.reduction import reduce_copy

    left, right, *into = tensors_like(variant, device)
    reduce_copy(left, right, *into, op=variant.op, divisor=2 if variant.divides else 1)
