"""Settings without effect: each changed one is said once, with its reason, and no setting is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from helixrt.collectives.process_group import check_devices
from helixrt.errors import ConfigError
from helixrt.job.config import (
    CatchupConfig,
    CheckpointConfig,
    ChecksConfig,
    JobConfig,
    MeshConfig,
    PipelineConfig,
    RayConfig,
    TransportConfig,
)
from helixrt.job.effects import CASES, without_effect
from helixrt.job.rules import check_settings

ALONE = JobConfig(launcher="local", mesh=MeshConfig(replicas=1, pp=1))
# Read in every run, or refused where they do not fit; each needs no case.
ALWAYS = {
    "name", "seed", "resume", "launcher", "threads", "step_timeout_s", "restarts", "on_poison", "nonfinite_limit", "host",
    "port", "driver_away_s", "signal_grace_s", "deal", "checkpoint.every", "checkpoint.after_failover", "checks.strict_data",
    "mesh.replicas", "mesh.pp", "mesh.dp_shard", "mesh.cp", "mesh.tp",
    "chaos.kill", "chaos.run", "chaos.fault", "chaos.link", "output.root", "output.peak_tflops", "output.detail_mb",
}  # fmt: skip


def names(value: Any, prefix: str = "") -> Iterator[str]:
    for each in fields(value):
        inner = getattr(value, each.name)
        yield from names(inner, f"{prefix}{each.name}.") if is_dataclass(inner) else [f"{prefix}{each.name}"]


def test_every_setting_is_in_a_case_or_always_read() -> None:
    cases = [name for names, _, _ in CASES for name in names.split()]
    covered = {name for name in names(JobConfig()) if any(name == case or name.startswith(f"{case}.") for case in cases)}
    assert covered | ALWAYS == set(names(JobConfig())) and not covered & ALWAYS


@pytest.mark.parametrize(
    "config", [JobConfig(), ALONE, replace(ALONE, launcher="ray"), replace(ALONE, checkpoint=CheckpointConfig(every=0))]
)
def test_of_defaults_nothing_is_said(config: JobConfig) -> None:
    assert list(without_effect(config)) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(ALONE, pipeline=PipelineConfig(queues=4)), "pipeline.queues=4 has no effect: a replica is one stage"),
        (replace(ALONE, catchup=CatchupConfig(replay=3)), "catchup.replay=3 has no effect: there is one replica"),
        (replace(ALONE, ray=RayConfig(gpus=2.0)), "ray.gpus=2.0 has no effect: ranks are no Ray actors"),
        (replace(ALONE, transport=TransportConfig("tcp")), "transport.kind=tcp has no effect: there is one replica"),
        (replace(ALONE, restarts=0, fatal_restarts=1), "fatal_restarts=1 has no effect: restarts=0"),
        (replace(ALONE, checks=ChecksConfig(same_streams=True)), "checks.same_streams=True has no effect: there is one stream"),
        (replace(ALONE, checkpoint=CheckpointConfig(0, keep=7)), "checkpoint.keep=7 has no effect: checkpoint.every=0"),
    ],
)
def test_a_changed_setting_that_nothing_reads_is_said(config: JobConfig, said: str) -> None:
    (line,) = without_effect(config)
    assert line.startswith(said)


def test_a_fault_behind_the_last_step_is_refused_where_the_last_step_is_known() -> None:
    from helixrt.job.config import ChaosConfig, KillConfig

    config = JobConfig(chaos=ChaosConfig(kill=(KillConfig(step=31),)))
    check_settings(config)
    with pytest.raises(ConfigError, match=r"^chaos.kill\[0\].step=31: must be from 1 to steps=30$"):
        check_settings(config, 30)


@pytest.mark.parametrize("asked", ["cpu:gloo,cuda:helix", "cpu:helix,cuda:nccl"])
def test_a_backend_for_some_devices_alone_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=f"^backend={asked}: helix would take the calls of all devices"):
        check_devices(asked)
    for plain in ("cpu:helix,cuda:helix", "helix", "cpu:gloo,cuda:nccl"):
        check_devices(plain)
