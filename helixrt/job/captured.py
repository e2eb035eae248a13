"""What `session.parallelize` does with a compiled model and an example.

In: the session's settings and host. Out: this rank's part of the model. What needs no other rank is checked before the ranks
connect.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from helixrt.errors import ConfigError
from helixrt.job.session_host import Host, SessionSettings

if TYPE_CHECKING:
    from helixrt.engines.captured import CapturedModel
    from helixrt.engines.example_batch import ExampleBatch
    from helixrt.engines.tensor_plan import TensorPlan

_NOT_CAPTURED = {
    "dp_shard": "FSDP2 gathers parameters in hooks, outside of any graph; use replicas, pp or tp",
    "cp": "the attention of an unmodified model sees the positions of its own rank alone; use helixrt.Stages for cp",
}


def captured_model(
    settings: SessionSettings,
    host: Host,
    model: nn.Module,
    example: ExampleBatch,
    weights: str | Path | None,
    tp_plan: TensorPlan | None,
) -> CapturedModel:
    """Raises ConfigError for a model that is not compiled, and for options, an example or a mesh that do not fit; others as
    `CapturedModel`."""
    for axis, size in asdict(settings.mesh).items():
        if axis in _NOT_CAPTURED and size > 1:
            raise ConfigError(f"mesh.{axis}", size, f"must be 1 for a captured model: {_NOT_CAPTURED[axis]}")
    from helixrt.compile.train_step import TrainStep  # brings torch's compiler, which takes seconds
    from helixrt.engines.captured import CapturedModel, pipeline_schedule

    step = getattr(model, "train_step", None)
    if not isinstance(step, TrainStep):
        rule = "is not compiled; with example= it must be: helixrt.compile(model, loss=..., microbatches=...)"
        raise ConfigError("model", type(model).__name__, rule)
    pipeline_schedule(step.options, settings.mesh.pp)
    place, autocast = host.connect_stages(), torch.bfloat16 if settings.dtype == "bfloat16" else None
    return CapturedModel(
        step, example, place, seed=settings.seed, weights=weights, tp_plan=tp_plan, autocast=autocast, busy=host.busy
    )
