"""Breaks one named line of a function, to see whether a world notices."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable

import pytest

Line = tuple[object, str, str, str]  # owner, name of its function, the line or a part of it, what stands there instead


def break_line(patch: pytest.MonkeyPatch, line: Line) -> None:
    """The function with its source changed. A line that is not there any more, or twice, fails the test."""
    owner, name, old, new = line
    function: Callable[..., object] = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} no longer has the line {old!r}, or has it more than once"
    made: dict[str, object] = {}
    code = compile("from __future__ import annotations\n" + source.replace(old, new), name, "exec")
    exec(code, function.__globals__, made)
    patch.setattr(owner, name, made[name])
