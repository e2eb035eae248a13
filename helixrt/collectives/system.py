"""What a communicator uses of the operating system: clock, lock, threads and ways to sleep. A simulated world gives its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from helixrt.collectives.handle import Latch
from helixrt.transport.poller import Poller


class System:
    """One process. `me` names the calling thread; `lock` is an exclusive lock for a `with` statement."""

    now = staticmethod(time.monotonic)
    me = staticmethod(threading.get_ident)
    lock: Callable[[], Any] = staticmethod(threading.Lock)
    latch = staticmethod(Latch)
    poller = staticmethod(Poller)
    stop = staticmethod(threading.Event)

    @staticmethod
    def thread(run: Callable[..., None], arguments: tuple[Any, ...], name: str) -> threading.Thread:
        """A thread that does not keep the process; not started yet."""
        return threading.Thread(target=run, args=arguments, name=name, daemon=True)

    @staticmethod
    def is_current(thread: threading.Thread | None) -> bool:
        """Whether `thread` is the one that asks."""
        return thread is threading.current_thread()


REAL = System()
