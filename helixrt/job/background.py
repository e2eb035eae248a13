"""A question whose answer may take long, to a storage for example, for a thread that must not wait for it.

In: a call, and what it is about. Out: its result, as soon as there is one; until then None.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

QUICK_S = 0.1  # the asking thread waits so long: most answers are there by then


class Background(Generic[T]):
    """One question at a time; `ask` is called by one thread. A call runs in a daemon thread, which ends with it and holds up no
    exit of the process; how long it may take is for the call to limit."""

    def __init__(self) -> None:
        self._about: Hashable = None
        self._done: threading.Event | None = None  # of the question under way, or of one whose answer was not taken
        self._answers: list[T] = []

    def ask(self, about: Hashable, call: Callable[[], T], wait_s: float = QUICK_S) -> T | None:
        """What `call` gives, if it has done so within `wait_s`, or by the time that the same is asked again. None: not yet, or
        it has raised an OSError; then asking again calls again."""
        if self._done is None or (self._about != about and self._done.is_set()):
            self._about, self._done, self._answers = about, threading.Event(), []
            arguments = (call, self._done, self._answers)
            threading.Thread(target=_answer, args=arguments, name="helixrt-question", daemon=True).start()
        if self._about != about or not self._done.wait(wait_s):
            return None
        self._done = None
        return self._answers[0] if self._answers else None

    def settled(self, wait_s: float) -> bool:
        """Whether no call is under way, within `wait_s`."""
        return self._done is None or self._done.wait(wait_s)


def _answer(call: Callable[[], T], done: threading.Event, answers: list[T]) -> None:
    try:
        answers.append(call())
    except OSError:
        pass  # no answer
    finally:
        done.set()
