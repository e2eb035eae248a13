"""The library's engine as a resource of this process: what it uses stays alive, and it is freed once, before that."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from helixrt.errors import Fatal, Retryable
from helixrt.native.library import COptions, library

_LEAVE_S = 5.0  # for other threads to leave the library when an engine is closed: an abort wakes them
_FORKED = "this engine belongs to the process that forked this one; make another one here"
_CLOSED = "the engine of the data plane is closed"
_OVER = (errno.ECANCELED, errno.ECONNABORTED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN, errno.ETIMEDOUT)
_SENTENCES = {
    **dict.fromkeys(_OVER, "the generation is over"),
    errno.ETIMEDOUT: "time ran out",
    errno.EBUSY: "it is in use",
    errno.EINVAL: "a rank, rail, number or length does not fit the generation",
    errno.ENOENT: "there is no such thing in this generation",
}


@dataclass(slots=True)
class Held:
    """What the library may use of one generation: by number of the operation, and by (sent, peer, op, index) of the message.

    An operation has a negative number until the library's is known.
    """

    over: bool = False
    operations: dict[int, object] = field(default_factory=dict)
    messages: dict[tuple[bool, int, int, int], object] = field(default_factory=dict)

    def end(self) -> None:
        self.over = True
        self.operations.clear()
        self.messages.clear()


class Handle:
    """The library's engine, and what keeps it from being freed while a thread is in it.

    Apart from `Engine`, so that it can be closed when that is collected.
    """

    def __init__(self, options: COptions) -> None:
        self.library = library()
        self.closed = ""  # why it cannot be used, once it cannot
        self.held: deque[Held] = deque()  # one for each generation whose memory may be in use, the newest last
        self._inside: list[int] = []  # the threads in the library; append and remove are atomic
        self._engine: int | None = self.library.hx_new(ctypes.byref(options))
        if not self._engine:
            raise Fatal("the data plane cannot start: no file descriptors or threads are left (ulimit -n, ulimit -u)")
        _handles().add(self)

    def call(self, function: Any, *arguments: object) -> Any:
        """What the function of the library returns. Raises Fatal once the engine is closed."""
        thread = threading.get_ident()
        self._inside.append(thread)  # before `closed` is read: `close` sets that first, and then looks who is inside
        try:
            if self.closed:
                raise Fatal(self.closed)
            return function(self._engine, *arguments)
        finally:
            self._inside.remove(thread)

    def close(self) -> None:
        """End everything, then let go of the memory. A second call does nothing."""
        if self.closed:
            return
        self.closed = _CLOSED
        self.library.hx_abort(self._engine, b"the engine is closed")
        deadline = time.monotonic() + _LEAVE_S
        me = threading.get_ident()  # a signal handler may close what its thread waits for
        while (others := any(thread != me for thread in self._inside)) and time.monotonic() < deadline:
            time.sleep(0.0005)
        if not others:  # else that thread keeps this object, and with it the memory
            self.library.hx_free(self._engine)
            self.held.clear()

    def forget(self) -> None:
        """In the child of a fork: close its copies of the sockets."""
        if not self.closed:
            self.closed = _FORKED
            self.library.hx_free(self._engine)
            self.held.clear()


@functools.cache
def _handles() -> weakref.WeakSet[Handle]:
    """All of this process, which a child of it forgets."""
    found: weakref.WeakSet[Handle] = weakref.WeakSet()

    def forget_all() -> None:
        for handle in list(found):
            handle.forget()
        found.clear()

    os.register_at_fork(after_in_child=forget_all)
    return found


def memory_of(of: Any) -> tuple[int | None, int, object]:
    """Address and length of the bytes of a tensor or a buffer, and what keeps them in place."""
    if of is None:
        return None, 0, None
    if hasattr(of, "data_ptr"):
        if not (of.is_cpu and of.is_contiguous()):
            given = f"{tuple(of.shape)} with strides {of.stride()} on {of.device}"
            raise Fatal(f"the data plane needs a contiguous tensor on the CPU, not one of {given}")
        return of.data_ptr(), of.nbytes, of
    view = memoryview(of)
    if not view.nbytes:
        return None, 0, None
    view = view.cast("B")
    if isinstance(of, bytes):
        return ctypes.cast(ctypes.c_char_p(of), ctypes.c_void_p).value, len(of), of
    kept = (ctypes.c_char * len(view)).from_buffer(view)
    return ctypes.addressof(kept), len(view), kept


def check(result: int, what: str) -> int:
    """The result of a function of the library, unless it is an error."""
    if result >= 0:
        return result
    number = -result
    if number == errno.ECHILD:
        raise Fatal(f"cannot {what}: {_FORKED}")
    text = _SENTENCES.get(number) or os.strerror(number)
    error = Retryable if number in _OVER else Fatal
    raise error(f"cannot {what}: {text} ({errno.errorcode.get(number, number)})")
