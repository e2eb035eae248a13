"""Lift: casts of parameters leave the graphs, so that they are made once per step.

In: a joint `Part`. Out: a `Lifted`: the part with an input of its own (CAST) for each parameter and type that it was cast to,
and these casts, for the caller to make whenever a parameter has changed. Forward and backward of all micro-batches take in
the same tensor; in the graphs they would cast each weight in F, and again in B or W, which keep no casts (`split`).

Autocast and `parameter.to(dtype)` make such casts. Lifted are those to types that are not wider than the parameter's: a wider
copy would cost more memory than the parameter itself, so these stay in the graphs. Views between the parameter and the cast
are made of the cast instead, which gives the same values. The gradient of a cast stays in the graphs: it is cast back in each
micro-batch, and micro-batches add up in the parameter's type, as autograd adds them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.nodes import Origin, set_origin
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import returned, verify


@dataclass(frozen=True, slots=True)
class Cast:
    """A parameter, by its name in the part, in another type."""

    name: str
    dtype: torch.dtype

    @property
    def port(self) -> Port:
        return Port(Role.CAST, f"{self.name} as {str(self.dtype).removeprefix('torch.')}")


@dataclass(frozen=True)
class Lifted:
    """`part` takes in each of `casts` by its port."""

    part: Part
    casts: tuple[Cast, ...]


def lift(joint: Part) -> Lifted:
    """The part without casts of parameters; the same part where there are none. Raises VerifyError."""
    began = time.perf_counter()
    inputs = dict(zip(joint.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    found = {node: cast for node in joint.graph.nodes if (cast := _cast_of(node, inputs)) is not None}
    if not found:
        return Lifted(joint, ())
    rewriter = GraphRewriter()
    ports: dict[fx.Node, Port] = {}
    for node, port in inputs.items():
        ports[rewriter.placeholder(node)] = port
    taken: dict[Cast, fx.Node] = {}
    for node, cast in found.items():
        if cast not in taken:
            taken[cast] = made = rewriter.graph.placeholder(f"{node.name}_once")
            *views, parameter = _chain(node)
            made.meta["val"] = parameter.meta["val"].to(cast.dtype) if views else node.meta["val"]
            set_origin(made, Origin(source=made.name))
            ports[made] = cast.port
    for node in joint.graph.nodes:
        if node in found:
            rewriter.made[node] = _viewed(rewriter, node, taken[found[node]])
        elif node.op not in ("placeholder", "output"):
            rewriter.copy(node)
    rewriter.graph.output(tuple(rewriter.of(node) for node in returned(joint)))
    for node in reversed(list(rewriter.graph.nodes)):
        if not node.users and (node in ports or (node.op != "output" and nodes.is_derived(node))):
            rewriter.graph.erase_node(node)
    left = rewriter.graph.find_nodes(op="placeholder")
    module = rewriter.module(joint.module, joint.module)
    part = replace(joint, module=module, inputs=tuple(ports[node] for node in left))
    verify(part)
    return Lifted(part.stamped("lift", time.perf_counter() - began), tuple(taken))


def _cast_of(node: fx.Node, inputs: dict[fx.Node, Port]) -> Cast | None:
    """What a node is, if it casts a parameter or a view of all of one to a type that is not wider."""
    if not nodes.is_cast(node):
        return None
    *_, source = _chain(node)
    port = inputs.get(source)
    if port is None or port.role is not Role.PARAMETER:
        return None
    parameter, dtype = source.meta["val"], node.meta["val"].dtype
    links = [link.meta["val"] for link in _chain(node)]
    whole = all(isinstance(each, torch.Tensor) and each.dtype == parameter.dtype for each in links)
    whole = whole and all(each.numel() == parameter.numel() for each in links)
    floats = dtype.is_floating_point and parameter.dtype.is_floating_point
    if not (whole and floats and dtype.itemsize <= parameter.dtype.itemsize and dtype != parameter.dtype):
        return None
    return Cast(port.name, dtype)


def _chain(cast: fx.Node) -> list[fx.Node]:
    """The views that a cast is of, the last first, and what they are views of."""
    return list(_links(nodes.tensor_arguments(cast)[0]))


def _links(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    while nodes.is_view(node) and len(node.all_input_nodes) == 1:
        node = nodes.tensor_arguments(node)[0]
        yield node


def _viewed(rewriter: GraphRewriter, cast: fx.Node, whole: fx.Node) -> fx.Node:
    """What stands for a cast: the lifted one, `whole`, or the views that the cast was of, made of it."""
    *views, _ = _chain(cast)
    result = whole
    for view in reversed(views):
        arguments, keywords = fx.node.map_arg((view.args, view.kwargs), {nodes.tensor_arguments(view)[0]: result}.__getitem__)
        result = rewriter.graph.create_node(view.op, view.target, arguments, keywords, name=view.name)
        result.meta = {**view.meta, "val": view.meta["val"].to(cast.meta["val"].dtype)}
    return result
