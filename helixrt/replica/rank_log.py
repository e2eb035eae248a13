"""Where a rank's output goes, and what its last lines say about its end.

Launchers name the logs by these rules and put the cause they find in there into `RankExit.reason`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from helixrt.replica.contracts import Coordinate

_TAIL_BYTES = 1 << 18  # native stacks of all threads fit into it
_NATIVE_END = "Fatal Python error:"  # of Python's faulthandler
_NATIVE_FRAMES = 40  # of the innermost calls, which such a stack begins with
_NATIVE_STACK = re.compile(r"^SIG[A-Z]+\(\d+\), PID: \d+, Thread \d+:")  # of torch, one for each thread
_NATIVE_HANDLER = "FatalSignalHandler::fatalSignalHandler("  # in the stack of the thread that came to the signal
_ERROR_LINE = re.compile(rf"^(?:[\w.]*(?:Error|Exception|Fatal|Retryable|MissingExtra|Interrupt|Exit)\b|{_NATIVE_END})")


def rank_label(coordinate: Coordinate) -> str:
    """Names a rank in logs and records, as in r1.pp0; the other coordinates are named where they are not 0: r1.pp0.dp1."""
    rest = "".join(f".{k}{v}" for k, v in (("dp", coordinate.dp_shard), ("cp", coordinate.cp), ("tp", coordinate.tp)) if v)
    return f"r{coordinate.replica}.pp{coordinate.pp}{rest}"


def log_name(coordinate: Coordinate, incarnation: int) -> str:
    """As in r1.pp0.inc2.log."""
    return f"{rank_label(coordinate)}.inc{incarnation}.log"


def describe_code(code: int) -> str:
    """An exit status in words: 'killed by SIGKILL', 'exit code 70'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_traceback(log: Path) -> str:
    """The last traceback of the log, from its first cause on, with what the rank said after it; of a rank that ended in native
    code, what its thread ran there (`telling.tell_native_ends`); "" without one."""
    lines = _tail(log)
    first = _last_traceback(lines)
    return "\n".join(_native_end(lines, first) or ([] if first is None else lines[first:]))


def last_error(log: Path) -> str:
    """The line of the log with the reason why the rank ended, or "".

    It is the exception's line of the last traceback's first cause; without a traceback, the last line.
    """
    lines = _tail(log)
    first = _last_traceback(lines)
    if native := _native_end(lines, first):
        return native[0].strip()
    if first is not None:
        for line in lines[first + 1 :]:
            if line and not line[0].isspace():
                return line.strip()
    for line in reversed(lines):
        if _ERROR_LINE.match(line):
            return line.strip()
    written = [line.strip() for line in lines if line.strip()]
    return written[-1] if written else ""


def _tail(log: Path) -> list[str]:
    try:
        with open(log, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _native_end(lines: Sequence[str], traceback: int | None) -> list[str]:
    """The last end in native code, and the innermost calls of the thread that came to it; all stacks if that is no thread of
    Python's. With its native stack, if there is one.
    Nothing if there was none after the last traceback, which begins in line `traceback`."""
    begin = max((i for i, line in enumerate(lines) if line.startswith(_NATIVE_END)), default=-1)
    if begin < (0 if traceback is None else traceback):
        return []
    found = next((i for i, line in enumerate(lines[begin:], begin) if line.startswith("Current thread ")), None)
    if found is None:
        return list(lines[begin:])
    end = next((i for i, line in enumerate(lines[found:], found) if not line.strip()), len(lines))
    return [lines[begin], *lines[found : min(end, found + 1 + _NATIVE_FRAMES)], *_native_stack(lines[end:])]


def _native_stack(lines: Sequence[str]) -> Sequence[str]:
    """That of the thread that came to the signal, cut at its outer end; nothing without one."""
    begin = 0
    for i, line in enumerate(lines):
        if _NATIVE_STACK.match(line):
            begin = i
        elif _NATIVE_HANDLER in line and _NATIVE_STACK.match(lines[begin]):
            end = next((j for j in range(i, len(lines)) if not lines[j].strip()), len(lines))
            return lines[begin : min(end, i + 1 + _NATIVE_FRAMES)]
    return ()


def _last_traceback(lines: Sequence[str]) -> int | None:
    """The line where it begins. Chained tracebacks stand together: the first of the chain is the root."""
    tracebacks = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not tracebacks:
        return None
    first = tracebacks[-1]
    for earlier, later in zip(reversed(tracebacks[:-1]), reversed(tracebacks[1:]), strict=True):
        between = [line for line in lines[earlier:later] if line.strip()]
        if not between[-1].startswith(("The above exception was", "During handling of the above")):
            break
        first = earlier
    return first
