"""The schedule that a training job runs, from its settings.

In: the settings of schedule, mesh, model and data. Out: the `Schedule` of every replica's pipeline, the same on all
ranks, or ConfigError. A policy that plans by costs is given those of `schedule.costs`, else equal ones: what the stages
really cost is known only once they run (`schedule.adapt`).
"""

from __future__ import annotations

from helixrt import Stages
from helixrt.errors import ConfigError
from helixrt.schedule.generators.named import named
from helixrt.schedule.ir import Schedule
from helixrt.train.config import ModelConfig, ScheduleConfig

ADAPT = ("off", "on")


def check_graphs(model: ModelConfig, schedule: ScheduleConfig) -> None:
    """Raise ConfigError for a model that can never be captured where graphs are asked for."""
    if model.experts and not model.capacity and schedule.graphs == "always":
        rule = "experts without a limit (model.capacity=0) have a varying number of rows, which a captured graph cannot have; "
        raise ConfigError("schedule.graphs", schedule.graphs, rule + "must be never, or auto, or the capacity above 0")


def job_schedule(config: ScheduleConfig, *, stages: int, layers: int, batch: int) -> Schedule:
    """The schedule that `config` names, over `stages` stages, for a model of `layers` and `batch` sequences per step.

    Raises ConfigError for a schedule that is unknown or can not be built, for an unknown way to run it, for
    micro-batches that do not divide the batch, for more chunks than layers, for numbers that the tags of messages
    can not tell apart, and for costs that cannot be read, are of other stages, or for a policy that does not plan by costs.
    """
    microbatches = config.microbatches
    if config.graphs not in Stages.GRAPHS:
        raise ConfigError("schedule.graphs", config.graphs, f"must be one of {', '.join(Stages.GRAPHS)}")
    if config.profile not in Stages.PROFILES:
        raise ConfigError("schedule.profile", config.profile, f"must be one of {', '.join(Stages.PROFILES)}")
    if config.adapt not in ADAPT:
        raise ConfigError("schedule.adapt", config.adapt, f"must be one of {', '.join(ADAPT)}")
    if config.adapt == "on" and stages == 1:
        raise ConfigError("schedule.adapt", config.adapt, "needs mesh.pp above 1: a model that is one stage has one order")
    if config.adapt == "on" and config.graphs == "never":
        rule = "cannot be with schedule.adapt=on: orders give the same bits, and take the times predicted, by graphs"
        raise ConfigError("schedule.graphs", config.graphs, rule)
    if stages > layers:
        raise ConfigError("mesh.pp", stages, f"more stages than layers: model.layers={layers}")
    if not 1 <= microbatches <= Stages.MAX_MICROBATCHES:
        raise ConfigError("schedule.microbatches", microbatches, f"must be between 1 and {Stages.MAX_MICROBATCHES}")
    if batch % microbatches:
        raise ConfigError("schedule.microbatches", microbatches, f"must divide data.batch={batch}")
    if config.name == "1f1b" and microbatches < stages:
        raise ConfigError("schedule.microbatches", microbatches, f"1f1b needs one per stage: mesh.pp={stages}")
    schedule = named(config.name, stages, microbatches, config.costs, "schedule.costs")
    if schedule.chunks > layers:
        rule = f"{schedule.name} cuts the model into {schedule.chunks} chunks, more than model.layers={layers}"
        raise ConfigError("mesh.pp", stages, rule)
    if schedule.chunks > Stages.MAX_PARTS:
        rule = f"{schedule.name} cuts the model into {schedule.chunks} chunks, more than {Stages.MAX_PARTS}"
        raise ConfigError("mesh.pp", stages, rule)
    return schedule
