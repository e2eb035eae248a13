"""Loads the native library, once in a process, and declares its functions: include/helixrt_native.h in the words of ctypes.

In: the library that `build.library_path` finds or compiles. Out: `library()`. The header is the manual; what is written here
must say the same, which tests/native/test_library.py checks. Calls run without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.native import build

ABI = 1  # HX_ABI of the header that this file was written for
TEXT_BYTES = 1024  # of an event's text, with the 0 at its end


class Status(IntEnum):
    """How an operation ended (types.hpp)."""

    RUNNING = 0
    OK = 1
    FAILED = 2  # it had begun; what it writes is undefined
    SKIPPED = 3  # the generation was over before it began; nothing was read or written


class End(IntEnum):
    """Why a generation is over (types.hpp)."""

    NONE = 0
    ABORTED = 1
    PEER = 2
    DEADLINE = 3
    MISMATCH = 4


class Failure(IntEnum):
    """Why a rail failed (types.hpp)."""

    PATH = 0
    DEVICE = 1
    CASCADE = 2
    PROGRAM = 3
    PEER_GONE = 4


class EventKind(IntEnum):
    """What the owner of an engine learns; io.hpp, Event, says what the fields mean."""

    DONE = 1
    SENT = 2
    RECEIVED = 3
    ENDED = 4
    RESTORE = 5
    RAIL_LEFT = 6
    RAIL_BACK = 7
    CLOSED = 8
    NODE = 9
    ARRIVED = 10


class Dtype(IntEnum):
    """Element types that can be reduced (reduce.hpp)."""

    U8, I8, I16, I32, I64, U16, U32, U64, BOOL, F16, BF16, F32, F64, C64, C128 = range(15)


class Operator(IntEnum):
    """Reductions (reduce.hpp)."""

    SUM, PRODUCT, MIN, MAX, AND, OR, XOR = range(7)


class COptions(ctypes.Structure):
    """`hx_options`: times in ns and sizes in bytes; 0 keeps the default."""

    _fields_ = [
        *((name, c_int64) for name in ("period", "connect", "answer", "attempt", "retry", "rest", "longest_rest", "steady")),
        *((name, c_int64) for name in ("acknowledge", "eager_bytes", "keep_bytes", "eager_memory", "rail_bytes")),
        *((name, c_int64) for name in ("window_bytes", "turn_bytes", "concurrent")),
    ]


class CCall(ctypes.Structure):
    """`hx_call`"""

    _fields_ = [
        ("plan", c_int64),
        ("source", c_void_p),
        ("out", c_void_p),
        ("source_bytes", c_int64),
        ("out_bytes", c_int64),
        ("dtype", c_int32),
        ("op", c_int32),
        ("divisor", c_int64),
        ("timeout", c_int64),
        ("fingerprint", c_int64),
        ("name", c_int64),
        ("first", c_uint32),
        ("waits", c_uint32),
        ("external", c_uint32),
        ("unused", c_uint32),
    ]


class CEvent(ctypes.Structure):
    """`hx_event`"""

    _fields_ = [
        ("event", c_int32),
        ("peer", c_int32),
        ("op", c_int64),
        ("a", c_int64),
        ("b", c_int64),
        ("at", c_int64),
        ("text", c_char * TEXT_BYTES),
    ]


class CRailCounters(ctypes.Structure):
    """`hx_rail_counters`"""

    _fields_ = [
        *((name, c_int64) for name in ("bytes_sent", "bytes_received", "frames_sent", "frames_received")),
        *((name, c_int64) for name in ("fragments_again", "duplicates", "failures", "returns")),
    ]


class CLoopCounters(ctypes.Structure):
    """`hx_loop_counters`"""

    _fields_ = [
        *((name, c_int64) for name in ("turns", "caller_turns", "sleeps", "kicks", "system_calls", "spins_ns", "driven_ns")),
    ]


_ENGINE, _NUMBERS = c_void_p, POINTER(c_int64)
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "hx_abi": (c_int32, ()),
    "hx_protocol": (c_int32, ()),
    "hx_build": (c_char_p, ()),
    "hx_new": (_ENGINE, (POINTER(COptions),)),
    "hx_free": (None, (_ENGINE,)),
    "hx_begin": (c_int32, (_ENGINE, c_uint32, c_int32, c_int32, POINTER(c_int32))),
    "hx_rail_up": (c_int32, (_ENGINE, c_int32, c_int32, c_uint32, c_int32)),
    "hx_rail_up_memory": (c_int32, (_ENGINE, c_int32, c_int32, c_uint32, c_int32, c_int32, c_int32)),
    "hx_ring_bytes": (c_int64, ()),
    "hx_rail_down": (c_int32, (_ENGINE, c_int32, c_int32, c_int32, c_char_p)),
    "hx_rail_slow": (c_int32, (_ENGINE, c_int32, c_int32)),
    "hx_lose": (c_int32, (_ENGINE, c_int32, c_char_p)),
    "hx_abort": (c_int32, (_ENGINE, c_char_p)),
    "hx_abort_signal": (None, (_ENGINE,)),
    "hx_finish": (c_int32, (_ENGINE, c_int64)),
    "hx_plan": (c_int64, (_ENGINE, c_int32, _NUMBERS, c_int64, _NUMBERS, _NUMBERS, c_int64, c_char_p, c_int64)),
    "hx_plan_free": (c_int32, (_ENGINE, c_int64)),
    "hx_submit": (c_int64, (_ENGINE, POINTER(CCall))),
    "hx_wait": (c_int32, (_ENGINE, c_int64, c_int64)),
    "hx_status": (c_int32, (_ENGINE, c_int64)),
    "hx_node_done": (c_int32, (_ENGINE, c_int64, c_int32)),
    "hx_send": (c_int32, (_ENGINE, c_int32, c_int64, c_uint32, c_void_p, c_int64)),
    "hx_receive": (c_int32, (_ENGINE, c_int32, c_int64, c_uint32, c_void_p, c_int64)),
    "hx_events": (c_int32, (_ENGINE, POINTER(CEvent), c_int32)),
    "hx_event_fd": (c_int32, (_ENGINE,)),
    "hx_ended": (c_int32, (_ENGINE, POINTER(CEvent))),
    "hx_announce": (c_int32, (_ENGINE, c_int32)),
    "hx_counters": (c_int32, (_ENGINE, c_int32, c_int32, POINTER(CRailCounters))),
    "hx_loop": (c_int32, (_ENGINE, POINTER(CLoopCounters))),
    "hx_print": (c_int64, (_ENGINE, c_char_p, c_int64)),
    "hx_reduce": (c_int32, (c_int32, c_int32, c_int64, c_void_p, c_void_p, c_void_p, c_int64)),
    "hx_element_bytes": (c_int32, (c_int32,)),
}
"""Name of a function -> what it returns, and its parameters."""


def load(path: Path) -> ctypes.CDLL:
    """The library of this file. Raises ConfigError if it cannot be loaded, or has another ABI than this package."""
    try:
        found = ctypes.CDLL(str(path))
        found.hx_abi.restype = c_int32
        abi = found.hx_abi()
    except (OSError, AttributeError) as error:
        raise ConfigError("helixrt.native", path, f"the data plane cannot be loaded: {' '.join(str(error).split())}") from None
    if abi != ABI:
        raise ConfigError("helixrt.native", path, f"has ABI {abi}, and this helixrt needs {ABI}; install helixrt again")
    for name, (result, parameters) in FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, parameters
    return found


@functools.cache
def library() -> ctypes.CDLL:
    """The library of this process. The first call may compile it, which takes seconds. Raises ConfigError as `load` and
    `build.library_path` do."""
    return load(build.library_path())
