"""A rank's exit code says what the controller has to know of its end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixrt.errors import ConfigError, Departed, Diverged, Fatal, MisuseError, Retryable, StartAgain, root_of
from helixrt.job import session_rank
from helixrt.job.policies import CONFIG_EXIT, DIVERGED_EXIT, FATAL_EXIT, LEFT_EXIT, MISUSE_EXIT, RELOAD_EXIT, RETRY_EXIT
from helixrt.job.session_config import SessionConfig
from helixrt.job.train_function import RANK_VARIABLE
from helixrt.passes.errors import CaptureError
from helixrt.replica.contracts import Coordinate, RankSpec
from helixrt.replica.rank_log import RankEnd, rank_end

SPEC = RankSpec("run", Coordinate(0), 0, "s", "l", "out", "x", 0.0, SessionConfig().to_plain())


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("transport.rails", "eth7", "no such NIC"), CONFIG_EXIT),
        (CaptureError("model.py:3", "it prints", "do not"), MISUSE_EXIT),
        (caused(RuntimeError("the training has failed"), MisuseError("no commit")), MISUSE_EXIT),
        (MisuseError("no commit"), MISUSE_EXIT),
        (caused(RuntimeError("give me this package"), ModuleNotFoundError("No module named 'none'")), CONFIG_EXIT),
        (SyntaxError("invalid syntax"), CONFIG_EXIT),
        (Diverged("replica 1 is odd"), DIVERGED_EXIT),
        (Departed("SIGTERM"), LEFT_EXIT),
        (Fatal("the device is lost"), FATAL_EXIT),
        (ValueError("in the loss"), FATAL_EXIT),
        (StartAgain("no member holds a state of the chain"), RELOAD_EXIT),
        (Retryable("a stage of this replica was lost"), RETRY_EXIT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_code_tells_the_kind_of_the_end(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(spec: RankSpec, config: SessionConfig) -> None:
        raise error

    monkeypatch.setattr(session_rank, "RankRuntime", begin)
    monkeypatch.setenv(RANK_VARIABLE, "")  # `run_rank` sets it
    assert session_rank.run_rank(SPEC) == code
    assert len({CONFIG_EXIT, FATAL_EXIT, RELOAD_EXIT, RETRY_EXIT}) == 4


@pytest.mark.parametrize(
    ("at", "name"),
    [
        (Coordinate(2), "r2"),
        (Coordinate(2, dp_shard=1), "r2.1"),
        (Coordinate(0, pp=1, tp=1), "r0.pp1.tp1"),
        (Coordinate(0, cp=3), "r0.cp3"),
    ],
    ids=str,
)
def test_a_rank_is_named_by_its_place(at: Coordinate, name: str) -> None:
    assert session_rank.place_in(replace(SPEC, coordinate=at), None) == f"{name} (incarnation 0)"


def raised(outer: BaseException, inner: Exception, explicit: bool) -> BaseException:
    try:
        try:
            raise inner
        except Exception as error:
            if explicit:
                raise outer from error
            raise outer  # noqa: B904
    except BaseException as error:
        return error


def test_the_root_cause_is_the_first_error_of_helixrt_else_the_first_of_all() -> None:
    mine, ours, theirs = ValueError("training failed"), CaptureError("a.py:1", "it prints", "do not"), KeyError("inputs")
    assert root_of(raised(mine, raised(ours, theirs, True), True)) is ours
    assert root_of(raised(ValueError("mine"), theirs, False)) is theirs
    first, later = Retryable("a peer is lost"), Fatal("the end of it failed, too")
    assert root_of(raised(later, first, False)) is first, "an error of a shutdown does not mask it"
    assert root_of(raised(ConfigError("rails", "x", "is gone"), Retryable("no answer"), True)).__class__ is ConfigError
    assert root_of(raised(left := Departed("SIGTERM"), first, False)) is left


def test_a_rank_says_its_root_cause_in_a_line_that_is_found_in_its_log(tmp_path: Path) -> None:
    """The same error at the same place is known as such, whatever its message says."""

    def ends(*numbers: int) -> list[RankEnd]:
        found = []
        for number in numbers:
            try:
                raise ValueError(f"record {number}\n  is bad")
            except ValueError as error:
                found.append(RankEnd.of(error))
        return found

    one, two = ends(1, 2)
    place = f"{Path(__file__).name}:{ends.__code__.co_firstlineno + 4}"
    assert one.why == f"ValueError: record 1 is bad, at {place}"
    assert one.error == two.error != RankEnd.of(ValueError("record 1")).error
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\nKeyError: 3\n{one.line}\nshutting down\n")
    assert rank_end(tmp_path / "log") == one
    (tmp_path / "log").write_text(f"{one.line}\nFatal Python error: Segmentation fault\n")
    assert rank_end(tmp_path / "log") == RankEnd("Fatal Python error: Segmentation fault")


@pytest.mark.parametrize("error", [ValueError("a bug"), Departed("SIGTERM"), None])
def test_the_others_are_told_of_an_error_before_the_exchange_is_broken(error: BaseException | None) -> None:
    order = list[str]()
    runtime: Any = SimpleNamespace(context=SimpleNamespace(group_world_size=1), broken=lambda error: order.append("told"))
    runtime.keep_state = lambda: order.append("saved")
    host = session_rank.RankHost(runtime)
    host._open.callback(order.append, "closed")
    with suppress(ValueError, Departed), host:
        if error is not None:
            raise error
    assert order == (["told", "saved", "closed"] if isinstance(error, ValueError) else ["closed"])
