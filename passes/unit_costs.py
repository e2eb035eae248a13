"""Unit costs: what each unit of a model takes on its stage, for `balance`.

In: the joint graph and its units. Out: a `UnitCost` for each: the time of its operators by the roofline (`estimate`) with
given rates of the device, with adding its gradients to those of other micro-batches, or as measured; the bytes of its
parameters with their gradients and the optimizer's state, and of what a micro-batch saves for its backward. Rates are not
measured here: all ranks must compute the same cut. `balanced` computes it for a schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from helixrt.errors import ConfigError
from helixrt.passes import nodes
from helixrt.passes.balance import Balanced, UnitCost, balance
from helixrt.passes.chunk_times import ChunkTimes, makespan_of_cuts
from helixrt.passes.estimate import Rates, compute
from helixrt.passes.parts import Part, Role
from helixrt.passes.split import Halves
from helixrt.passes.units import Units, ports, units
from helixrt.passes.verify import returned
from helixrt.schedule.ir import Schedule

NOMINAL = {
    "cpu": Rates(
        3e4, 2.0, {"float64": 4e4, "float32": 8e4, "bfloat16": 8e4}, cache_bytes=24e6, far_bytes_per_us=1e4
    ),  # so much fits into its share of the caches
    "cuda": Rates(2e6, 3.0, {"float32": 6e7, "bfloat16": 4e8, "float16": 4e8}),
}
"""A core of a processor and a recent GPU, by orders of magnitude: only ratios count."""

LASTING = 4.0  # bytes for each byte of a parameter that trains: itself, its gradient, two moments


def unit_costs(
    joint: Part,
    found: Units,
    *,
    rates: Rates | None = None,
    measured: Mapping[str, ChunkTimes] | None = None,
    lasting: float = LASTING,
) -> tuple[UnitCost, ...]:
    """By unit; F, B and W count together. Other arguments and errors as of `unit_times`."""
    times = unit_times(joint, found, rates=rates, measured=measured)
    lasts, saved = _lasting(joint, found, lasting), _saved(found)
    return tuple(UnitCost(times[unit].total_ms, lasts[unit], saved[unit]) for unit in range(found.count))


def unit_times(
    joint: Part, found: Units, *, rates: Rates | None = None, measured: Mapping[str, ChunkTimes] | None = None
) -> list[ChunkTimes]:
    """By unit: estimates, or those that were `measured`, by the name of the unit's first module ("" for what is before the
    layers), all of them. Raises ConfigError for names that are no units or are missing."""
    return _measured(found, measured) if measured is not None else _estimated(joint, found, rates)


def chunk_times(joint: Part, starts: Sequence[int], measured: Mapping[str, ChunkTimes]) -> tuple[ChunkTimes, ...]:
    """By chunk, the sums of its units' times; `starts` are the first units of the later chunks. Errors as of `unit_times`."""
    times = unit_times(joint, units(joint), measured=measured)
    return tuple(ChunkTimes.sum(times[begin:end]) for begin, end in itertools.pairwise((0, *starts, len(times))))


def balanced(
    joint: Part,
    over: Schedule | Sequence[int],
    *,
    rates: Rates | None = None,
    measured: Mapping[str, ChunkTimes] | None = None,
    limit_bytes: float = float("inf"),
    in_flight: Sequence[int] | None = None,
) -> Balanced:
    """Where to cut a captured model: its `starts` are boundaries for `cut`. `over` is the schedule that runs the chunks, of
    which no boundary can move by one unit to make a step faster, or a placement, whose slowest stage is as fast as can be.
    Other arguments as of `unit_times` and `balance`.

    What is before or after the layers stays with them where it has no parameters: no chunk could train there. Raises
    ConfigError as these do, CaptureError for a model without layers.
    """
    found = units(joint)
    times = unit_times(joint, found, rates=rates, measured=measured)
    costs = list(unit_costs(joint, found, measured=dict(zip(found.names, times, strict=True))))
    joined = int(not costs[0].lasting_bytes)
    if joined:
        costs[:2], times[:2] = [_sum(*costs[:2])], [ChunkTimes.sum(times[:2])]
    if not costs[-1].lasting_bytes:
        costs[-2:], times[-2:] = [_sum(*costs[-2:])], [ChunkTimes.sum(times[-2:])]
    if isinstance(over, Schedule):
        placement: Sequence[int] = over.placement
        makespan = makespan_of_cuts(times, over)
    else:
        placement, makespan = over, None
    best = balance(costs, placement, limit_bytes=limit_bytes, in_flight=in_flight, makespan=makespan)
    return replace(best, starts=tuple(start + joined for start in best.starts))


def _sum(one: UnitCost, other: UnitCost) -> UnitCost:
    return UnitCost(one.time + other.time, one.lasting_bytes + other.lasting_bytes, one.saved_bytes + other.saved_bytes)


def _measured(found: Units, measured: Mapping[str, ChunkTimes]) -> list[ChunkTimes]:
    """Raises ConfigError."""
    for name in (*measured, *found.names):
        if name not in found.names:
            raise ConfigError("measured", name, f"is no unit of the model; these are {', '.join(map(repr, found.names))}")
        if name not in measured:
            raise ConfigError("measured", dict(measured), f"has no time for {name!r}")
    return [measured[name] for name in found.names]


def _estimated(joint: Part, found: Units, rates: Rates | None) -> list[ChunkTimes]:
    times = [{"F": 0.0, "B": 0.0, "W": 0.0} for _ in range(found.count)]
    home = Halves(joint).home
    known: dict[Any, float] = {}
    for node, unit in found.of.items():
        if rates is None:
            rates = NOMINAL["cpu" if _device(joint).type == "cpu" else "cuda"]
        alike = _alike(node)
        if alike not in known:
            known[alike] = compute(node, rates).time_us
        times[unit][home[node]] += known[alike]
    for port, gradient in zip(joint.outputs, returned(joint), strict=True):
        if port.role is Role.GRADIENT and rates is not None:
            for term in found.terms.get(port, (gradient,)):
                owner = found.owner(term)
                if owner is not None:  # reads it and the sum, writes the sum
                    times[found.of[owner]]["W"] += rates.moving_us(3 * nodes.size_bytes(term))
    return [ChunkTimes(one["F"] / 1e3, one["B"] / 1e3, one["W"] / 1e3, (one["B"] + one["W"]) / 1e3) for one in times]


def _device(joint: Part) -> torch.device:
    """Of the parameters."""
    return next(node.meta["val"].device for port, node in ports(joint) if port.role is Role.PARAMETER)


def _alike(node: fx.Node) -> Any:
    """What operators with one common time have in common."""

    def shape(before: fx.Node) -> Any:
        value = before.meta.get("val")
        return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None

    return node.target, str(fx.node.map_arg((node.args, node.kwargs), shape))


def _lasting(joint: Part, found: Units, lasting: float) -> list[float]:
    inputs = {node: port for port, node in ports(joint) if port.role is Role.PARAMETER}
    trained = {port.name for port in joint.outputs if port.role is Role.GRADIENT}
    used: list[set[fx.Node]] = [set() for _ in range(found.count)]
    for node, unit in found.of.items():
        if not nodes.origin(node).backward:
            for before in node.all_input_nodes:
                while nodes.is_derived(before):
                    before = nodes.tensor_arguments(before)[0]
                if before in inputs:
                    used[unit].add(before)

    def size(node: fx.Node) -> float:
        return nodes.size_bytes(node) * (lasting if inputs[node].name in trained else 1.0)

    return [sum(map(size, parameters)) for parameters in used]


def _saved(found: Units) -> list[float]:
    """Results of the forward that the backward takes in, each once, with the unit that makes them."""
    kept: set[fx.Node] = set()
    for node in found.of:
        if nodes.origin(node).backward:
            owners = map(found.owner, node.all_input_nodes)
            kept.update(owner for owner in owners if owner is not None and not nodes.origin(owner).backward)
    saved = [0.0] * found.count
    for node in kept:
        saved[found.of[node]] += nodes.size_bytes(node)
    return saved
