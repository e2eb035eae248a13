"""How tests wait: for a condition, and so long that only what hangs takes longer, also on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENT_S = 120.0
Value = TypeVar("Value")


def until(condition: Callable[[], Value], what: str | Callable[[], str] = "it", limit_s: float = PATIENT_S) -> Value:
    """The condition's first true value. `what` is what did not happen; a function is called for it at the end."""
    end_s, pause_s = time.monotonic() + limit_s, 0.001
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise AssertionError(f"{what if isinstance(what, str) else what()} did not happen in {limit_s:g} s")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
    return value
