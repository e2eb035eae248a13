"""The joint graph of one chunk of a captured model.

In: the joint graph of the whole model, what crosses between chunks (`crossing`), and the boundaries' tensors. Out: a joint
`Part` with the chunk's own operators, the views, casts and free values that these need, and what packs and unpacks the
boundaries' tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.crossing import Crossing
from helixrt.passes.cut_model import BOUNDARY, MODEL_0, OUTPUT, Boundary
from helixrt.passes.nodes import Origin, set_origin
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.split import Builder
from helixrt.passes.units import ports
from helixrt.passes.verify import verify

ATEN = torch.ops.aten


def chunk_graph(joint: Part, crosses: Crossing, between: Sequence[Boundary], chunk: int) -> Part:
    """The graph of chunk number `chunk`. Raises VerifyError."""
    return _Building(joint, crosses, between, chunk).part()


class _Building:
    def __init__(self, joint: Part, crosses: Crossing, between: Sequence[Boundary], chunk: int) -> None:
        self.joint, self.crosses, self.chunk = joint, crosses, chunk
        self.last = chunk == len(between)
        self.before = between[chunk - 1] if chunk else None
        self.after = None if self.last else between[chunk]
        given = {node: self.port(port) for port, node in ports(joint)}
        self.builder = Builder(given, {node.name: node for node in joint.graph.nodes if node.op != "placeholder"})
        self.graph = self.builder.rewriter.graph

    def port(self, port: Port) -> Port:
        return Port(Role.INPUT, MODEL_0) if self.chunk and port == Port(Role.INPUT, BOUNDARY) else port

    def part(self) -> Part:
        arriving = []
        if self.before is not None:
            values = self.crosses.forward[self.chunk - 1]
            arriving.append(
                (self.placeholder("boundary", Port(Role.INPUT, BOUNDARY), self.before, values), self.before, values)
            )
        if self.after is not None:
            values = self.crosses.backward[self.chunk]
            tangent = self.placeholder("boundary_gradient", Port(Role.TANGENT, OUTPUT), self.after, values)
            arriving.append((tangent, self.after, values))
        for whole, crossed, values in arriving:
            self.receive(whole, crossed, values)
        for node in self.joint.graph.nodes:
            if self.crosses.home.get(node) == self.chunk:
                self.builder.emit(node)
        outputs = [(port, self.summed(terms)) for port, terms in self.crosses.results[self.chunk]]
        if self.after is not None:
            outputs.insert(0, (Port(Role.OUTPUT, OUTPUT), self.send(self.after, self.crosses.forward[self.chunk])))
        if self.before is not None:
            gradient = self.send(self.before, self.crosses.backward[self.chunk - 1])
            outputs.append((Port(Role.INPUT_GRADIENT, BOUNDARY), gradient))
        return self.closed(outputs)

    def summed(self, terms: Sequence[fx.Node]) -> fx.Node:
        """A result: of a gradient that chunks share, the sum of this chunk's terms."""
        total = self.builder.emit(terms[0])
        for term in terms[1:]:
            total = self.made(ATEN.add.Tensor, total, self.builder.emit(term), like=term)
        return total

    def closed(self, outputs: list[tuple[Port, fx.Node]]) -> Part:
        given = [node for _, node in outputs]
        results = tuple(self.owned(node, given) if port.role is Role.GRADIENT else node for port, node in outputs)
        self.graph.output(results)
        for node in self.graph.find_nodes(op="placeholder"):
            if not node.users:
                self.graph.erase_node(node)
        place = {node: at for at, node in enumerate(self.graph.nodes)}
        taken = sorted((port for port, node in self.builder.taken.items() if node in place), key=self.placed(place))
        module = fx.GraphModule(self.joint.module, self.graph, class_name=f"Chunk{self.chunk}")
        names = {port.name for port in taken if port.role is Role.PARAMETER}
        layouts = {name: layout for name, layout in self.joint.layouts.items() if name in names}
        part = Part(module, tuple(taken), tuple(port for port, _ in outputs), self.joint.stamps, layouts)
        verify(part)
        return part

    def placed(self, place: Mapping[fx.Node, int]) -> Callable[[Port], int]:
        return lambda port: place[self.builder.taken[port]]

    def placeholder(self, name: str, port: Port, crossed: Boundary, values: Sequence[fx.Node]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = values[0].meta["val"].new_empty(crossed.shape, dtype=crossed.dtype)
        set_origin(node, Origin(backward=port.role is Role.TANGENT, source=node.name))
        self.builder.taken[port] = node
        return node

    def receive(self, whole: fx.Node, crossed: Boundary, values: Sequence[fx.Node]) -> None:
        """The values that a boundary's tensor carries."""
        begin = 0
        for value in values:
            like = value.meta["val"]
            node = whole
            if tuple(like.shape) != crossed.shape:
                if crossed.shape != (like.numel(),):
                    flat = whole if len(crossed.shape) == 1 else self.made(ATEN.reshape.default, whole, [-1], like=value)
                    node = self.made(ATEN.slice.Tensor, flat, 0, begin, begin + like.numel(), like=value)
                node = self.made(ATEN.reshape.default, node, list(like.shape), like=value)
            if like.dtype != crossed.dtype:
                node = self.made(ATEN._to_copy.default, node, like=value, dtype=like.dtype)
            self.builder.copies[value.name] = node
            begin += like.numel()

    def send(self, crossed: Boundary, values: Sequence[fx.Node]) -> fx.Node:
        """The tensor that carries `values`."""
        pieces = []
        for value in values:
            node = self.builder.emit(value)
            if value.meta["val"].dtype != crossed.dtype:
                node = self.made(ATEN._to_copy.default, node, like=value, dtype=crossed.dtype)
            pieces.append(node)
        (first, *_), shape = values, list(crossed.shape)
        if len(pieces) == 1 and first.meta["val"].numel() == torch.Size(shape).numel():
            (node,) = pieces
            if list(first.meta["val"].shape) != shape:
                node = self.made(ATEN.reshape.default, node, shape, like=first)
            return node if node.meta["val"].is_contiguous() else self.cloned(node, first)
        flat = [self.made(ATEN.reshape.default, piece, [-1], like=value) for piece, value in zip(pieces, values, strict=True)]
        missing = shape[0] - sum(value.meta["val"].numel() for value in values)
        if missing:
            flat.append(self.made(ATEN.new_zeros.default, flat[0], [missing], like=values[-1]))
        return self.made(ATEN.cat.default, flat, like=values[-1])

    def owned(self, node: fx.Node, results: Sequence[fx.Node]) -> fx.Node:
        return node if nodes.has_own_memory(node, results) else self.cloned(node, node)

    def cloned(self, node: fx.Node, like: fx.Node) -> fx.Node:
        return self.made(ATEN.clone.default, node, like=like, memory_format=torch.contiguous_format)

    def made(self, target: Any, *arguments: Any, like: fx.Node, **keywords: Any) -> fx.Node:
        """A node of the cut's own, at the place of `like`."""
        where = nodes.origin(like)
        node = self.graph.create_node("call_function", target, arguments, keywords, name=f"{like.name}_crossing")
        given, named = fx.node.map_arg((arguments, keywords), lambda before: before.meta["val"])
        node.meta["val"] = target(*given, **named)
        set_origin(node, Origin(where.module, where.backward, where.order, node.name))
        return node
