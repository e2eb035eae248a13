"""What a rank calls, in 32 bits that travel in the names of an operation's messages, and whether both ends mean the same.

In: collective, element type, reduction, and what must be equal for the plans of all ranks to fit. Out: the number by
which an operation's messages are named, and the difference where a peer's operation of the same number is another one.

    name of a collective's message = (operation, index)      operation = number of the collective | fingerprint << 31

A message of another call has another name, so its bytes never reach this rank's memory; nothing is added to any message.
An end that gets an unexpected name compares the fingerprints. Where nothing is sent, since both ends wait for each other
(both send long messages, or both receive: broadcasts with different roots), each sends the other from time to time for which
operation it waits (`awaited`), and that name is compared as well, with the operations that this rank has begun with any of
its peers. Point-to-point operations (below 0) and operations without a fingerprint are not compared. Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable

COLLECTIVES = (
    "?", "all-reduce", "reduce-scatter", "reduce", "all-gather", "broadcast", "gather", "scatter", "all-to-all", "barrier",
)  # fmt: skip
DTYPES = (
    "?", "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex32", "complex64", "complex128",
)  # fmt: skip
REDUCTIONS = ("", "sum", "product", "min", "max", "and", "or", "xor", "mean")

_NUMBER_BITS, _PLAN_BITS, _REDUCTION_BITS, _DTYPE_BITS, _COLLECTIVE_BITS = 31, 17, 5, 6, 4
NUMBER = (1 << _NUMBER_BITS) - 1  # which bits of an operation are the collective's number
assert len(REDUCTIONS) <= 1 << _REDUCTION_BITS and len(DTYPES) <= 1 << _DTYPE_BITS and len(COLLECTIVES) <= 1 << _COLLECTIVE_BITS

KEPT = 256  # operations of either end that are remembered; ranks are a few apart


def fingerprint(collective: str, dtype: str = "?", reduction: str = "", plan: Hashable = ()) -> int:
    """To be combined with a collective's number by `|`. `plan`: all that must be equal on all ranks, as text."""
    found = COLLECTIVES.index(collective)
    found = found << _DTYPE_BITS | (DTYPES.index(dtype) if dtype in DTYPES else 0)
    found = found << _REDUCTION_BITS | REDUCTIONS.index(reduction)
    found = found << _PLAN_BITS | zlib.crc32(repr(plan).encode()) & ((1 << _PLAN_BITS) - 1)
    return found << _NUMBER_BITS


def describe(operation: int) -> str:
    """The call that an operation is of, for a message."""
    found = operation >> _NUMBER_BITS + _PLAN_BITS
    reduction, found = found & ((1 << _REDUCTION_BITS) - 1), found >> _REDUCTION_BITS
    dtype, collective = found & ((1 << _DTYPE_BITS) - 1), found >> _DTYPE_BITS & ((1 << _COLLECTIVE_BITS) - 1)
    names = [
        table[number] if number < len(table) else f"unknown ({number})"
        for table, number in ((COLLECTIVES, collective), (DTYPES, dtype), (REDUCTIONS, reduction))
    ]
    text = names[0] if names[1] == "?" else f"{names[0]} of {names[1]}"
    return f"{text} by {names[2]}" if names[2] else text


def difference(theirs: int, ours: int) -> str:
    """Two operations of one number: what the peer calls, and this rank."""
    text = f"collective {ours & NUMBER} is {describe(theirs)} there and {describe(ours)} here"
    if describe(theirs) == describe(ours):
        text += ", of other sizes, another root or other settings"
    return f"{text}: all ranks must call the same collectives in the same order"


def awaited(messages: Iterable[tuple[int, int]]) -> int:
    """The oldest operation that can be compared, of these messages by name; 0 if there is none."""
    return min((op for op, _ in messages if op > NUMBER), key=lambda op: op & NUMBER, default=0)


class Agreement:
    """Of one link: the operations of this end, and those of the peer that this end has not begun.

    `begun`: the operations that this rank has begun, by number; the links of a generation may share it.
    """

    __slots__ = ("_begun", "_early", "latest")

    def __init__(self, begun: dict[int, int] | None = None) -> None:
        self.latest = -1  # operation that was begun: it is not announced again with each of its messages
        self._begun: dict[int, int] = {} if begun is None else begun  # number -> operation, the oldest first
        self._early: dict[int, int] = {}

    def begin(self, operation: int) -> str:
        """This end sends or receives something of it: how the peer's operation differs; empty if it is not known to."""
        self.latest = operation
        if operation <= NUMBER:
            return ""
        number = operation & NUMBER
        if number not in self._begun:
            self._begun[number] = operation
            if len(self._begun) > KEPT:
                del self._begun[next(iter(self._begun))]
        theirs = self._early.pop(number, operation) if self._early else operation
        return "" if theirs == operation else difference(theirs, operation)

    def unexpected(self, operation: int) -> str:
        """The peer names a message that this end has not requested, or not yet: as `begin`."""
        if operation <= NUMBER:
            return ""
        number = operation & NUMBER
        ours = self._begun.get(number)
        if ours is not None:
            return "" if ours == operation else difference(operation, ours)
        known = self._early.setdefault(number, operation)
        if len(self._early) > KEPT:
            del self._early[next(iter(self._early))]
        return "" if known == operation else difference(operation, known)
