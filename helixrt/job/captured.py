"""What `session.parallelize` does with a compiled model and an example.

In: the session's settings and host. Out: this rank's part of the model. What needs no other rank is checked before the ranks
connect. Chunks are balanced by measured times of the layers where that is worth it (`pipeline.measured_units`). The ranks of
one stage measure. All ranks of the run take what the first of them has put into the run's store: times, or the reason why there
are none. It is kept in the run's folder, since a run that is resumed must be cut as before.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
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
    from helixrt.engines.staged import StagePlace
    from helixrt.engines.tensor_plan import TensorPlan
    from helixrt.passes.chunk_times import ChunkTimes
    from helixrt.passes.parts import Part
    from helixrt.pipeline.measured_units import Found
    from helixrt.schedule.ir import Schedule

_NOT_CAPTURED = {
    "dp_shard": "FSDP2 gathers parameters in hooks, outside of any graph; use replicas, pp, cp or tp",
}


def captured_model(
    settings: SessionSettings,
    host: Host,
    device: torch.device,
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
    from helixrt.engines.first_order import weaves

    step = getattr(model, "train_step", None)
    if not isinstance(step, TrainStep):
        rule = "is not compiled; with example= it must be: helixrt.compile(model, loss=..., microbatches=...)"
        raise ConfigError("model", type(model).__name__, rule)
    pipeline_schedule(step.options, settings.mesh.pp)
    place, autocast = host.connect_stages(device), torch.bfloat16 if settings.dtype == "bfloat16" else None
    always = step.options.profile == "measure"

    def times(joint: Part, schedule: Schedule) -> Mapping[str, ChunkTimes] | None:
        return times_to_cut_by(host, place, joint, schedule, always)

    made = CapturedModel(
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
    first = place.stage == place.mesh.rank("cp", "tp") == 0
    if first and step.options.strands == 2 and step.options.adapt is None and not weaves(made.first_order):
        order = made.first_order.name
        host.say(f"strands=2 has no effect: the order {order} pairs no forward with a backward; schedule='w' does")
    if (planned := made.planned) is not None and first:
        host.say(
            f"the first order of {step.options.schedule} is planned from the measured times of the layers: a step should take "
            f"{planned.makespan_ms:.4g} ms and hold {planned.held} micro-batches, instead of {planned.equal_ms:.4g} ms and "
            f"{planned.equal_held} with the order for equal times"
        )
    return made


def times_to_cut_by(
    host: Host, place: StagePlace, joint: Part, schedule: Schedule, always: bool
) -> Mapping[str, ChunkTimes] | None:
    """The times of the model's units, the same on all ranks of the run; None where chunks are balanced by estimates. With
    `always` (`profile="measure"`) the units are measured whatever it takes.

    Over cp and tp ranks only that is done: the layers communicate, so the ranks of stage 0 measure together, a fixed number of
    runs. Raises as `agreed_times`, CaptureError and ConfigError for a model that cannot be cut into so many chunks.
    """
    from helixrt.pipeline.measured_units import Found, expected, measure_units
    from helixrt.pipeline.unit_times import unit_times

    if schedule.chunks == 1:
        return None
    shared, by_estimates = place.mesh.size("cp", "tp") > 1, expected(joint, schedule)
    if not always and (shared or not by_estimates.worthwhile):
        return None
    measures = place.stage == (0 if shared else by_estimates.stage)  # ranks with other parts may not agree on the latter

    def measured() -> Found:
        if not always:
            return measure_units(joint, by_estimates)
        began = time.monotonic()
        with torch.random.fork_rng(devices=[place.device] if place.device.type == "cuda" else []):  # other stages draw none
            times = unit_times(joint)
        return Found(times, "", time.monotonic() - began)

    found = agreed_times(host, _key(joint, whole=not shared), measured, measures=measures, together=shared)
    if measures:
        host.say(_told(found))
    return found.times


def _told(found: Found) -> str:
    if found.times is not None:
        return f"stages are balanced by measured times of the layers ({found.seconds:.1f} s)"
    return f"stages are balanced by estimated times of the layers: {found.reason}; see the option profile of helixrt.compile"


def _key(joint: Part, whole: bool) -> str:
    """Tells the models of a session apart, by the names of their units and where ranks have them `whole` their parameters."""
    from helixrt.passes.parts import Role
    from helixrt.passes.units import ports, units

    shapes = [list(node.meta["val"].shape) for port, node in ports(joint) if whole and port.role is Role.PARAMETER]
    return hashlib.sha256(json.dumps([units(joint).names, shapes]).encode()).hexdigest()[:16]


def agreed_times(host: Host, key: str, measured: Callable[[], Found], *, measures: bool, together: bool = False) -> Found:
    """What the first rank of those that measure has found, the same on all ranks of all replicas and in all lives of the run.

    `together`: the ranks of a stage measure in collectives, all of them or none, so what others have found meanwhile does not
    end it. Raises Retryable without the store, or when no rank has found anything within `CAPTURE_S`; ConfigError for times of
    an earlier life that cannot be read.
    """
    from helixrt.engines.captured_engine import CAPTURE_S
    from helixrt.passes.chunk_times import ChunkTimes
    from helixrt.pipeline.measured_units import Found

    name = f"layer_times_{key}"
    kept = None if host.folder is None else host.folder / f"{name}.json"
    known = kept is not None and kept.is_file()
    if kept and known:
        told = host.store.put_if_absent(name, kept.read_text(encoding="utf-8"))
        if measures and together:
            measured()
    elif not measures:
        told = host.store.wait(name, CAPTURE_S)
    else:
        told = (None if together else host.store.get(name)) or host.store.put_if_absent(name, _plain(measured()))
    try:
        given = json.loads(told)
        times = given["times"]
        units = None if times is None else {unit: ChunkTimes(**one) for unit, one in times.items()}
        found = Found(units, str(given["reason"]), float(given["seconds"]))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        rule = "cannot be read; restore it, or name the cuts: helixrt.compile(cuts=[...])"
        raise ConfigError("profile", str(kept), rule) from error
    if kept and not known:
        write_durably(kept, told)
    return found


def _plain(found: Found) -> str:
    """As JSON."""
    times = None if found.times is None else {unit: asdict(one) for unit, one in found.times.items()}
    return json.dumps({"times": times, "reason": found.reason, "seconds": found.seconds})
