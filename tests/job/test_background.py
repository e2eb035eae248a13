"""Questions that may take long do not hold up who asks."""

from __future__ import annotations

import threading
import time

from helixrt.job.background import Background
from tests.waiting import until


def test_a_quick_answer_is_there_at_once_and_a_slow_one_when_the_same_is_asked_again() -> None:
    questions, go = Background[int](), threading.Event()
    assert questions.ask("a", lambda: 1, 60.0) == 1
    begin_s = time.monotonic()
    assert questions.ask("b", lambda: go.wait(120) + 2, 0.01) is None
    assert questions.ask("c", lambda: 9, 0.01) is None, "one at a time"
    assert time.monotonic() - begin_s < 60.0
    go.set()
    assert questions.ask("b", lambda: 9, 120.0) == 3, "of the call that was begun"
    assert questions.ask("b", lambda: 4, 60.0) == 4


def test_an_answer_that_nobody_wants_any_more_makes_room_and_a_failure_is_no_answer() -> None:
    questions, go = Background[int](), threading.Event()
    assert questions.ask("old", lambda: go.wait(60) + 0, 0.0) is None
    go.set()
    assert until(lambda: questions.ask("new", lambda: 5, 0.01)) == 5

    def broken() -> int:
        raise ConnectionResetError("reset by peer")

    assert questions.ask("x", broken, 60.0) is None
    assert questions.ask("x", lambda: 6, 60.0) == 6
