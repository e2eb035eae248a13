"""What `session.parallelize` does with a compiled model and an example.

In: the session's settings and host. Out: this rank's part of the model. What needs no other rank is checked before the ranks
connect. Where chunks are balanced by measured times, all ranks of the run take those of the rank that measured first; they are
kept in the run's folder, since a run that is resumed must be cut as before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from helixrt.errors import ConfigError
from helixrt.job.lineage_files import write_durably
from helixrt.job.session_host import Host, SessionSettings

if TYPE_CHECKING:
    from helixrt.engines.captured import CapturedModel
    from helixrt.engines.example_batch import ExampleBatch
    from helixrt.engines.tensor_plan import TensorPlan
    from helixrt.passes.chunk_times import ChunkTimes
    from helixrt.passes.parts import Part

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
    from helixrt.pipeline.unit_times import unit_times

    step = getattr(model, "train_step", None)
    if not isinstance(step, TrainStep):
        rule = "is not compiled; with example= it must be: helixrt.compile(model, loss=..., microbatches=...)"
        raise ConfigError("model", type(model).__name__, rule)
    pipeline_schedule(step.options, settings.mesh.pp)

    def times(joint: Part) -> Mapping[str, ChunkTimes]:
        return agreed_times(host, unit_times(joint))

    place, autocast = host.connect_stages(), torch.bfloat16 if settings.dtype == "bfloat16" else None
    return CapturedModel(
        step,
        example,
        place,
        seed=settings.seed,
        weights=weights,
        times=times,
        tp_plan=tp_plan,
        autocast=autocast,
        busy=host.busy,
    )


def agreed_times(host: Host, mine: Mapping[str, ChunkTimes]) -> Mapping[str, ChunkTimes]:
    """Of the units, the same on all ranks of all replicas and in all lives of the run. Raises Retryable without the store,
    ConfigError for times of an earlier life that cannot be read."""
    from helixrt.passes.chunk_times import ChunkTimes

    units = hashlib.sha256(json.dumps(list(mine)).encode()).hexdigest()[:16]  # a session may have several models
    name = f"unit_times_{units}"
    kept = None if host.folder is None else host.folder / f"{name}.json"
    known = kept is not None and kept.is_file()
    own = json.dumps({unit: asdict(times) for unit, times in mine.items()})
    agreed = host.store.put_if_absent(name, kept.read_text(encoding="utf-8") if kept and known else own)
    try:
        found = {unit: ChunkTimes(**times) for unit, times in json.loads(agreed).items()}
    except (ValueError, TypeError, AttributeError) as error:
        rule = "cannot be read; restore it, or name the cuts: helixrt.compile(cuts=[...])"
        raise ConfigError("profile", str(kept), rule) from error
    if kept and not known:
        write_durably(kept, agreed)
    return found
