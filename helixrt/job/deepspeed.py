"""A DeepSpeed engine in a session: made once the ranks are connected, and its own calls in the user's loop.

In: the session's settings and ranks, and the engine or a function that makes it. Out: the engine, and the `DeepSpeedEngine`
that trains it; `engine.backward` and `engine.step` then stand for those of the session's step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from helixrt.engines.deepspeed import DeepSpeedEngine
from helixrt.engines.deepspeed_private import keep_host_collectives_unbuilt
from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.update import Policy
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.session_host import SessionSettings
from helixrt.job.step import Step
from helixrt.private_api import check_version


def deepspeed_engine(
    settings: SessionSettings,
    device: torch.device,
    connect: Callable[[], InnerGroup],
    given: Any,
    buffers: Mapping[str, str] | None,
) -> tuple[Any, DeepSpeedEngine]:
    """See `Session.deepspeed`. `connect` gives the dp_shard ranks of this replica, connected."""
    check_version("deepspeed")
    mesh = settings.mesh
    mesh.check_module()
    if mesh.tp > 1:
        raise ConfigError("mesh.tp", mesh.tp, "must be 1 with DeepSpeed, which divides a model over dp_shard ranks alone")
    if mesh.dp_shard == 1:
        raise ConfigError("mesh.dp_shard", 1, "must be above 1 with DeepSpeed; one rank a replica trains by session.register")
    if settings.dtype != "float32":
        rule = 'is that of DeepSpeed\'s own configuration ({"bf16": {"enabled": true}}); leave it out here'
        raise ConfigError("dtype", settings.dtype, rule)
    group = connect()
    engine = given
    if callable(given) and not isinstance(given, nn.Module):
        _prepare_process(settings, device)
        engine = given()
    trained = DeepSpeedEngine(
        engine,
        group,
        replica=settings.replica,
        replicas=settings.replicas,
        seed=settings.drawn_seed,
        policy=Policy(settings.lr_policy),  # type: ignore[arg-type]
        buffers=settings.buffers,  # type: ignore[arg-type]
        modes=buffers,
    )
    if (on := trained.device.type) != device.type:
        raise MisuseError(
            f"the DeepSpeed engine computes on {on}, and the session on {device.type}; set DS_ACCELERATOR={device.type} before "
            "deepspeed is imported"
        )
    return engine, trained


def _prepare_process(settings: SessionSettings, device: torch.device) -> None:
    """What `deepspeed.initialize` reads besides its arguments; torchrun has set it."""
    local = settings.local_rank if settings.local_rank >= 0 else settings.shard if device.index is None else device.index
    os.environ.setdefault("LOCAL_RANK", str(local))
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
        keep_host_collectives_unbuilt()


def wrap_calls(engine: Any, step_of: Callable[[], Step[Any] | None]) -> None:
    """Have `engine.backward` and `engine.step` of the user's loop act on the session's step."""

    def current(call: str) -> Step[Any]:
        step = step_of()
        if step is None:
            raise MisuseError(f"engine.{call} was called outside the loop over session.steps")
        return step

    def backward(
        loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, weight: Any = None
    ) -> torch.Tensor:
        """`step.backward(loss, weight)`; gives the loss divided by the accumulation, as DeepSpeed does."""
        if retain_graph or not scale_wrt_gas:
            raise MisuseError("engine.backward takes the loss, and weight= for a sum over items; call it once in a micro-batch")
        current("backward").backward(loss, weight)
        return loss.detach() / engine.gradient_accumulation_steps()

    def step(lr_kwargs: Any = None) -> None:
        """After the last micro-batch the exchange, the agreement and DeepSpeed's own step; before it nothing."""
        if lr_kwargs:
            raise MisuseError("engine.step takes no arguments for the schedule: the update depends on the agreed state alone")
        current("step").micro_batch_done()

    engine.backward, engine.step = backward, step
