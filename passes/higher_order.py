"""Higher-order operators: those that run a graph or a kernel of the user's, and which of them a captured graph may have.

In: a captured part. Out: nothing, or a CaptureError. Conditions, users' Triton kernels and operators that write into their
arguments (as torch makes them functional) run in a part as they do in eager, and are measured. flex_attention does not: by
itself it is dense attention, which holds all scores at once; what users compile it for would be lost without a word.
"""

from __future__ import annotations

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.errors import CaptureError

UNCOMPILED = frozenset({"flex_attention", "flex_attention_backward"})


def check_higher_order(module: fx.GraphModule, where: str) -> None:
    """Raises CaptureError, with `where` if the node does not know its place, for an operator that must not run uncompiled."""
    for node in module.graph.nodes:
        for each in (node, *nodes.inner_nodes(node)):
            if isinstance(each.target, torch._ops.HigherOrderOperator) and each.target.name() in UNCOMPILED:
                raise CaptureError(
                    where,
                    "flex_attention in a captured graph runs uncompiled, as dense attention that holds all scores",
                    "use torch.nn.functional.scaled_dot_product_attention, or train this model by a plain loop",
                )
