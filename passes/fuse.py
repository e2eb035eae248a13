"""Fuse: runs of compute become single operators that a compiler made.

In: an F, B or whole backward. Out: the same part, in which compute between one collective, wait or random operator and
the next is one `Fused` operator, layer by layer. It runs before pairing and weaving, for each strand alone: so the same
functions run woven or not, with the same bits, and what communication hides behind is a fused operator. Operators
that may move (weight gradients, routers) stay themselves, since the search decides when they run; they are matrix
products, which a compiler calls from a library as eager does. Collectives and random operators are eager's, so that
their order and the numbers drawn are.
"""

from __future__ import annotations

import hashlib
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.classify import movable, strand
from helixrt.passes.errors import VerifyError
from helixrt.passes.fused import Fused
from helixrt.passes.layers import layers
from helixrt.passes.nodes import Origin
from helixrt.passes.parts import Part
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import verify

MOST = 60  # nodes in one function: compile time grows faster than they do, and all its inputs are kept until its end

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def fuse(part: Part, compiler: Compiler) -> Part:
    """The part with its compute fused. `compiler` makes a function of a graph and example values for its inputs.

    Raises what the compiler raises.
    """
    began = time.perf_counter()
    loom = _Fusing(part, compiler)
    for group in groups(part):
        loom.emit(group)
    result = replace(part, module=loom.finish()).stamped("fuse", time.perf_counter() - began)
    verify(result)
    found = Counter(name for node in strand(result) for name in stands_for(node, loom.items))
    wanted = Counter(node.name for node in strand(part))
    if found != wanted:
        names = ", ".join(sorted((found - wanted) + (wanted - found))[:3])
        raise VerifyError(f"operators are lost or doubled by fusing: {names}")
    return result


def stands_for(node: fx.Node, items: set[fx.Node]) -> tuple[str, ...]:
    if isinstance(node.target, Fused):
        return node.target.operators
    return () if node in items else (node.name,)


def groups(part: Part) -> list[list[fx.Node]]:
    """The strand's nodes in groups, in an order they can run in; a group of more than one is to be fused."""
    listed = strand(part)
    moves = movable(part)
    numbers = layers([nodes.origin(node).module for node in listed], [str(node.target) for node in listed])
    found: list[list[fx.Node]] = []
    current: list[fx.Node] = []
    put_off: list[fx.Node] = []
    layer: int | None = None

    def close() -> None:
        trailing: list[fx.Node] = []
        while current and nodes.is_view(current[-1]):
            trailing.insert(0, current.pop())
        if sum(not nodes.is_view(node) and node.target is not operator.getitem for node in current) > 1:
            found.append(list(current))
        else:
            found.extend([node] for node in current)
        found.extend([node] for node in (*trailing, *put_off))
        current.clear()
        put_off.clear()

    taken: set[fx.Node] = set()
    for node, number in zip(listed, numbers, strict=True):
        if node in taken:
            continue
        if number is not None and number != layer:
            close()
            layer = number
        items = [user for user in node.users if user.target is operator.getitem]
        taken.update(items)  # the results of an operator stay with it
        if not can_fuse(node):
            close()
            found.extend([each] for each in (node, *items))
        elif node in moves:
            put_off.extend((node, *items))
        else:
            if len(current) >= MOST or any(before in put_off for before in node.all_input_nodes):
                close()
            current.extend((node, *items))
    close()
    return found


def can_fuse(node: fx.Node) -> bool:
    """Pure compute on tensors, or a view."""
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not nodes.is_pinned(node) and node.target.namespace in ("aten", "prims")


class _Fusing:
    """The new graph, and what the old nodes have become."""

    def __init__(self, part: Part, compiler: Compiler) -> None:
        self.part, self.compiler = part, compiler
        self.rewriter = GraphRewriter()
        self.items: set[fx.Node] = set()
        self.functions: dict[str, Callable[..., Any]] = {}
        for node in part.graph.find_nodes(op="placeholder"):
            self.rewriter.copy(node)

    def emit(self, group: Sequence[fx.Node]) -> None:
        if len(group) == 1:
            self.rewriter.copy(group[0])
            return
        inside = set(group)
        taken = list(dict.fromkeys(before for node in group for before in node.all_input_nodes if before not in inside))
        given = [node for node in group if any(user not in inside for user in node.users)]
        values = [node.meta["val"] for node in taken]
        alone = self.alone(group, taken, given)
        code = alone.code
        spelled = "; ".join(f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}" for value in values)
        digest = hashlib.sha256(f"{code}\n{spelled}".encode()).hexdigest()[:10]
        if digest not in self.functions:  # equal layers share one
            self.functions[digest] = self.compiler(alone, values)
        target = Fused(self.functions[digest], digest, tuple(node.name for node in group), alone)
        graph = self.rewriter.graph
        fused = graph.create_node("call_function", target, tuple(map(self.rewriter.of, taken)), name=f"{group[0].name}_fused")
        fused.meta["val"] = tuple(node.meta["val"] for node in given)
        first = next((nodes.origin(node) for node in group if not nodes.is_derived(node)), nodes.origin(group[0]))
        nodes.set_origin(fused, Origin(first.module, first.backward, first.order, fused.name))
        for index, node in enumerate(given):
            item = graph.create_node("call_function", operator.getitem, (fused, index), name=node.name)
            item.meta = dict(node.meta)
            nodes.set_origin(item, replace(nodes.origin(node), source=item.name))
            self.rewriter.made[node] = item
            self.items.add(item)

    @staticmethod
    def alone(group: Sequence[fx.Node], taken: Sequence[fx.Node], given: Sequence[fx.Node]) -> fx.GraphModule:
        """The group as a graph of its own; names are numbers, so that equal layers get equal functions."""
        rewriter = GraphRewriter()
        for number, node in enumerate(taken):
            rewriter.placeholder(node, f"in_{number}").meta = {"val": node.meta["val"]}
        for number, node in enumerate(group):
            rewriter.copy(node, name=f"v_{number}").meta = {"val": node.meta["val"]}
        rewriter.graph.output(tuple(map(rewriter.of, given)))
        return rewriter.module(torch.nn.Module(), "GraphModule")

    def finish(self) -> fx.GraphModule:
        self.rewriter.copy(self.part.graph.output_node())
        return self.rewriter.module(self.part.module, self.part.module)
