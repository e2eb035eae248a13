"""Hide: communication of one strand behind compute of the same strand, as far as its needs allow.

In: a functional ATen graph, a forward or a backward as `torch.compile` hands it to a backend. Out: the same operators,
each collective launched as soon as what it sends is there, each wait put off until its result is needed; compute keeps
its order. Operators that write into tensors, and those without a schema that take tensors, stay where they are among all
others; random operators and collectives stay in order among themselves. What DHelix calls intra-batch overlap (section
3.1).

A collective whose result is larger than what it sends (a gather of a sharded parameter) often needs nothing that the graph
computes, and could be launched at the beginning. Such results are bounded: `AHEAD` of the largest one, or `SHARE` of all, are
under way at a time, and the next is launched when the first of them is waited for.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.errors import VerifyError
from helixrt.passes.operators import Kind, Operator
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.sequence import captured
from helixrt.passes.verify import results_of

AHEAD, SHARE = 2, 0.05


def hide(module: fx.GraphModule) -> fx.GraphModule:
    """The graph in its new order. Raises VerifyError when an operator would run before what it needs, and for one that takes a
    process group and is not known, also in the graphs that an operator runs."""
    listed = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    for node in listed:
        for hidden in nodes.inner_nodes(node):
            nodes.communicates(hidden)  # raises for an operator without a description
    order = captured(operators(listed), reorder=False).order
    rewriter = GraphRewriter()
    middle = [listed[index] for index in order]
    for node in (*module.graph.find_nodes(op="placeholder"), *middle, module.graph.output_node()):
        rewriter.copy(node)
    if len(rewriter.made) != len(module.graph.nodes):
        raise VerifyError(f"{len(module.graph.nodes)} operators before the pass, {len(rewriter.made)} after")
    return rewriter.module(module, module)


def operators(listed: Sequence[fx.Node]) -> list[Operator]:
    """A strand without times. All communication has one lane, so that it stays in order."""
    places = {node: index for index, node in enumerate(listed)}
    found: list[Operator] = []
    fence, drawn, launched = None, None, None
    for index, node in enumerate(listed):
        kind = kind_of(node)
        needs = [places[before] for before in node.all_input_nodes if before in places]
        if keeps_its_place(node):
            needs, fence, kind = list(range(index)), index, Kind.COMPUTE
        elif fence is not None:
            needs.append(fence)
        if nodes.is_random(node):
            needs += [] if drawn is None else [drawn]
            drawn = index
        if nodes.communicates(node):
            needs += [] if launched is None else [launched]
            launched = launched if nodes.is_deferred(node) else index
        found.append(Operator(node.name, kind, 0.0, tuple(sorted(set(needs)))))
    return bounded(listed, found)


def bounded(listed: Sequence[fx.Node], operators: list[Operator]) -> list[Operator]:
    """The operators, where a collective that takes memory needs the wait of an earlier one as well."""
    growth = {index: grown for index, node in enumerate(listed) if (grown := grows_by(node)) > 0}
    limit = max(AHEAD * max(growth.values(), default=0), int(SHARE * sum(growth.values())))
    places = {node: index for index, node in enumerate(listed)}
    under_way: deque[int] = deque()
    for index in growth:
        under_way.append(index)
        total = sum(growth[each] for each in under_way)
        while total > limit:
            first = under_way.popleft()
            total -= growth[first]
            waits = [places[user] for result in results_of(listed[first]) for user in result.users if nodes.is_wait(user)]
            earlier = [wait for wait in waits if wait < index]  # a graph that launches ahead of its waits keeps its order
            operators[index] = replace(operators[index], needs=tuple(sorted({*operators[index].needs, *earlier})))
    return operators


def grows_by(node: fx.Node) -> int:
    """By how many bytes a collective's result is larger than what it sends; 0 for what is no collective."""
    if not nodes.is_collective(node):
        return 0
    if (allocated := node.meta.get("allgather_allocation_bytes")) is not None:  # DeepCompile gives it, and no shapes of shards
        return int(allocated)
    return bytes_of(node) - sum(map(bytes_of, node.all_input_nodes))


def bytes_of(node: fx.Node) -> int:
    """As `nodes.size_bytes`, with the example of each symbolic size."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return sum(hinted(v.numel()) * v.element_size() for v in values if isinstance(v, torch.Tensor))


def hinted(size: int | torch.SymInt) -> int:
    """The size; of a symbolic one that of the example. 0 for one that depends on a tensor's values."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else 0


def kind_of(node: fx.Node) -> Kind:
    if nodes.is_collective(node):
        return Kind.INTRA
    if nodes.is_wait(node):
        return Kind.WAIT
    if nodes.is_among_compute(node):
        return Kind.COMPUTE
    free = nodes.is_view(node) or node.target is operator.getitem or node.op == "get_attr" or is_number(node)
    return Kind.FREE if free else Kind.COMPUTE


def is_number(node: fx.Node) -> bool:
    """Makes a size, or another number, of tensors' sizes and numbers."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def keeps_its_place(node: fx.Node) -> bool:
    """Whether nothing may pass the node: it writes, or may write, since its effects are unknown."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return False
    numbers_alone = not any(isinstance(before.meta.get("val"), torch.Tensor) for before in node.all_input_nodes)
    if is_number(node) and numbers_alone and node.op == "call_function":
        return False
    if nodes.has_untold_effects(node):
        return True
    return nodes.mutates(node) or not isinstance(node.target, torch._ops.OpOverload)
