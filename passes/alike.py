"""Whether two graphs compute the same, independent of the names of nodes, parameters and layers.

In: a part. Out: a digest of its ports' roles and of its operators in order, each with its arguments (earlier nodes by their
numbers) and the shape and dtype of what it gives. Parts of one digest take the same time: so layers that repeat are measured
once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.parts import Part
from helixrt.passes.verify import order_hash, returned


def structure(part: Part) -> bytes:
    """SHA-256. Differs for graphs that hold other constants or inner graphs, by what these print as."""
    numbers: dict[fx.Node, int] = {}
    roles = iter(part.inputs)
    lines = []
    for node in part.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            said = str(next(roles).role)
        elif node.op == "get_attr":
            said = _constant(nodes.attribute(part.module, str(node.target)))
        elif node.op == "output":
            outputs = zip(part.outputs, returned(part), strict=True)
            said = " ".join(f"{port.role} {_spelled(node, numbers)}" for port, node in outputs)
        else:
            said = f"{node.target} {_spelled((node.args, dict(sorted(node.kwargs.items()))), numbers)}"
        lines.append(f"{said}: {_value(node.meta.get('val'))}")
    return order_hash(lines)


def _spelled(argument: Any, numbers: dict[fx.Node, int]) -> str:
    return str(fx.node.map_arg(argument, lambda node: f"%{numbers[node]}"))


def _constant(value: Any) -> str:
    return f"constant {_value(value)}" if isinstance(value, torch.Tensor) else str(getattr(value, "graph", value))


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {list(value.stride())} on {value.device}"
    return str(value) if isinstance(value, int | float | str | bool | type(None)) else type(value).__name__
