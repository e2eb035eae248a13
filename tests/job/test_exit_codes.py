"""A rank's exit code says what the controller has to know of its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixrt.errors import ConfigError, Fatal, Retryable, StartAgain
from helixrt.job import session_rank
from helixrt.job.policies import CONFIG_EXIT, FATAL_EXIT, RELOAD_EXIT
from helixrt.job.rank import RETRY_CODE
from helixrt.job.session_config import SessionConfig
from helixrt.job.train_function import RANK_VARIABLE
from helixrt.replica.contracts import Coordinate, RankSpec

SPEC = RankSpec("run", Coordinate(0), 0, "s", "l", "out", "x", 0.0, SessionConfig().to_plain())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("transport.rails", "eth7", "no such NIC"), CONFIG_EXIT),
        (Fatal("the device is lost"), FATAL_EXIT),
        (ValueError("in the loss"), FATAL_EXIT),
        (StartAgain("no member holds a state of the chain"), RELOAD_EXIT),
        (Retryable("a stage of this replica was lost"), RETRY_CODE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_code_tells_the_kind_of_the_end(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(spec: RankSpec, config: SessionConfig) -> None:
        raise error

    monkeypatch.setattr(session_rank, "RankRuntime", begin)
    monkeypatch.setenv(RANK_VARIABLE, "")  # `run_rank` sets it
    assert session_rank.run_rank(SPEC) == code
    assert len({CONFIG_EXIT, FATAL_EXIT, RELOAD_EXIT, RETRY_CODE}) == 4


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
