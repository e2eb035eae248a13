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


def captured_model(
    settings: SessionSettings, host: Host, model: nn.Module, example: ExampleBatch, weights: str | Path | None
) -> CapturedModel:
    """Raises ConfigError for a model that is not compiled, and for options, an example or a mesh that do not fit; others as
    `CapturedModel`."""
    for axis, size in asdict(settings.mesh).items():
        if axis != "pp" and size > 1:
            raise ConfigError(f"mesh.{axis}", size, "must be 1 for a compiled model over pipeline stages so far")
    from helixrt.compile.train_step import TrainStep  # brings torch's compiler, which takes seconds
    from helixrt.engines.captured import CapturedModel, pipeline_schedule

    step = getattr(model, "train_step", None)
    if not isinstance(step, TrainStep):
        rule = "is not compiled; with example= it must be: helixrt.compile(model, loss=..., microbatches=...)"
        raise ConfigError("model", type(model).__name__, rule)
    pipeline_schedule(step.options, settings.mesh.pp)
    autocast = torch.bfloat16 if settings.dtype == "bfloat16" else None
    return CapturedModel(
        step, example, host.connect_stages(), seed=settings.seed, weights=weights, autocast=autocast, busy=host.busy
    )
