"""Early: gradients are finished where they are made, not where the graph ends.

In: a backward, or W. Out: the same part, with the views between a gradient's last operator and its output moved up to
that operator (its matrix product, most often), so that the code that runs the part can add the gradient to what is there and
free it. Otherwise every gradient of the stage would be alive twice at the end.
"""

from __future__ import annotations

import operator
import time
from dataclasses import replace

from torch import fx

from helixrt.passes import nodes
from helixrt.passes.parts import Part, Role
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import returned, verify, verify_made_from


def early(part: Part) -> Part:
    """The part with its gradients finished early. Raises VerifyError when that breaks it."""
    began = time.perf_counter()
    after: dict[fx.Node, list[fx.Node]] = {}
    for port, node in zip(part.outputs, returned(part), strict=True):
        if port.role is Role.GRADIENT:
            chain: list[fx.Node] = []
            while serves_alone(node, chain):
                chain.append(node)
                node = nodes.tensor_arguments(node)[0]
            if chain and node.op == "call_function":
                after.setdefault(node, []).extend(reversed(chain))
    moved = {node for chain in after.values() for node in chain}
    rewriter = GraphRewriter()

    def copy(node: fx.Node) -> None:
        rewriter.copy(node)
        for following in after.get(node, ()):
            copy(following)

    for node in part.graph.nodes:
        if node not in moved:
            copy(node)
    result = replace(part, module=rewriter.module(part.module, part.module)).stamped("early", time.perf_counter() - began)
    verify(result)
    verify_made_from((result,), (part,))
    return result


def serves_alone(node: fx.Node, chain: list[fx.Node]) -> bool:
    """A view or an item that nothing but the output, or the view before it in `chain`, uses."""
    if not (nodes.is_view(node) or node.target is operator.getitem):
        return False
    return all(user.op == "output" or user in chain[-1:] for user in node.users)
