"""Profile: how long each operator of a part takes, and how well operators hide behind each other.

In: the parts that are to be woven, and the group of ranks that must make the same plan; all of them call `profile` at once.
Out: a `Profile`, the same on every rank: times by signature, the overlap factors of DHelix (section 3.2, equation 1),
and from both the strands of the pairing search. Only distinct operators are run, on arguments made for them, and only
those pairs of compute and communication that matter; what was measured before comes from the disk, unless a
collective takes another time now than it did then. What could not be run is estimated.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from helixrt.errors import ConfigError
from helixrt.passes import classify, estimate, factors, nodes, profile_cache
from helixrt.passes.classify import Time
from helixrt.passes.communication import communication
from helixrt.passes.errors import DisagreementError
from helixrt.passes.estimate import Rates, Supposed
from helixrt.passes.group_private import group_named
from helixrt.passes.groups import Group, group_name, locate, transport
from helixrt.passes.measure import PAIR_ROUNDS, Operation, Stopwatch, Together
from helixrt.passes.operators import Kind, Operator, Overlap
from helixrt.passes.parts import Part
from helixrt.passes.profile_cache import Known, Setting
from helixrt.passes.ranks import Ranks

BUDGET_S = 120.0
PARTNERS, LEAST_SHARE = 16, 0.01  # compute operators to pair: how many at most, and the least share of compute's time
STALE, SLACK_US = 1.5, 300.0  # a collective takes another time than before if it differs by more than both
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class Mode(StrEnum):
    AUTO = "auto"  # what is on disk, and measure the rest
    MEASURE = "measure"  # measure all
    ESTIMATE = "estimate"  # measure the device and its links, no operator


@dataclass(frozen=True)
class Profile:
    """What the pairing search needs to know. `names`: this rank's signatures -> the agreed ones, where they differ.

    `pairs` are the measured ones, (compute or other collective, collective); `overlap` covers all. `unsteady` are the
    operators, and pairs of them, whose times cannot be trusted since the machine was busy. `cached` and `measured` count
    distinct operators by where their time comes from; `seconds` is what it took.
    """

    groups: Mapping[str, Group]
    times: Mapping[str, Time]
    pairs: Mapping[tuple[str, str], Together]
    overlap: Overlap
    names: classify.Names
    unsteady: tuple[str, ...]
    cached: int
    measured: int
    seconds: float

    def operators(self, part: Part) -> list[Operator]:
        """A profiled part as a strand; one operator for each node but placeholders and output, in order."""
        return classify.operators(part, self.groups, self.times, self.names)


@dataclass(frozen=True)
class Item:
    """A distinct operator: the agreed signature, a node of this rank that has it, how often it is there."""

    name: str
    node: fx.Node
    kind: Kind
    count: int

    @property
    def communicates(self) -> bool:
        return nodes.communicates(self.node)

    @property
    def runnable(self) -> bool:
        """Whether it can be run on arguments that are made up; else it is estimated."""
        how = communication(self.node)
        return how is None or how.runnable


def profile(
    parts: Part | Sequence[Part],
    group: Any = None,
    *,
    mode: Mode | str = Mode.AUTO,
    cache: Path | None = None,
    link: str = "",
    budget_s: float = BUDGET_S,
    host: str | None = None,
    supposed: Mapping[str, Supposed] | None = None,
) -> Profile:
    """Profile `parts` together with all ranks of `group`.

    Without `group`, that is the one group the parts communicate in, or all ranks of the job where there are several (a
    pipeline's stages have other graphs: there it must be given). `cache` is a folder (None: the user's); what was measured
    while the machine was too busy is not stored there. `link` distinguishes links with equal descriptions. `budget_s` bounds
    the time for pairs; those that matter most come first. `host` overrides this rank's host, see `groups`. With `supposed`,
    the groups as the caller describes them by name, this process plans alone and nothing communicates: communication and
    pairs are estimated.
    Random number generators are left as they were. Raises ConfigError, DisagreementError when ranks profile different
    graphs, VerifyError for unknown groups.
    """
    began = time.perf_counter()
    parts = [parts] if isinstance(parts, Part) else list(parts)
    if mode not in tuple(Mode):
        raise ConfigError("profile", mode, f"must be one of {', '.join(Mode)}")
    if supposed is None:
        groups = locate(parts, host=host)
        ranks = Ranks(group if group is not None else planning_group(groups))
    else:
        groups, ranks = {name: one.group for name, one in supposed.items()}, Ranks()
    device = device_of(parts)
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        run = Run(parts, groups, ranks, Stopwatch(device, ranks), Mode(mode), budget_s, supposed)
        setting, folder = Setting.here(device, ranks.count, link), cache or profile_cache.default_folder()
        return run.profile(setting, folder, began)


def planning_group(groups: Mapping[str, Group]) -> Any:
    """The ranks that must make the same plan, as far as their communication groups determine them. Raises ConfigError when they
    do not."""
    if len(groups) == 1:
        return group_named(next(iter(groups)))
    if groups and not dist.is_initialized():
        raise ConfigError("group", None, f"must be given: the ranks that share a plan, who talk in {len(groups)} groups")
    return dist.group.WORLD if groups else None


def device_of(parts: Sequence[Part]) -> torch.device:
    """Where the parts compute: on the processor only if all their operators do, since on a GPU, too, some give values there
    (the state of a generator, numbers that are made into tensors)."""
    made = (node.meta.get("val") for part in parts for node in part.graph.nodes if node.op == "call_function")
    devices = (value.device for values in made for value in tensors(values))
    found = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


class Run:
    """One profiling, on one of the ranks."""

    def __init__(
        self,
        parts: Sequence[Part],
        groups: Mapping[str, Group],
        ranks: Ranks,
        watch: Stopwatch,
        mode: Mode,
        budget_s: float,
        supposed: Mapping[str, Supposed] | None = None,
    ) -> None:
        self.groups, self.ranks, self.watch, self.mode, self.budget_s = groups, ranks, watch, mode, budget_s
        self.supposed = supposed or {}
        listed = classify.distinct(parts, groups)
        agreed = self.ranks.first_says([name for name, _, _ in listed])
        if any(int(n) != len(agreed) for n in self.ranks.table([len(listed)])[:, 0]):
            raise DisagreementError("ranks profile graphs with different numbers of operators; capture the same model on all")
        self.names = {(own, node.name): name for (own, node, _), name in zip(listed, agreed, strict=True) if own != name}
        counts = Counter(agreed)
        first = {name: (node, kind) for (_, node, kind), name in reversed(list(zip(listed, agreed, strict=True)))}
        self.items = [Item(name, *first[name], count) for name, count in counts.items()]

    def profile(self, setting: Setting, folder: Path, began: float) -> Profile:
        found = profile_cache.load(setting, folder) if self.mode is Mode.AUTO and self.ranks.first else Known()
        found = found.only({item.name for item in self.items})
        known = self.still_true(Known.from_json(self.ranks.first_says(found.to_json())))
        cached = sum(item.name in known.times for item in self.items)
        known = self.rates(known)
        if self.mode is not Mode.ESTIMATE:
            known = self.alone(known)
            known = self.in_pairs(known)
            if self.ranks.first:
                profile_cache.save(setting, folder, known)
        known = self.estimated(known)
        measured = sum(known.times[item.name].measured for item in self.items)
        names = {item.name for item in self.items}
        pairs = {key: pair for key, pair in known.pairs.items() if names.issuperset(key)}
        assert known.rates is not None, "rates are measured before anything else"
        kinds = {item.name: item.kind for item in self.items}
        limits = {item.name: estimate.limit(item.node, known.rates) for item in self.items if not item.communicates}
        hosts = factors.host_us(kinds, known.times, pairs)
        times = {name: replace(known.times[name], host_us=hosts.get(name, 0.0)) for name in names}
        blocking = {item.name for item in self.items if item.communicates and item.kind is Kind.COMPUTE}
        overlap = factors.overlap(kinds, limits, times, pairs, blocking)
        unsteady = [] if known.rates.steady else ["rates of the device"]
        unsteady += [name for name, time in times.items() if not time.steady]
        unsteady += [f"{one} with {other}" for (one, other), pair in pairs.items() if not pair.steady]
        seconds = self.ranks.maxima([time.perf_counter() - began])[0]
        return Profile(
            self.groups, times, pairs, overlap, self.names, tuple(sorted(unsteady)), cached, measured - cached, seconds
        )

    def still_true(self, known: Known) -> Known:
        """`known`, without communication whose links have become faster or slower."""
        for group in dict.fromkeys(str(group) for group in self.groups.values()):
            old = [i for i in self.items if i.communicates and i.name in known.times and i.name.endswith(f" over {group}")]
            if old:
                probe = max(old, key=lambda item: (known.times[item.name].time_us, item.name))
                before = known.times[probe.name].time_us
                now = self.watch.collective(Operation.of(probe.node))
                other = abs(now.time_us - before) > SLACK_US and not 1 / STALE < now.time_us / before < STALE
                if other and (now.steady or now.time_us < before):  # a slower time on a busy machine does not count
                    known = known.without(group)
        return known

    def rates(self, known: Known) -> Known:
        """With the rates of the device, and of links where operators are not measured."""
        rates = known.rates
        dtypes = {value.dtype for i in self.items for value in tensors(i.node.meta.get("val"))} & set(estimate.TAKEN)
        if rates is None or not {estimate.name_of(dtype) for dtype in dtypes} <= rates.flops.keys():
            own = estimate.device_rates(self.watch, sorted(dtypes, key=str))
            numbers = self.ranks.table([own.bytes_per_us, own.launch_us, *own.flops.values()]).mean(axis=0).tolist()
            flops = dict(zip(own.flops, numbers[2:], strict=True))
            steady = bool(self.ranks.table([own.steady]).all())
            rates = Rates(numbers[0], numbers[1], flops, rates.wires if rates is not None else {}, steady)
        wires = dict(rates.wires)
        if not self.supposed:
            estimated = [i for i in self.items if i.communicates and not (self.mode is not Mode.ESTIMATE and i.runnable)]
            for name in dict.fromkeys(group_name(item.node) for item in estimated):
                group = self.groups[name]
                device = transport(group_named(name))[1]
                wires[str(group)] = estimate.wire(self.watch, name, group.size, device)
        return known.joined(Known(rates=replace(rates, wires=wires)))

    def alone(self, known: Known) -> Known:
        """With times of all operators that were not known; those that fail are left out."""
        missing = [item for item in self.items if item.name not in known.times]
        compute = [item for item in missing if not item.communicates]
        assert known.rates is not None, "rates are measured before anything else"
        self.ranks.meet()
        found = [self.compute(item.node, known.rates) for item in compute]
        taken = self.ranks.table([time.time_us for time in found]).mean(axis=0).tolist()
        steady = [bool(sure) for sure in self.ranks.table([time.steady for time in found]).min(axis=0)]
        means = zip(compute, taken, steady, strict=True)
        times = {item.name: Time(mean, steady=sure) for item, mean, sure in means if not math.isnan(mean)}
        for item in missing:
            if item.communicates and item.runnable and not self.supposed:
                times[item.name] = self.watch.collective(Operation.of(item.node))
        return known.joined(Known(times))

    def compute(self, node: fx.Node, rates: Rates) -> Time:
        """Not a number for what cannot be run."""
        try:
            return self.watch.compute(Operation.of(node), estimate.roof(node, rates))
        except FAILURES:
            return Time(math.nan)

    def in_pairs(self, known: Known) -> Known:
        """With the pairs that matter, as far as the budget goes; the same on all ranks, since times are."""
        pairs: dict[tuple[str, str], Together] = {}
        left_us = self.budget_s * 1e6
        for first, second in self.partners(known.times):
            one, other = known.times[first.name].time_us, known.times[second.name].time_us
            repeats = 1 if first.communicates else max(1, math.ceil(other / one))
            left_us -= (PAIR_ROUNDS + 1) * 2 * (one * repeats + other)
            if left_us < 0:
                break
            if (first.name, second.name) not in known.pairs:
                operations = Operation.of(first.node), Operation.of(second.node)
                pairs[first.name, second.name] = self.watch.together(*operations, repeats)
        return known.joined(Known(pairs=pairs))

    def partners(self, times: Mapping[str, Time]) -> list[tuple[Item, Item]]:
        """Pairs worth measuring, those that could hide most first."""
        known = [item for item in self.items if item.name in times]

        def total(item: Item) -> float:
            return times[item.name].time_us * item.count

        compute = sorted((i for i in known if not i.communicates), key=lambda i: (-total(i), i.name))
        least = LEAST_SHARE * sum(map(total, compute))
        compute = [item for item in compute[:PARTNERS] if total(item) >= least]
        inside = [item for item in known if item.kind is Kind.INTRA and item.runnable]
        between = [item for item in known if item.kind is Kind.INTER and item.runnable]
        found = [(one, other) for one in compute for other in (*inside, *between)]
        found += [(one, other) for one in inside for other in between]
        return sorted(found, key=lambda pair: -min(total(pair[0]), total(pair[1])))

    def estimated(self, known: Known) -> Known:
        """With a time for everything."""
        rates = known.rates
        assert rates is not None, "rates are measured before anything else"
        times = {}
        for item in self.items:
            if item.name not in known.times:
                if item.communicates:
                    name = group_name(item.node)
                    group, said = self.groups[name], self.supposed.get(name)
                    wire = rates.wires[str(group)] if said is None else said.wire
                    times[item.name] = estimate.communication(item.node, wire, group.size)
                else:
                    times[item.name] = estimate.compute(item.node, rates)
        return known.joined(Known(times))


def tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor)]
