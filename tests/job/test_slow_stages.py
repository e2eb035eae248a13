"""Stages that are slowed down on purpose: which, by how much, in which steps; wrong settings are told before a start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixrt.errors import ConfigError
from helixrt.job.config import ChaosConfig, JobConfig, MeshConfig, SlowConfig
from helixrt.job.slow_stages import check_slow, slowdown_of

JOB = JobConfig(mesh=MeshConfig(replicas=2, pp=4))


def test_a_stage_is_slow_from_the_first_step_until_the_end() -> None:
    slow = (SlowConfig(2, 1.5, (20, 60)), SlowConfig(2, 2.0, (50, 70), replica=1), SlowConfig(1))
    assert slowdown_of(slow, 0, 0) is None
    first, second, always = slowdown_of(slow, 0, 2), slowdown_of(slow, 1, 2), slowdown_of(slow, 1, 1)
    assert first is not None and second is not None and always is not None
    assert [first(step).factor for step in (19, 20, 59, 60)] == [1.0, 1.5, 1.5, 1.0]
    assert [second(step).factor for step in (49, 50, 59, 60, 70)] == [1.5, 3.0, 3.0, 2.0, 1.0], "several multiply"
    assert always(1) == always(10_000) == (1.5, 0.0)


def test_of_several_least_times_the_longest_holds() -> None:
    slow = (SlowConfig(0, 1.0, least_ms=10.0), SlowConfig(0, 1.0, (5, 9), least_ms=30.0), SlowConfig(0, 1.0, least_ms=20.0))
    times = slowdown_of(slow, 0, 0)
    assert times is not None
    assert [times(step) for step in (4, 5, 9)] == [(1.0, 0.020), (1.0, 0.030), (1.0, 0.020)]


@pytest.mark.parametrize(
    ("slow", "line"),
    [
        (SlowConfig(4), r"chaos.slow\[0\].stage=4: must be a stage, below mesh.pp=4"),
        (SlowConfig(1, 0.5), r"factor=0.5: must be at least 1"),
        (SlowConfig(1, least_ms=-1.0), r"least_ms=-1.0: must be a number, at least 0"),
        (SlowConfig(1, replica=2), r"replica=2: must be below mesh.replicas=2, or -1"),
        (SlowConfig(1, 2.0, (5,)), r"steps=\[5\]: must be \[first, end\]"),
        (SlowConfig(1, 2.0, (9, 9)), r"steps=\[9, 9\]: must be \[first, end\]"),
        (SlowConfig(1, 2.0, (101, 110)), r"must begin at most at steps=100"),
    ],
)
def test_wrong_settings_are_told(slow: SlowConfig, line: str) -> None:
    (error,) = check_slow(replace(JOB, chaos=ChaosConfig(slow=(slow,))), 100)
    with pytest.raises(ConfigError, match=line):
        raise error
    assert not list(check_slow(replace(JOB, chaos=ChaosConfig(slow=(SlowConfig(3, 2.0, (1, 101)),))), 100))


def test_a_model_that_is_one_stage_cannot_have_a_slow_one() -> None:
    (error,) = check_slow(JobConfig(mesh=MeshConfig(pp=1), chaos=ChaosConfig(slow=(SlowConfig(0),))), 0)
    assert "needs mesh.pp above 1" in str(error)
