"""Stages that are slowed down on purpose: `chaos.slow=[{stage: 2, factor: 1.5, steps: [20, 60]}]`.

In: the settings. Out: how long a stage's operations take in a step, which its executor carries out. With `least_ms` and a tiny
model the stages sleep, each operation for as long as it is told: a rehearsal of schedules and slow links without their work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from helixrt.errors import ConfigError
from helixrt.job.config import JobConfig, SlowConfig
from helixrt.pipeline.executor import Slowdown


def slowdown_of(slow: tuple[SlowConfig, ...], replica: int, stage: int) -> Callable[[int], Slowdown] | None:
    """That of one stage of a replica, by step; None if it is never slowed down. Of several, factors multiply and the longest
    least time holds."""
    mine = [each for each in slow if each.stage == stage and each.replica in (-1, replica)]

    def slowdown(step: int) -> Slowdown:
        now = [each for each in mine if _holds(each, step)]
        least_ms = max((each.least_ms for each in now), default=0.0)
        return Slowdown(math.prod(each.factor for each in now), least_ms / 1e3)

    return slowdown if mine else None


def _holds(slow: SlowConfig, step: int) -> bool:
    return not slow.steps or slow.steps[0] <= step < slow.steps[1]


def check_slow(config: JobConfig, steps: int) -> Iterator[ConfigError]:
    """What is wrong with `chaos.slow`. `steps`: of the run, 0 if they are not known."""
    for number, slow in enumerate(config.chaos.slow):
        key = f"chaos.slow[{number}]"
        if not 0 <= slow.stage < config.mesh.pp:
            yield ConfigError(f"{key}.stage", slow.stage, f"must be a stage, below mesh.pp={config.mesh.pp}")
        elif config.mesh.pp == 1:
            yield ConfigError(f"{key}.stage", slow.stage, "needs mesh.pp above 1: a model that is one stage has no schedule")
        elif not 1 <= slow.factor < math.inf:
            yield ConfigError(f"{key}.factor", slow.factor, "must be at least 1: times as long as the operation took")
        elif not 0 <= slow.least_ms < math.inf:
            yield ConfigError(f"{key}.least_ms", slow.least_ms, "must be a number, at least 0")
        elif not -1 <= slow.replica < config.mesh.replicas:
            yield ConfigError(
                f"{key}.replica", slow.replica, f"must be below mesh.replicas={config.mesh.replicas}, or -1 for all"
            )
        elif slow.steps and (len(slow.steps) != 2 or not 1 <= slow.steps[0] < slow.steps[1]):
            rule = "must be [first, end] with 1 <= first < end: from step first on, no more from step end on"
            yield ConfigError(f"{key}.steps", list(slow.steps), rule)
        elif slow.steps and steps and slow.steps[0] > steps:
            yield ConfigError(f"{key}.steps", list(slow.steps), f"must begin at most at steps={steps}")
