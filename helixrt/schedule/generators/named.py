"""A pipeline's schedule by the name of its policy, for equal costs or for those of a file.

In: a name, numbers of stages and micro-batches, and the path of a `profile.json`, which a run writes. Out: the `Schedule`, the
same on every rank that reads the same file.
"""

from __future__ import annotations

from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.schedule.exchange.profile import read
from helixrt.schedule.generators import classic
from helixrt.schedule.generators.policies import BY_COSTS, POLICIES, build
from helixrt.schedule.ir import Schedule


def named(name: str, stages: int, microbatches: int, costs: str | Path = "", key: str = "costs") -> Schedule:
    """`costs`: the file to plan from; "" takes equal costs without delays. `key` is its name in messages.

    Raises ConfigError as `classic.build`, for a file that cannot be read or is of another number of stages, and for a policy
    whose order does not depend on costs.
    """
    if not costs or name not in POLICIES:
        return classic.build(name, stages, microbatches)
    if name not in BY_COSTS:
        raise ConfigError(key, str(costs), f"is for {', '.join(BY_COSTS)}: the order of {name} does not depend on costs")
    try:
        text = Path(costs).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(key, str(costs), f"cannot be read: {reason}") from None
    found = read(text, key, str(costs)).costs
    if found.stages != stages:
        raise ConfigError(key, str(costs), f"is of {found.stages} stages, and mesh.pp={stages}")
    return build(name, found, microbatches)
