"""Hide: communication of one strand behind compute of the same strand, as far as its needs allow.

In: a functional ATen graph, a forward or a backward as `torch.compile` hands it to a backend. Out: the same operators,
each collective launched as soon as what it sends is there, each wait put off until its result is needed; compute keeps
its order. Operators that write into tensors, and those without a schema, stay where they are among all others; random
operators and collectives stay in order among themselves. What DHelix calls intra-batch overlap (section 3.1).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.errors import VerifyError
from helixrt.passes.operators import Kind, Operator
from helixrt.passes.sequence import captured


def hide(module: fx.GraphModule) -> fx.GraphModule:
    """The graph in its new order. Raises VerifyError when an operator would run before what it needs."""
    listed = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    order = captured(operators(listed), reorder=False).order
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    middle = [listed[index] for index in order]
    for node in (*module.graph.find_nodes(op="placeholder"), *middle, module.graph.output_node()):
        missing = [before for before in node.all_input_nodes if before not in copies]
        if missing:
            raise VerifyError(f"{node} would run before {missing[0]}, which it needs")
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if len(copies) != len(module.graph.nodes):
        raise VerifyError(f"{len(module.graph.nodes)} operators before the pass, {len(copies)} after")
    return fx.GraphModule(module, graph, class_name=type(module).__name__)


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
        if nodes.is_collective(node):
            needs += [] if launched is None else [launched]
            launched = index
        found.append(Operator(node.name, kind, 0.0, tuple(sorted(set(needs)))))
    return found


def kind_of(node: fx.Node) -> Kind:
    if nodes.is_collective(node):
        return Kind.INTRA
    if nodes.is_wait(node):
        return Kind.WAIT
    return Kind.FREE if nodes.is_view(node) or node.target is operator.getitem or node.op == "get_attr" else Kind.COMPUTE


def keeps_its_place(node: fx.Node) -> bool:
    if node.op == "get_attr" or node.target is operator.getitem:
        return False
    return nodes.mutates(node) or not isinstance(node.target, torch._ops.OpOverload)
