"""What a reduction is, in plain PyTorch: kernels and the path on the host are tested against this.

In: two tensors of one length and type. Out: a new tensor. Nothing here is fast, and nothing calls it but tests.
FT-HSDP section 4.2 names sum and mean only; the other operations are those of `torch.distributed.ReduceOp`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch


class Op(Enum):
    """How two elements become one. A mean is a SUM whose last reduction divides by the number of contributors.

    MIN and MAX give NaN when either element is. AND, OR and XOR are bitwise, for integers and bool. For bool SUM and
    MAX are OR, PRODUCT and MIN are AND.
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AND = "and"
    OR = "or"
    XOR = "xor"


BITWISE = frozenset({Op.AND, Op.OR, Op.XOR})

OPERATORS: dict[Op, Callable[..., torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.AND: torch.bitwise_and,
    Op.OR: torch.bitwise_or,
    Op.XOR: torch.bitwise_xor,
}

# What an element is widened to before it is operated on. The result is rounded once, when it is stored.
ACCUMULATORS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int16: torch.int16,
    torch.int8: torch.int8,
    torch.uint8: torch.uint8,
    torch.bool: torch.bool,
}


def reduced(left: torch.Tensor, right: torch.Tensor, op: Op = Op.SUM, divisor: int = 1) -> torch.Tensor:
    """(left op right) / divisor; integers wrap around, and are never divided."""
    wide = ACCUMULATORS[left.dtype]
    result = OPERATORS[op](left.to(wide), right.to(wide))
    if divisor != 1:
        result = result / divisor
    return result.to(left.dtype)


def copied(source: torch.Tensor) -> torch.Tensor:
    return source.clone()
