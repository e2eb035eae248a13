"""`chaos.link`: what is written, what is refused, and how much later messages come."""

from __future__ import annotations

from typing import Any

import pytest

from helixrt.errors import ConfigError
from helixrt.job.config import ChaosConfig, JobConfig, MeshConfig, PipelineConfig
from helixrt.job.link_delays import LinkDelay, delay_towards, link_delays

LINK: dict[str, Any] = {"from": 1, "to": 2, "delay_ms": 60, "steps": [20, 60]}


def test_a_delay_is_of_one_direction_and_of_its_steps() -> None:
    delays = link_delays([LINK, {"from": 1, "to": 2, "delay_ms": 5}, {"from": 3, "to": 2, "delay_ms": 7.5, "steps": [1, 2]}], 4)
    assert delays[0] == LinkDelay(1, 2, 60.0, 20, 60.0)
    at_two, at_one = delay_towards(delays, 2), delay_towards(delays, 1)
    assert [at_two(1, step) for step in (1, 19, 20, 59, 60, 10_000)] == [0.005, 0.005, 0.065, 0.065, 0.005, 0.005]
    assert [at_two(3, step) for step in (0, 1, 2)] == [0.0, 0.0075, 0.0]
    assert at_two(0, 30) == at_one(2, 30) == 0.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"form": 1}, r"chaos\.link\[0\]=.*unknown key 'form': it has from, to, delay_ms, steps"),
        ({"from": None}, r"chaos\.link\[0\]\.from=None: must be a stage, below mesh\.pp=3"),
        ({"to": 3}, r"chaos\.link\[0\]\.to=3: must be a stage, below mesh\.pp=3"),
        ({"to": 1}, r"chaos\.link\[0\]\.to=1: must be another stage"),
        ({"delay_ms": 0}, r"chaos\.link\[0\]\.delay_ms=0: must be above 0"),
        ({"delay_ms": "slow"}, r"chaos\.link\[0\]\.delay_ms=slow: must be above 0"),
        ({"steps": 20}, r"chaos\.link\[0\]\.steps=20: must be \[first, end\]"),
        ({"steps": [60, 20]}, r"chaos\.link\[0\]\.steps=\[60, 20\]: must be \[first, end\] with 1 <= first < end"),
        ({"steps": [150, 160]}, r"chaos\.link\[0\]\.steps=150: must be from 1 to steps=100"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(changed: dict[str, Any], said: str) -> None:
    config = JobConfig(mesh=MeshConfig(replicas=1, pp=3), chaos=ChaosConfig(link=({**LINK, **changed},)))
    with pytest.raises(ConfigError, match=f"^{said}"):
        config.check_runtime(100)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="needs 'delay_ms'"):
        link_delays([{"from": 0, "to": 1}], 2)


@pytest.mark.parametrize(
    ("pipeline", "link", "said"),
    [
        (PipelineConfig(channels="mpi"), (), "pipeline.channels=mpi: must be one of endpoint, gloo"),
        (PipelineConfig(channels="gloo", direct=2), (), "pipeline.direct=2: needs pipeline.channels=endpoint"),
        (PipelineConfig(channels="gloo"), (LINK,), "pipeline.channels=gloo: cannot slow links down"),
        (PipelineConfig(queues=0), (), "pipeline.queues=0: must be at least 1"),
    ],
)
def test_settings_of_channels_must_fit(pipeline: PipelineConfig, link: tuple[dict[str, Any], ...], said: str) -> None:
    config = JobConfig(mesh=MeshConfig(replicas=1, pp=3), pipeline=pipeline, chaos=ChaosConfig(link=link))
    with pytest.raises(ConfigError) as caught:
        config.check_runtime()
    assert str(caught.value).startswith(said)


def test_settings_survive_the_way_to_a_rank() -> None:
    config = JobConfig(pipeline=PipelineConfig(queues=3), chaos=ChaosConfig(link=(LINK,)))
    assert JobConfig.from_plain(config.to_plain()) == config
