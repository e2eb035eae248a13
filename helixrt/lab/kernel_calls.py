"""When given functions of the guest's kernel were called, on the clock of `time.monotonic()`.

In: names of kernel functions. Out: their calls, by kprobes in a trace buffer of our own. So a failure can be timed from the
moment at which the kernel makes it, and not from that of a command that asks for it: of a system call that takes a NIC down,
most of the time under emulation goes by before and after that. Runs in the guest as root.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from helixrt.lab.nics import CALL_S, NicError

_TRACING = Path("/sys/kernel/tracing")
_NAME = "helixrt"
_LINE = re.compile(rb"\s(\d+\.\d+): (\w+): ")


class KernelCalls:
    """Raises NicError where the kernel has no such functions, or no kprobes."""

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = tuple(functions)
        try:
            if not (_TRACING / "trace").exists():
                mount = ["mount", "-t", "tracefs", "none", str(_TRACING)]
                subprocess.run(mount, check=True, capture_output=True, timeout=CALL_S)
            self._own = _TRACING / "instances" / _NAME
            self._own.mkdir(exist_ok=True)
            _put(self._own / "trace_clock", "mono")
            for function in self._functions:
                if not (_TRACING / "events" / _NAME / function).exists():
                    _put(_TRACING / "kprobe_events", f"p:{_NAME}/{function} {function}\n", os.O_APPEND)
                _put(self._own / "events" / _NAME / function / "enable", "1")
        except (OSError, subprocess.SubprocessError) as error:
            raise NicError(f"this kernel cannot report when {', '.join(functions)} are called: {error}") from error

    def clear(self) -> None:
        _put(self._own / "trace", "", os.O_TRUNC)

    def first(self, function: str, since_s: float) -> float | None:
        """The first call since then, of those after `clear`; monotonic seconds."""
        name = function.encode()
        calls = (float(found[1]) for found in _LINE.finditer((self._own / "trace").read_bytes()) if found[2] == name)
        return min((call for call in calls if call >= since_s), default=None)

    def close(self) -> None:
        for function in self._functions:
            _put(self._own / "events" / _NAME / function / "enable", "0")
        self._own.rmdir()
        for function in self._functions:
            _put(_TRACING / "kprobe_events", f"-:{_NAME}/{function}\n", os.O_APPEND)


def _put(path: Path, words: str, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags)
    try:
        os.write(descriptor, words.encode())
    finally:
        os.close(descriptor)
