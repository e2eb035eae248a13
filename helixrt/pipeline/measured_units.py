"""Measured units: times of a model's units as a run measures them at its start, where that is worth its time.

In: the joint graph of a model and the schedule that its chunks will run. Out: `Found`: the times by unit, or why there are none
and the cut goes by estimates. Whether it is worth it is decided alike on all ranks, by estimates (`Expected`); `measure_units`
runs the units on one of them, under four rules:

- Time: it takes at most `BUDGET_S`, or as long as a step by estimates where that is longer. Fewer runs are made where all do
  not fit in.
- Memory: it takes no more than the stage of this rank will while it trains: that of the stages which needs most.
- Noise: the passes over all units must agree on the share of the time that each unit takes. Only these shares decide about a
  cut: a machine that is slower for all units alike does no harm. More passes are made while there is time; if the last ones
  still disagree, the machine is too busy.
- Times are kept on the disk with those of operators (`profile_cache`), by digests of the units' graphs. A model whose units
  are all known is not measured again, so its next run is cut alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from helixrt.passes import nodes, profile_cache
from helixrt.passes.alike import structure
from helixrt.passes.balance import Balanced
from helixrt.passes.chunk_times import ChunkTimes, makespan_of_cuts
from helixrt.passes.classify import Time
from helixrt.passes.cut_model import ModelChunk
from helixrt.passes.errors import CaptureError, VerifyError
from helixrt.passes.parts import Part, Role
from helixrt.passes.profile import FAILURES, device_of
from helixrt.passes.profile_cache import Known, Setting
from helixrt.passes.unit_costs import balanced, unit_costs, unit_times
from helixrt.passes.units import Units, ports, units
from helixrt.passes.verify import returned
from helixrt.pipeline.chunk_timer import WARM_UP
from helixrt.pipeline.unit_times import Taken, Turns, by_unit, single_units, united
from helixrt.schedule.ir import Schedule

BUDGET_S = 20.0  # of measuring, where a step does not take longer
LEAST_STEP_S = 0.1  # by estimates; where a step is shorter no start is held up for it
SHARE = 0.05  # of a step: graphs that take less of it do not decide whether the passes agree
APART = 0.2  # by which shares of the time may differ between passes
KEPT = "unit 1"  # what the kept times are; another number where other work is timed
OPERATIONS = ("forward_ms", "backward_ms", "weight_ms", "whole_ms")


@dataclass(frozen=True)
class Found:
    """Times by the unit's first module, for `balanced(measured=...)`; None, and the reason, where estimates are to be taken."""

    times: Mapping[str, ChunkTimes] | None
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """How often all units are gone through, and how often each is run then."""

    passes: int
    rounds: int


PLANS = (Plan(3, 4), Plan(3, 3), Plan(3, 2), Plan(2, 2), Plan(2, 1))  # the best ones first


# ---------------------------------------------------------------- decisions


@dataclass(frozen=True)
class Expected:
    """By estimates: the times of the units, the cut, and how long a step takes with it."""

    found: Units
    times: Mapping[str, ChunkTimes]
    cut: Balanced
    step_s: float

    @property
    def worthwhile(self) -> bool:
        """Whether units are to be measured: there is a cut, and a step is not short. The same on all ranks with this graph."""
        return bool(self.cut.starts) and self.step_s >= LEAST_STEP_S

    @property
    def stage(self) -> int:
        """The one whose ranks measure: it takes most memory."""
        return max(range(len(self.cut.bytes)), key=lambda stage: self.cut.bytes[stage])


def expected(joint: Part, schedule: Schedule) -> Expected:
    """Raises CaptureError, ConfigError for a model that cannot be cut into so many chunks."""
    found = units(joint)
    times = unit_times(joint, found)
    named = dict(zip(found.names, times, strict=True))
    cut = balanced(joint, schedule, measured=named)
    return Expected(found, named, cut, makespan_of_cuts(times, schedule)(cut.starts) / 1e3)


def planned(round_s: float, limit_s: float) -> Plan | None:
    """The most runs that there is time for, if a run of each graph takes `round_s` in all. None: for
    not even the least."""
    for plan in PLANS:
        if plan.passes * (WARM_UP + plan.rounds) * round_s <= limit_s:
            return plan
    return None


def disagreement(passes: Sequence[Mapping[bytes, ChunkTimes]], counts: Mapping[bytes, int]) -> float:
    """By how much the passes differ, at most, in the share of the model's time that a graph takes; `counts` is how many units
    have it. 0.1 is a tenth more in one pass than in another."""
    most = 0.0
    shares = []
    for one in passes:
        whole = max(sum(count * one[name].total_ms for name, count in counts.items()), 1e-9)
        shares.append({name: count * one[name].total_ms / whole for name, count in counts.items()})
    for name in counts:
        own = [one[name] for one in shares]
        if max(own) >= SHARE:
            most = max(most, max(own) / max(min(own), 1e-9) - 1.0)
    return most


def needed_bytes(chunks: Sequence[ModelChunk], saved_bytes: float) -> float:
    """The memory in which these chunks run by turns: what they take in, in a pool, the gradients of one of them, beside those
    in its buckets, and what it saves for its backward."""
    pool: Counter[tuple[str, int]] = Counter()
    gradients = 0
    for chunk in chunks:
        values = [node.meta["val"] for _, node in ports(chunk.part)]
        pool |= Counter((f"{value.shape} {value.dtype}", value.nbytes) for value in values if isinstance(value, torch.Tensor))
        given = zip(chunk.part.outputs, returned(chunk.part), strict=True)
        made = [nodes.size_bytes(node) for port, node in given if port.role is Role.GRADIENT and isinstance(node, fx.Node)]
        gradients = max(gradients, sum(made) + max(made, default=0))
    return sum(nbytes * count for (_, nbytes), count in pool.items()) + gradients + saved_bytes


# ---------------------------------------------------------------- effects


def measure_units(
    joint: Part,
    by_estimates: Expected,
    *,
    budget_s: float = BUDGET_S,
    cache: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Run the units of this model, on this rank alone. `cache` is a folder (None: the user's). Random number generators are
    left as they were. Errors of what is run are reasons."""
    began = clock()
    try:
        device = device_of([joint])
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            made = _measured(joint, by_estimates, max(budget_s, by_estimates.step_s), cache, clock)
    except (*FAILURES, CaptureError, VerifyError) as error:
        made = f"a layer cannot be run alone: {type(error).__name__}: {error}".splitlines()[0]
    if isinstance(made, str):
        return Found(None, made, clock() - began)
    return Found(by_unit(joint, made), "", clock() - began)


def _measured(
    joint: Part, by_estimates: Expected, limit_s: float, cache: Path | None, clock: Callable[[], float]
) -> dict[str, ChunkTimes] | str:
    """Times by unit, or why there are none."""
    single = single_units(joint)
    names = {unit: structure(chunk.part) for unit, chunk in single.items()}
    setting, folder = Setting.here(device_of([joint]), 1), cache or profile_cache.default_folder()
    found = kept_times(profile_cache.load(setting, folder), set(names.values()))
    if found is None:
        if refused := too_large_for(joint, by_estimates, single):
            return refused
        distinct = {name: unit for unit, name in names.items()}
        round_s = sum(_round_ms(by_estimates.times[unit]) for unit in distinct.values()) / 1e3
        if planned(round_s, limit_s) is None:
            return too_long(round_s, limit_s)
        turns = Turns({name: single[unit] for name, unit in distinct.items()})
        made = _in_turns(turns, limit_s, Counter(names.values()), clock)
        if isinstance(made, str):
            return made
        found = made
        profile_cache.save(setting, folder, to_keep(found))
    return {unit: found[name] for unit, name in names.items()}


def _in_turns(
    turns: Turns, limit_s: float, counts: Mapping[bytes, int], clock: Callable[[], float]
) -> dict[bytes, ChunkTimes] | str:
    """The times by the last passes that agree, or why there are none. The first runs tell how many there is time for."""
    began, taken = clock(), list[Taken]()
    turns.run(1)
    first_s = clock() - began
    plan = planned(first_s / (WARM_UP + 1), limit_s - first_s)
    if plan is None:
        return too_long(first_s / (WARM_UP + 1), limit_s)
    while True:
        taken.append(turns.run(plan.rounds))
        if len(taken) >= plan.passes:
            last = taken[-plan.passes :]
            apart = disagreement([united([one]) for one in last], counts)
            if apart <= APART:
                return united(last)
            spent_s = clock() - began
            if spent_s + (spent_s - first_s) / len(taken) > limit_s:
                return f"the machine is too busy: the share of the time that a layer takes differed by {apart:.0%}"


def too_long(round_s: float, limit_s: float) -> str:
    return f"a run of each layer that differs takes {round_s:.3g} s, too long for several in {limit_s:.3g} s"


def too_large_for(joint: Part, by_estimates: Expected, single: Mapping[str, ModelChunk]) -> str:
    """Why there is no memory to measure in; "" where it fits."""
    saved = max(cost.saved_bytes for cost in unit_costs(joint, by_estimates.found, measured=by_estimates.times))
    needed, allowed = needed_bytes(list(single.values()), saved), by_estimates.cut.bytes[by_estimates.stage]
    if needed <= allowed:
        return ""
    return f"it takes {needed / 1e6:,.0f} MB, more than the {allowed / 1e6:,.0f} MB of stage {by_estimates.stage}"


def _round_ms(one: ChunkTimes) -> float:
    """F, B, W, and then F again and BW."""
    return one.total_ms + one.forward_ms + one.whole_ms


# ---------------------------------------------------------------- on the disk


def kept_times(known: Known, names: set[bytes]) -> dict[bytes, ChunkTimes] | None:
    """The times of these graphs, if those of all are there."""
    found = {}
    for name in names:
        values = [known.times.get(_kept(name, operation)) for operation in OPERATIONS]
        if None in values:
            return None
        found[name] = ChunkTimes(*(value.time_us / 1e3 for value in values if value is not None))
    return found


def to_keep(measured: Mapping[bytes, ChunkTimes]) -> Known:
    found: dict[str, Time] = {}
    for name, one in measured.items():
        found |= {_kept(name, operation): Time(getattr(one, operation) * 1e3) for operation in OPERATIONS}
    return Known(found)


def _kept(name: bytes, operation: str) -> str:
    return f"{KEPT} {name.hex()} {operation}"
