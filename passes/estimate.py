"""Estimate: how long operators would take that were not measured, by a roofline (Williams et al., 2009).

In: nodes, and the `Rates` of this device and its links, measured once with a matrix product, a sum of long vectors and
an all-reduce. Out: times marked as not measured. Compute takes the longer of its arithmetic and its memory traffic;
communication a latency and its bytes on the wire, as ring algorithms send them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from helixrt.passes import nodes
from helixrt.passes.classify import Time, sent_bytes
from helixrt.passes.communication import communication as of_communication
from helixrt.passes.fused import Fused
from helixrt.passes.groups import Group
from helixrt.passes.measure import Operation, Roof, Stopwatch
from helixrt.passes.samples import argument_bytes

PROBE_BYTES = 1 << 20
MATRIX = {"cpu": 384, "cuda": 4096}
VECTOR_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}
FASTER, SLOWER = 2.0, 20.0  # than the roofline says, by which a measured time may be without doubt
TAKEN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


GATHERS = frozenset({"embedding", "index_select", "gather", "take", "index", "_unsafe_index"})
"""Operators that read no more of their first tensor than they return."""


class Limit(StrEnum):
    """What an operator's time hangs on, and so how it bears company."""

    ARITHMETIC = "arithmetic"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Wire:
    """A group's communication: latency, bytes per microsecond and rank, and which share of the time the processor works."""

    latency_us: float
    bytes_per_us: float
    host_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Supposed:
    """A group that is planned for without its ranks: where they would be, and what their wire would do."""

    group: Group
    wire: Wire

    def __str__(self) -> str:
        hosts = len(self.group.ranks_per_host)
        where = f"{hosts} hosts" if hosts > 1 else "one host"
        rate = f"{self.wire.bytes_per_us * 8:,.6g} Mbit/s and {self.wire.latency_us:g} us"
        share = f", {self.wire.host_share:.0%} of it work of the processor" if self.wire.host_share else ""
        return f"{self.group.size} ranks on {where}, {rate}{share}"


@dataclass(frozen=True)
class Rates:
    """What a device does in a microsecond. `flops` by dtype (`float32`); `wires` by the group's description. An operator moves
    `bytes_per_us`; one that reads and writes more than `cache_bytes` (0: no limit) moves `far_bytes_per_us`.

    Not `steady` where the machine was too busy to tell.
    """

    bytes_per_us: float
    launch_us: float
    flops: Mapping[str, float] = field(default_factory=dict)
    wires: Mapping[str, Wire] = field(default_factory=dict)
    steady: bool = True
    cache_bytes: float = 0.0
    far_bytes_per_us: float = 0.0

    def moving_us(self, nbytes: float) -> float:
        """Of an operator that reads and writes so much."""
        return nbytes / (self.far_bytes_per_us if 0 < self.cache_bytes < nbytes else self.bytes_per_us)


def device_rates(stopwatch: Stopwatch, dtypes: Iterable[torch.dtype]) -> Rates:
    """Measure this device, for the dtypes a part has; no communication."""
    device = stopwatch.device
    size = MATRIX[device.type]
    flops = {}
    steady = True
    for dtype in dict.fromkeys(dtype for dtype in dtypes if dtype in TAKEN):
        square = torch.full((size, size), 0.5, dtype=dtype, device=device)
        product = stopwatch.compute(Operation(torch.ops.aten.mm.default, [((square, square), {})]))
        flops[name_of(dtype)] = 2.0 * size**3 / product.time_us
        steady = steady and product.steady
    vector = torch.full((VECTOR_BYTES[device.type] // 4,), 0.5, device=device)
    summed = stopwatch.compute(Operation(torch.ops.aten.add.Tensor, [((vector, vector.clone()), {})]))
    small = torch.full((8,), 0.5, device=device)
    launch = stopwatch.compute(Operation(torch.ops.aten.add.Tensor, [((small, small), {})]))
    steady = steady and summed.steady and launch.steady
    return Rates(3.0 * vector.numel() * 4 / summed.time_us, launch.time_us, flops, steady=steady)


def wire(stopwatch: Stopwatch, group: str, size: int, device: torch.device) -> Wire:
    """Measure the group called `group` of `size` ranks; all of them call it at once."""
    taken = []
    for count in (1, PROBE_BYTES // 4):
        tensor = torch.full((count,), 0.5, device=device)
        operation = Operation(torch.ops._c10d_functional.all_reduce.default, [((tensor, "sum", group), {})])
        taken.append(stopwatch.collective(operation))
    latency, whole = taken
    rate = ring_bytes("all_reduce", PROBE_BYTES, size) / max(whole.time_us - latency.time_us, 1.0)
    return Wire(latency.time_us, max(rate, 1e-6), whole.host_us / whole.time_us)


def limit(node: fx.Node, rates: Rates) -> Limit:
    """Which roof is lower for a compute operator."""
    return Limit.ARITHMETIC if _arithmetic_us(node, rates) > _memory_us(node, rates) else Limit.MEMORY


def compute(node: fx.Node, rates: Rates) -> Time:
    """A compute operator under the roofs."""
    return Time(max(_arithmetic_us(node, rates), _memory_us(node, rates), rates.launch_us), measured=False)


def roof(node: fx.Node, rates: Rates) -> Roof:
    """What a compute operator can take. Caches make memory faster than the rate, and rates are measured ones, so the
    bounds are wide; operators that are slower than many times their roof are measured with more doubt, not refused. A GPU has
    no lower bound: its events are never short, and TF32 makes operators several times as fast as their dtype's rate."""
    value = node.meta.get("val")
    made = value if isinstance(value, list | tuple) else (value,)
    elsewhere = any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in made)
    return Roof(0.0 if elsewhere else _arithmetic_us(node, rates) / FASTER, SLOWER * compute(node, rates).time_us)


def communication(node: fx.Node, of: Wire, size: int) -> Time:
    """A collective among `size` ranks."""
    how = of_communication(node)
    time_us = of.latency_us + ring_bytes(how.pattern if how else "", sent_bytes(node), size) / of.bytes_per_us
    return Time(time_us, time_us * of.host_share, measured=False)


def ring_bytes(name: str, sent: float, size: int) -> float:
    """What a rank puts on the wire in a collective it brings `sent` bytes to."""
    if name.startswith("ring_shift"):
        return sent
    if name.startswith("all_gather"):
        return sent * (size - 1)
    share = sent * (size - 1) / max(size, 1)
    return 2 * share if name.startswith("all_reduce") else share


def flops(node: fx.Node) -> float:
    """Floating-point operations of a node, by torch's formulas (matrix products, convolutions, attention); 0 where there is
    none, as for operators that run a graph or a kernel of the user's."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return 0.0
    counter = FlopCounterMode(display=False)

    def shape(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return [shape(each) for each in value] if isinstance(value, list | tuple) else value

    arguments, keywords = fx.node.map_arg((node.args, node.kwargs), lambda n: shape(n.meta.get("val")))
    try:
        with counter:
            target = node.target.module if isinstance(node.target, Fused) else node.target
            target(*arguments, **keywords)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError):
        return 0.0  # no meta kernel: counted by its memory traffic
    return float(counter.get_total_flops())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _arithmetic_us(node: fx.Node, rates: Rates) -> float:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    rate = rates.flops.get(name_of(first.dtype)) if isinstance(first, torch.Tensor) else None
    rate = rate or min(rates.flops.values(), default=0.0)
    return flops(node) / rate if rate else 0.0


def _memory_us(node: fx.Node, rates: Rates) -> float:
    returned = nodes.size_bytes(node)
    read = argument_bytes(node)
    if (gathered := _gathered(node)) is not None:
        read -= max(0, nodes.size_bytes(gathered) - returned)
    return rates.moving_us(read + returned)


def _gathered(node: fx.Node) -> fx.Node | None:
    """The tensor that a gather reads in part."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._opname not in GATHERS:
        return None
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) else None
