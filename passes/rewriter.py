"""Rewriter: a new graph out of the nodes of others.

In: nodes, in the order in which they shall run, each with what it takes instead of its old arguments. Out: a graph. Every pass
that orders, copies, leaves out or replaces operators makes its graph with this one, so that arguments, names and metadata are
treated in the same way, and an operator that would run before its inputs is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from helixrt.passes.errors import VerifyError


class GraphRewriter:
    """The graph being made; `made` maps old nodes to those in it.

    Several may write into one `graph`, each for its own old nodes. `whose` begins the messages.
    """

    def __init__(self, graph: fx.Graph | None = None, whose: str = "") -> None:
        self.graph = graph if graph is not None else fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self._whose = f"{whose}: " if whose else ""

    def of(self, node: fx.Node) -> fx.Node:
        """What stands for `node`. Raises VerifyError where nothing does yet."""
        if node not in self.made:
            raise VerifyError(f"{self._whose}{node} is needed before it is made, or nothing makes it")
        return self.made[node]

    def check_ready(self, node: fx.Node) -> None:
        """Raises VerifyError, naming both, if `node` takes what is not made yet."""
        for before in node.all_input_nodes:
            if before not in self.made:
                raise VerifyError(f"{self._whose}{node} would run before {before}, which it needs, or nothing makes that")

    def copy(
        self,
        node: fx.Node,
        *,
        name: str = "",
        target: Any = None,
        ahead: Iterable[Any] = (),
        arguments: Sequence[Any] | None = None,
        taken: Callable[[fx.Node], fx.Node] | None = None,
    ) -> fx.Node:
        """`node` at the present end of the graph, under its own name if that is free or under `name`, with its metadata.

        `target` replaces its operator, and the arguments `ahead` come before its own, or before `arguments`. `taken` gives the
        replacement of a node that it takes (by default `of`, after `check_ready`). The copy stands for the node from now on.
        """
        if taken is None and arguments is None:
            self.check_ready(node)
        own = node.args if arguments is None else tuple(arguments)
        given, keywords = fx.node.map_arg((own, node.kwargs), taken or self.of)
        copy = self.graph.create_node(
            node.op,
            node.target if target is None else target,
            (*ahead, *given),
            keywords,
            name=name or node.name,
            type_expr=node.type,
        )
        copy.meta = dict(node.meta)
        self.made[node] = copy
        return copy

    def placeholder(self, node: fx.Node, name: str = "") -> fx.Node:
        """An input for what `node` was, under its name, with its metadata; it stands for the node from now on."""
        name = name or node.name
        copy = self.graph.create_node("placeholder", name, name=name)  # `Graph.placeholder` changes names to lower case
        copy.meta = dict(node.meta)
        self.made[node] = copy
        return copy

    def module(self, root: torch.nn.Module, like: torch.nn.Module | str) -> fx.GraphModule:
        """The graph, with the constants of `root`, as a class of this name."""
        return fx.GraphModule(root, self.graph, class_name=like if isinstance(like, str) else type(like).__name__)
