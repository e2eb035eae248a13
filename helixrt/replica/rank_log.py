"""Where a rank's output goes, and what its last lines say about its end.

Launchers name the logs by these rules and put the cause they find in there into `RankExit.reason`.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sysconfig
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helixrt.errors import Departed, causes_of, root_of
from helixrt.replica.contracts import Coordinate

_TAIL_BYTES = 1 << 18  # native stacks of all threads fit into it
_NATIVE_END = "Fatal Python error:"  # of Python's faulthandler
_NATIVE_FRAMES = 40  # of the innermost calls, which such a stack begins with
_NATIVE_STACK = re.compile(r"^SIG[A-Z]+\(\d+\), PID: \d+, Thread \d+:")  # of torch, one for each thread
_NATIVE_HANDLER = "FatalSignalHandler::fatalSignalHandler("  # in the stack of the thread that came to the signal
_WORKER_ERROR = re.compile(r"Caught \w+ in (DataLoader worker process \d+)")
_ERROR_LINE = re.compile(rf"^(?:[\w.]*(?:Error|Exception|Fatal|Retryable|MissingExtra|Interrupt|Exit)\b|{_NATIVE_END})")


_END_LINE = re.compile(r"^rank ended \[(\w*)\]: (.*)$")
_MOST_CHARACTERS = 1000  # of such a line
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THE_USERS = (*(f"{folder}/" for folder in (*_LIBRARIES, Path(__file__).parents[1])), "<")  # "<stdin>"


@dataclass(frozen=True)
class RankEnd:
    """Why a rank ended, in one line, and at which line of the user's program. `error`: the same for the same error at the same
    place of the program, on every host; "" where that is not known."""

    why: str
    error: str = ""

    @staticmethod
    def of(error: BaseException) -> RankEnd:
        """By the root cause of what has ended the rank."""
        root = root_of(error)
        module, kind = type(root).__module__, type(root).__qualname__
        if module != "builtins" and not module.startswith("__"):  # the user's script has such a name
            kind = f"{module}.{kind}"
        frames = [frame for each in causes_of(error) for frame in traceback.extract_tb(each.__traceback__)]
        own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
        at = f", at {_place(own[-1])}" if own else ""
        why = " ".join((str(root) if isinstance(root, Departed) else f"{kind}: {root}{at}").split())
        place = [kind, *map(_place, frames)]
        return RankEnd(why[:_MOST_CHARACTERS], f"{zlib.crc32(repr(place).encode()):08x}")

    @property
    def line(self) -> str:
        """For the rank's log, where `rank_end` finds it."""
        return f"rank ended [{self.error}]: {self.why}"


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}"


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
    """The line of the log with the reason why the process ended, or "": `rank_end`'s."""
    return rank_end(log).why


def rank_end(log: Path) -> RankEnd:
    """What the log says of the end of its process: what a rank has said itself, or an end in native code after it; else the
    exception's line of the last traceback's first cause; without a traceback, the last line that is no notice of helixrt."""
    lines = _tail(log)
    said = next((found for line in reversed(lines) if (found := _END_LINE.match(line))), None)
    last = _last_traceback(lines)
    native = _native_end(lines, last)
    if said is not None and not native:
        return RankEnd(said[2], said[1])
    return RankEnd(native[0].strip() if native else _last_words(lines, last, log.name.partition(".inc")[0]))


def _last_words(lines: Sequence[str], first: int | None, label: str) -> str:
    if first is not None:
        for at, line in enumerate(lines[first + 1 :], first + 1):
            if line and not line[0].isspace():
                return _with_remedy(_of_worker(lines, at) or line.strip())
    for line in reversed(lines):
        if _ERROR_LINE.match(line):
            return line.strip()
    written = [line.strip() for line in lines if line.strip() and not line.startswith(f"{label}: ")]
    return written[-1] if written else ""


def _of_worker(lines: Sequence[str], at: int) -> str:
    """Of an error that a data loader passes on in line `at`: that of its worker process; "" for any other."""
    passed_on = _WORKER_ERROR.search(lines[at])
    found = (line for line in lines[at + 1 :] if line and not line[0].isspace() and not line.startswith("Original Traceback"))
    return f"{next(found, lines[at]).strip()} ({passed_on[1]})" if passed_on else ""


def _with_remedy(line: str) -> str:
    full = "shared memory" in line and os.strerror(errno.ENOSPC) in line
    return f"{line}: /dev/shm is full; give it more (docker run --shm-size), or take fewer workers" if full else line


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
