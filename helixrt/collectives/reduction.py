"""The arithmetic of collectives: what can be reduced how, and how a plan's nodes are carried out.

In: a `Reduce` or `Copy` node and the memory it works on. Out: the memory, written. Torch computes
without Python's lock; the order of operands is the plan's, so all ranks get the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from helixrt.collectives.memory import OperationMemory
from helixrt.protocol.collective.plan import Copy, Reduce
from helixrt.triton_kernels.oracle import ACCUMULATORS, BITWISE, OPERATORS, Op
from helixrt.triton_kernels.reduction import reduce_copy

__all__ = ["Op", "Reduction", "why_not"]


def why_not(op: Op, dtype: torch.dtype, mean: bool = False) -> str:
    """Why elements of `dtype` cannot be reduced so; empty if they can. A `mean` is a sum that is divided."""
    if dtype.is_complex:
        return "" if op is Op.SUM else f"{op.value} of complex numbers is not defined; reduce torch.view_as_real(tensor)"
    if dtype not in ACCUMULATORS:
        return f"elements of {dtype} cannot be reduced; convert them"
    if op in BITWISE and dtype.is_floating_point:
        return f"{op.value} needs integers or booleans, not {dtype}"
    if mean and not dtype.is_floating_point:
        return f"a mean needs floating-point elements, not {dtype}; sum and divide"
    return ""


class SumOnArrival:
    """A `Sink` of a message that is the right operand of a reduction."""

    __slots__ = ("_element", "_into", "_intos", "_last", "_left", "_lefts", "_piece", "_reduction", "_right")

    def __init__(self, reduction: Reduction, left: torch.Tensor, into: torch.Tensor, last: bool) -> None:
        self._reduction, self._left, self._into, self._last = reduction, left, into, last
        self._element = into.element_size()
        self._piece: memoryview | None = None  # the last one, and its elements
        self._right = into
        self._lefts: tuple[torch.Tensor, ...] = ()  # of both operands, in pieces of its length, once it has come again
        self._intos: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return self._into.numel() * self._element

    def take(self, at: int, piece: memoryview) -> None:
        if piece is not self._piece:
            self._piece, self._right, self._lefts = piece, torch.frombuffer(piece, dtype=self._into.dtype), ()
        elif not self._lefts:  # a view costs as much as the sum of a short piece does
            self._lefts, self._intos = self._left.split(len(self._right)), self._into.split(len(self._right))
        number, odd = divmod(at, len(piece))
        if odd or not self._lefts:
            first, count = at // self._element, len(self._right)
            left, into = self._left.narrow(0, first, count), self._into.narrow(0, first, count)
        else:
            left, into = self._lefts[number], self._intos[number]
        self._reduction.reduce(left, self._right, into, self._last)


class Reduction:
    """One way to reduce: an operation, and what the result is divided by in the last step (1: nothing)."""

    __slots__ = ("_operate", "divisor", "op")

    def __init__(self, op: Op, divisor: int = 1) -> None:
        self.op, self.divisor = op, divisor
        self._operate: Any = OPERATORS[op]

    def carry_out(self, work: Reduce | Copy, memory: OperationMemory) -> None:
        """Carry out the node."""
        if isinstance(work, Copy):
            memory.tensor(work.into).copy_(memory.tensor(work.source))
            return
        left, right, into = memory.tensor(work.left), memory.tensor(work.right), memory.tensor(work.into[0])
        if len(work.into) == 1:
            self.reduce(left, right, into, work.last)
        else:
            divisor = self.divisor if work.last else 1
            reduce_copy(left, right, into, memory.tensor(work.into[1]), op=self.op, divisor=divisor)

    def on_arrival(self, left: torch.Tensor, into: torch.Tensor, last: bool) -> SumOnArrival:
        """Takes the right operand as it comes; `left` must be as it is until then, or be `into`."""
        return SumOnArrival(self, left, into, last)

    def reduce(self, left: torch.Tensor, right: torch.Tensor, into: torch.Tensor, last: bool) -> None:
        """`into` = `left` op `right`, divided if it is the `last` step."""
        if last and self.divisor != 1:
            reduce_copy(left, right, into, None, op=self.op, divisor=self.divisor)
        else:  # the dispatch would cost a small message more than the sum does
            self._operate(left, right, out=into)

    def alone(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """The whole reduction where there is one rank."""
        if self.divisor != 1:
            torch.div(source, self.divisor, out=out)
        elif source.data_ptr() != out.data_ptr():
            out.copy_(source)
