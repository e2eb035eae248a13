"""Executable: a part made to run without keeping anything alive longer than it must.

In: a part. Out: a function that takes its inputs out of a list, which it empties, so that no caller holds a saved
activation while the graph is done with it; that hands out each gradient the moment it is made, to be added to what is
there, instead of holding all of them until its end; and frees every other tensor at its last use. This is what keeps
the peak of two woven strands at that of one (DHelix, sections 4.1 and 6.5).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from helixrt.passes.autocast import without_autocast
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import returned

TIMED = 16


class Gradients(Protocol):
    """Where gradients go. `give` owns the tensor it gets; it is called once per backward for each name."""

    def give(self, name: str, gradient: torch.Tensor) -> None: ...


class Executable:
    """Runs a part. `module` is what runs, `module.code` how it reads.

    `took_s` are the seconds of the latest runs, by this processor's clock; a GPU has only got the launches by then.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.module = boxed(part)
        self.inputs = part.inputs
        self.outputs = tuple(port for port in part.outputs if port.role is not Role.GRADIENT)
        self.took_s: deque[float] = deque(maxlen=TIMED)

    def __call__(self, take: Callable[[Port], torch.Tensor], gradients: Gradients) -> list[tuple[Port, torch.Tensor]]:
        """`take` gives the value of each input port, and gives up its own hold of it if it can be had only once.

        Returns the outputs that are no gradients. Runs without autograd, and without autocast: casts are in the graph.
        """
        values = [take(port) for port in reversed(self.inputs)]
        began = time.perf_counter()
        with torch.no_grad(), without_autocast():
            results = self.module.forward(values, gradients)
        self.took_s.append(time.perf_counter() - began)
        return list(zip(self.outputs, results, strict=True))


def boxed(part: Part) -> fx.GraphModule:
    """The part as `forward(values, gradients)`: `values` in reversed order of the ports, emptied at once."""
    given: dict[fx.Node, list[str]] = {}
    kept = []
    for port, node in zip(part.outputs, returned(part), strict=True):
        if port.role is Role.GRADIENT:
            given.setdefault(node, []).append(port.name)
        else:
            kept.append(node)
    return emptying(part.module, tuple(kept), given)


def emptying(module: fx.GraphModule, results: Any, given: Mapping[fx.Node, Sequence[str]]) -> fx.GraphModule:
    """`module` as `forward(values, gradients)`, which takes its inputs from the end of `values`, so that it alone holds
    them; `results` are what it returns, in any nesting, `given` nodes whose values `gradients` gets, by which names."""
    rewriter = GraphRewriter()
    graph = rewriter.graph
    values, gradients = graph.placeholder("values"), graph.placeholder("gradients")
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(results, rewriter.of))
            break
        if node.op == "placeholder":
            taken = graph.create_node("call_method", "pop", (values,), name=node.name)
            taken.meta = dict(node.meta)
            rewriter.made[node] = taken
        else:
            rewriter.copy(node)
        for name in given.get(node, ()):
            graph.call_method("give", (gradients, name, rewriter.of(node)))
    return rewriter.module(module, module)
