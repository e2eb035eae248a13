"""Classify: what each node of a part keeps busy, and the part as operators for the pairing search.

In: a part, the groups it communicates in (`groups.locate`), and times (`profile`). Out: a `Kind` for each node, or the
part's `Operator`s: one for each node but placeholders and the output, in the graph's order, so that `weave` can put
them back.

- Communication is inside a node when all ranks of its group are on one host, else between nodes. What blocks until it is
  done is processor work to the search, though it is measured as communication is: nothing runs beside it.
- Free are views, items and constants: what moves no data. A reshape that must copy is compute, and so is an operator that
  runs a graph or a kernel of the user's.
- A gradient is added to what is there already as soon as it is made, so that is part of the operator that makes it; a
  view that is handed out as a gradient is no longer free.
- Movable are weight gradients (backward work on the way to one parameter's gradient alone) and routers (what runs in a
  module called `router` or `gate`, and its backward), as in DHelix, section 4.2.
- An operator that draws random numbers needs the one that draws before it, so that no order of the strand draws others.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.errors import VerifyError
from helixrt.passes.fused import Fused
from helixrt.passes.groups import Group, group_name
from helixrt.passes.layers import layers
from helixrt.passes.operators import COMMUNICATION, Kind, Operator
from helixrt.passes.parts import Part, Role
from helixrt.passes.signatures import signature
from helixrt.passes.verify import returned

Names = Mapping[tuple[str, str], str]  # signature and name of a node on this rank -> the signature that ranks agreed on

ROUTERS = frozenset({"router", "gate"})


@dataclass(frozen=True, slots=True)
class Time:
    """How long an operator takes alone; `measured` False for an estimate. See `Operator` for the two times.

    Not `steady` where it was measured on a machine that was too busy to tell: used, and not kept for other runs.
    """

    time_us: float
    host_us: float = 0.0
    measured: bool = True
    steady: bool = True


def strand(part: Part) -> list[fx.Node]:
    """The nodes that are operators of a strand, in order."""
    return [node for node in part.graph.nodes if node.op not in ("placeholder", "output")]


def classify(part: Part, groups: Mapping[str, Group]) -> dict[fx.Node, Kind]:
    """The kind of each node of the strand. Raises VerifyError for a collective in a group that is not in `groups`."""
    return {node: kind_of(node, groups) for node in strand(part)}


def kind_of(node: fx.Node, groups: Mapping[str, Group]) -> Kind:
    """As `classify`, of one node."""
    if nodes.communicates(node):
        name = group_name(node)
        if name not in groups:
            raise VerifyError(f"collective {node} runs in group {name!r}; known are {', '.join(groups) or 'none'}")
        return groups[name].kind if nodes.is_collective(node) else Kind.COMPUTE
    if nodes.is_wait(node):
        return Kind.WAIT
    if isinstance(node.target, Fused | torch._ops.HigherOrderOperator):
        return Kind.COMPUTE
    if node.op != "call_function" or node.target is operator.getitem or not isinstance(node.target, torch._ops.OpOverload):
        return Kind.FREE
    if nodes.is_view(node):
        return Kind.COMPUTE if copies(node) else Kind.FREE
    return Kind.COMPUTE


def copies(view: fx.Node) -> bool:
    """Whether a node that may be a view must move data after all, by its argument's strides."""
    if view.target is not torch.ops.aten.reshape.default:
        return False
    source = nodes.tensor_arguments(view)[0].meta.get("val")
    if not isinstance(source, torch.Tensor):
        return False
    like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    return not torch.ops.aten.reshape.default(like, view.args[1])._is_view()


def movable(part: Part) -> set[fx.Node]:
    """Nodes whose place is free within wide bounds: weight gradients, routers, and their views and casts."""
    chained: set[fx.Node] = set()
    reached: dict[fx.Node, set[str]] = {node: set() for node in part.graph.nodes}
    leaving = any(port.role in (Role.INPUT_GRADIENT, Role.SAVED) for port in part.outputs)
    for port, node in zip(part.outputs, returned(part), strict=True):
        if port.role is Role.GRADIENT:
            reached[node].add(port.name)
        else:
            chained.add(node)
    for node in reversed(part.graph.nodes):
        for before in node.all_input_nodes:
            reached[before] |= reached[node]
            if node in chained and node.op != "output":
                chained.add(before)
    found = set()
    for node in strand(part):
        one = reached[node] and node not in chained and (leaving or len(reached[node]) == 1)
        if nodes.communicates(node):
            continue  # ranks of other groups may wait for it
        if (one and nodes.origin(node).backward) or ROUTERS.intersection(nodes.origin(node).module.split(".")):
            found.add(node)
    return found


def operators(part: Part, groups: Mapping[str, Group], times: Mapping[str, Time], names: Names | None = None) -> list[Operator]:
    """The part as a strand. `times` by `signature`, or by what `names` calls the node; VerifyError for one that is missing."""
    listed = strand(part)
    places = {node: index for index, node in enumerate(listed)}
    free_to_move = movable(part)
    added = accumulations(part)
    numbers = layers([nodes.origin(node).module for node in listed], [str(node.target) for node in listed])
    made = []
    drawn: int | None = None  # the last operator that draws random numbers

    def known(timed_node: fx.Node) -> tuple[str, Time]:
        name = signature(timed_node, groups)
        name = (names or {}).get((name, timed_node.name), name)
        if name not in times:
            raise VerifyError(f"{timed_node}: the profile has no time for {name}; profile the part first")
        return name, times[name]

    for node, layer in zip(listed, numbers, strict=True):
        kind = kind_of(node, groups)
        needs = tuple(dict.fromkeys(places[before] for before in node.all_input_nodes if before in places))
        if nodes.is_random(node):
            needs = needs if drawn is None or drawn in needs else (*needs, drawn)
            drawn = places[node]
        name, time = known(node) if timed(kind) else (signature(node, groups), Time(0.0))
        if node in added and kind is Kind.COMPUTE:
            time = replace(time, time_us=time.time_us + known(added[node])[1].time_us)
        elif node in added and kind is Kind.FREE:
            kind = Kind.COMPUTE
            name, time = known(added[node])
        size = sent_bytes(node) if kind in COMMUNICATION else nodes.size_bytes(node)
        moves = node in free_to_move and kind is Kind.COMPUTE
        made.append(Operator(node.name, kind, time.time_us, needs, name, time.host_us, moves, size, layer))
    return made


def timed(kind: Kind) -> bool:
    """Whether an operator of this kind takes time of its own."""
    return kind is Kind.COMPUTE or kind in COMMUNICATION


def sent_bytes(collective: fx.Node) -> int:
    """What a rank puts into a collective, in bytes."""
    return sum(nodes.size_bytes(node) for node in collective.all_input_nodes)


def distinct(parts: Iterable[Part], groups: Mapping[str, Group]) -> list[tuple[str, fx.Node, Kind]]:
    """Every operator that takes time, of all parts in order, with signature and kind; the same may be there often."""
    found = []
    for part in parts:
        found += [(signature(node, groups), node, kind) for node, kind in classify(part, groups).items() if timed(kind)]
        found += [(signature(node, groups), node, Kind.COMPUTE) for node in accumulations(part).values()]
    return found


def accumulations(part: Part) -> dict[fx.Node, fx.Node]:
    """For each node whose result is handed out as a gradient, a node (of a graph of its own) that adds it to another.

    A gradient that is there is laid out as its parameter, which is contiguous; one made by transposing is not, and adding
    it takes many times as long.
    """
    graph = fx.Graph()
    found: dict[fx.Node, fx.Node] = {}
    for port, node in zip(part.outputs, returned(part), strict=True):
        value = node.meta.get("val")
        if port.role is Role.GRADIENT and node not in found and isinstance(value, torch.Tensor):
            there, new = (graph.placeholder(f"{node.name}_{which}") for which in ("sum", "gradient"))
            name = f"{node.name}_accumulated"
            found[node] = graph.create_node("call_function", torch.ops.aten.add_.Tensor, (there, new), name=name)
            there.meta = found[node].meta = {"val": value.new_empty(value.shape)}
            new.meta = {"val": value}
    return found
