"""How a process with `helixrt.init` ends: what it tells the server when its replica leaves, is lost, or its loop was left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from helixrt.errors import Departed
from helixrt.job import init


@dataclass
class Session:
    began: bool
    left_early: bool


@dataclass
class Here:
    session: Session
    departed: Departed | None


@contextmanager
def recorded(ends: list[BaseException | None]) -> Iterator[None]:
    try:
        yield
        ends.append(None)
    except BaseException as error:
        ends.append(error)
        raise


def closed(session: Session, departed: Departed | None) -> BaseException | None:
    """With what the rank ends."""
    ends: list[BaseException | None] = []
    stack = ExitStack()
    stack.enter_context(recorded(ends))
    here: Any = Here(session, departed)
    init._close(stack, here, os.getpid())
    (end,) = ends
    return end


@pytest.mark.parametrize("began", [False, True])
def test_a_replica_that_left_tells_that_and_no_misuse(began: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter forgets a SystemExit: SIGTERM before the loop, and in it."""
    monkeypatch.delattr(sys, "last_exc", raising=False)
    monkeypatch.delattr(sys, "last_value", raising=False)
    left = Departed("SIGTERM to r1.pp0; the replica left after step 3")
    assert closed(Session(began, left_early=began), left) is left


@pytest.mark.parametrize("left_early", [False, True], ids=["behind the loop", "in the loop"])
def test_an_exception_of_the_program_is_told(left_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("bad")
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    assert closed(Session(True, left_early), None) is error
    if not left_early:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        assert closed(Session(True, left_early), None) is None, "an interactive session goes on after an error"


def test_a_loop_that_ended_ends_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_exc", raising=False)
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert closed(Session(True, False), None) is None
