"""An order in a file that an option names: the schedule in it, its costs by the options, and its proven bound.

In: torch's CSV, or JSON as `helixrt schedule --format json` prints it, by the file's name. Out: a `Schedule` as it stands in
the file (prove it with `check`). Everything wrong is a ConfigError that names the option or the place in the file.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from helixrt.commands import problem as problems
from helixrt.schedule.costs import Costs
from helixrt.schedule.exchange import as_json, torch_csv
from helixrt.schedule.ir import Schedule
from helixrt.schedule.planner.bounds import lower_bound


def read(option: str, path: str) -> Schedule:
    """The schedule in the file, called by the file's name."""
    text, name = problems.read_text(option, path), Path(path).name
    return (as_json.read if Path(path).suffix == ".json" else torch_csv.read)(text, name)


def costs(args: argparse.Namespace, schedule: Schedule) -> Costs:
    """What the options say it costs, in the order's own chunks."""
    run = problems.problem(args, schedule.stages, schedule.microbatches).run
    return run if schedule.placement == run.placement else run.split(schedule.placement)


def bound_ms(schedule: Schedule, costs: Costs) -> float:
    """What no order of the same operations can beat, under the caps of `costs`."""
    return lower_bound(_asked(costs, schedule), schedule.microbatches)


def _asked(costs: Costs, schedule: Schedule) -> Costs:
    """The costs of what the order does: one without backward has no gradients to wait for, nor anything to free.

    Links are left out then, as the bound would count gradients on them; it holds, but is not the tightest.
    """
    if not schedule.forward_only:
        return costs
    nothing = (0.0,) * costs.chunks
    return replace(costs, backward=nothing, weight=nothing, links={}, memory=(), pair_factor=1.0, pair_ms={})
