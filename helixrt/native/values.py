"""What goes into an engine and comes out of it, as Python has it: settings, events, counters, element types."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from helixrt.errors import Fatal
from helixrt.native.library import COptions, Dtype, EventKind

NS = 1_000_000_000
_DTYPES = {
    **{"torch.uint8": Dtype.U8, "torch.int8": Dtype.I8, "torch.int16": Dtype.I16, "torch.int32": Dtype.I32},
    **{"torch.int64": Dtype.I64, "torch.uint16": Dtype.U16, "torch.uint32": Dtype.U32, "torch.uint64": Dtype.U64},
    **{"torch.bool": Dtype.BOOL, "torch.float16": Dtype.F16, "torch.bfloat16": Dtype.BF16, "torch.float32": Dtype.F32},
    **{"torch.float64": Dtype.F64, "torch.complex64": Dtype.C64, "torch.complex128": Dtype.C128},
}
_OF_SIZE = {1: Dtype.U8, 2: Dtype.U16, 4: Dtype.U32, 8: Dtype.U64, 16: Dtype.C128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of an engine; both ends of a link need the same. 0 keeps the default of io.hpp, which explains each.

    `period_s` below 0: silent peers are not lost.
    """

    period_s: float = 0
    connect_s: float = 0
    answer_s: float = 0
    attempt_s: float = 0
    retry_s: float = 0
    rest_s: float = 0
    longest_rest_s: float = 0
    steady_s: float = 0
    acknowledge_s: float = 0
    eager_bytes: int = 0
    keep_bytes: int = 0
    eager_memory: int = 0
    rail_bytes: int = 0
    window_bytes: int = 0
    turn_bytes: int = 0
    concurrent: int = 0

    def native(self) -> COptions:
        given = asdict(self).items()
        found = {key.removesuffix("_s"): nanoseconds(value) if key.endswith("_s") else value for key, value in given}
        return COptions(**{**found, "period": -1 if self.period_s < 0 else found["period"]})


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """io.hpp, Event, says what the fields of each kind mean. `at_ns`: when it came about, monotonic."""

    kind: EventKind
    peer: int
    op: int
    a: int
    b: int
    at_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class RailCounters:
    """Of one rail, since the engine was made."""

    bytes_sent: int
    bytes_received: int
    frames_sent: int
    frames_received: int
    fragments_again: int
    duplicates: int
    failures: int
    returns: int


@dataclass(frozen=True, slots=True)
class LoopCounters:
    """Of the loop, since the engine was made."""

    turns: int
    caller_turns: int
    sleeps: int
    kicks: int
    system_calls: int
    spins_ns: int
    driven_ns: int


def dtype_of(dtype: Any, any_of_its_size: bool = False) -> Dtype:
    """The library's number for an element type of torch.

    With `any_of_its_size` a type that cannot be reduced gets the number of another one of its size: its elements are moved
    alone. Raises Fatal for what remains.
    """
    found = _DTYPES.get(str(dtype))
    if found is None and any_of_its_size:
        found = _OF_SIZE.get(dtype.itemsize)
    if found is None:
        raise Fatal(f"elements of {dtype} cannot be reduced; convert them")
    return found


def nanoseconds(seconds: float) -> int:
    return round(seconds * NS)
