"""Messages of processes that go on: what cannot be printed is lost, and nothing else.

Standard output and standard error may be files on a full disk, or pipes whose reader has gone. A thread that ended because it
could not print a message would take checkpoints or the run with it.
"""

from __future__ import annotations

import faulthandler
import sys
import traceback
from contextlib import suppress
from types import TracebackType
from typing import TextIO


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print a line, to standard error by default, at once."""
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(text, file=sys.stderr if stream is None else stream, flush=True)


def tell_traceback(error: BaseException, at: TracebackType | None = None) -> None:
    """Print it to standard error; `at`: from this frame on."""
    with suppress(OSError, ValueError):
        traceback.print_exception(type(error), error, error.__traceback__ if at is None else at)


def tell_native_ends() -> None:
    """From now on a process that ends by SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT writes first to standard error what each of
    its threads ran. Nothing where that is on already, or where standard error is no file."""
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        if not faulthandler.is_enabled():
            faulthandler.enable()


def flush_all() -> None:
    """Before a process ends by `os._exit`, or forks."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def lose_unprinted() -> None:
    """At the end of a process: close standard error if it cannot take what is left in its buffer. The interpreter would try
    again, fail, and change the process's exit code to 120. Standard output is the program's own: there a loss is an error."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            sys.stderr.close()  # it fails too, and discards the text; the descriptor stays open
