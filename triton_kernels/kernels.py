"""The Triton kernels: `out` (and `also`) = `left` op `right`, and `out` (and `also`) = `source`, by a few thread blocks.

In: tensors that `reduction` has checked, on one device (or pinned host memory). Out: launches on the current stream.

A set number of programs, each resident on a multiprocessor of its own, walks over all tiles, so that the computation
beside it keeps the other multiprocessors. With so few, what counts is the bytes in flight: every thread has
`Launch.vectors` vectors of 16 bytes of each input to load at once, and each destination is stored from the same registers
(the fused last reduce-scatter step). FT-HSDP section 4.2 uses two thread blocks of 512 threads; of 1,024 threads they sum
1.3 times as fast on an H100, and 1.6 times in pinned memory, which is then as fast as the bus
(`benchmarks/results/kernels_launch.json`). Full tiles are unmasked, for masks prevent vectors. What is before the first
16-byte boundary and behind the last full tile is done by single elements, in pieces of few so that they need no more
registers. Tensors whose offsets from such a boundary differ are done by single elements throughout.

Each reduction is a launch of its own. The paper has one kernel per all-reduce that polls flags in pinned memory instead,
which spares launches but holds its multiprocessors while the network works; which is better has not been measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from helixrt.triton_kernels.oracle import Op

VECTOR_BYTES = 16  # the widest load and store of a thread, and what Triton asks of a pointer's alignment
_THREADS_PER_WARP = 32
_PIECE = 4  # elements per thread where there are no vectors


@dataclass(frozen=True)
class Launch:
    """How much of the card a kernel may use: thread blocks, warps in each, 16-byte vectors in flight per thread and input."""

    programs: int = 2
    warps: int = 32
    vectors: int = 4

    def tile(self, itemsize: int) -> int:
        """Elements that a thread block loads at once."""
        return _THREADS_PER_WARP * self.warps * self.vectors * max(1, VECTOR_BYTES // itemsize)

    def piece(self, itemsize: int) -> int:
        """Elements that it does at once behind the last full tile."""
        return min(_THREADS_PER_WARP * self.warps * _PIECE, self.tile(itemsize))


DEFAULT = Launch()


@triton.jit
def _combine(left, right, divisor, OP: tl.constexpr, WIDE: tl.constexpr, DIVIDE: tl.constexpr):
    left = left.to(WIDE)
    right = right.to(WIDE)
    if OP == "sum":
        result = left + right
    elif OP == "product":
        result = left * right
    elif OP == "min":
        result = tl.minimum(left, right, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "max":
        result = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "and":
        result = left & right
    elif OP == "or":
        result = left | right
    else:
        tl.static_assert(OP == "xor")
        result = left ^ right
    if DIVIDE:
        if WIDE == tl.float32:  # the plain quotient of this type is approximate
            result = tl.div_rn(result, divisor.to(tl.float32))
        else:
            result = result / divisor.to(WIDE)
    return result


@triton.jit
def _at(
    left,
    right,
    out,
    also,
    divisor,
    offsets,
    mask,
    OP: tl.constexpr,
    WIDE: tl.constexpr,
    DIVIDE: tl.constexpr,
    TWO: tl.constexpr,
):
    result = tl.load(left + offsets, mask=mask)
    if OP != "copy":
        result = _combine(result, tl.load(right + offsets, mask=mask), divisor, OP, WIDE, DIVIDE)
        result = result.to(out.dtype.element_ty)
    tl.store(out + offsets, result, mask=mask)
    if TWO:
        tl.store(also + offsets, result, mask=mask)


@triton.jit(do_not_specialize=["length", "head", "divisor"])
def reduce_copy_kernel(
    left,
    right,  # of a copy, anything
    out,
    also,
    length,  # elements from the pointers on
    head,  # elements before them, fewer than a vector holds
    divisor,
    OP: tl.constexpr,  # "copy", or the value of an `Op`
    WIDE: tl.constexpr,
    DIVIDE: tl.constexpr,
    TWO: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    # Positions of tiles have 64 bits, positions in a tile 32.
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    length = length.to(tl.int64)
    lane = tl.arange(0, TILE)
    tiles = length // TILE
    for start in tl.range(program * TILE, tiles * TILE, programs * TILE):
        _at(left + start, right + start, out + start, also + start, divisor, lane, None, OP, WIDE, DIVIDE, TWO)
    # What is left begins with the program whose turn it is.
    turn = (program + programs - tiles % programs) % programs
    few = tl.arange(0, PIECE)
    for start in tl.range(tiles * TILE + turn * PIECE, length, programs * PIECE):
        rest = length - start
        _at(left + start, right + start, out + start, also + start, divisor, few, few < rest, OP, WIDE, DIVIDE, TWO)
    if program == 0:
        first = tl.arange(0, VECTOR)
        _at(left - head, right - head, out - head, also - head, divisor, first, first < head, OP, WIDE, DIVIDE, TWO)


_WIDE: dict[torch.dtype, Any] = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}

_OF_BOOL = {Op.SUM: Op.OR, Op.MAX: Op.OR, Op.PRODUCT: Op.AND, Op.MIN: Op.AND}
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def launch_reduce_copy(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    also: torch.Tensor | None,
    op: Op,
    divisor: int,
    launch: Launch = DEFAULT,
) -> None:
    """Tensors are flat, contiguous, of one length above 0 and one type; `out` may be `left` or `right`."""
    given = [left, right, out, out if also is None else also]
    if left.dtype == torch.bool:
        given, op = [each.view(torch.uint8) for each in given], _OF_BOOL.get(op, op)
    _launch(given, also is not None, op.value, _WIDE[given[0].dtype], divisor, launch)


def launch_copy(source: torch.Tensor, out: torch.Tensor, also: torch.Tensor | None, launch: Launch = DEFAULT) -> None:
    """As `launch_reduce_copy`, for any type: elements are moved as integers of their size, so every bit arrives."""
    as_integers = _SAME_SIZE.get(source.element_size(), torch.int64)
    given = [each.view(as_integers) for each in (source, source, out, out if also is None else also)]
    _launch(given, also is not None, "copy", _WIDE[as_integers], 1, launch)


def _launch(given: list[torch.Tensor], two: bool, op: str, wide: Any, divisor: int, launch: Launch) -> None:
    head, given = _from_boundary(given)
    itemsize = given[0].element_size()
    reduce_copy_kernel[(launch.programs,)](
        *given,
        length=given[0].numel(),
        head=head,
        divisor=divisor,
        OP=op,
        WIDE=wide,
        DIVIDE=divisor != 1,
        TWO=two,
        TILE=launch.tile(itemsize),
        PIECE=launch.piece(itemsize),
        VECTOR=VECTOR_BYTES,
        num_warps=launch.warps,
    )


def _from_boundary(given: list[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    """The tensors from their first 16-byte boundary on, where they share it, and how many elements lie before it."""
    misaligned = {each.data_ptr() % VECTOR_BYTES for each in given}
    if len(misaligned) > 1 or misaligned == {0}:
        return 0, given
    head = (VECTOR_BYTES - misaligned.pop()) // given[0].element_size()
    length = given[0].numel()
    return (head, [each.narrow(0, head, length - head) for each in given]) if head < length else (0, given)
