"""Paddings: equal lists of operators on ranks that have parts of different sizes, so that one plan is for all of them.

In: each rank's joint part, captured at the same time, and their group. Out: the part with a padding wherever another rank has
one. DTensor pads a smaller part before ranks gather parts (a vocabulary of 50,257 over two ranks), and does nothing where the
part is as large as any: there a padding by nothing is put in, which copies the part.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.agree import DEADLINE_S, exchange
from helixrt.passes.groups import transport
from helixrt.passes.nodes import Origin, set_origin
from helixrt.passes.parts import Part
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import verify

PAD = torch.ops.aten.constant_pad_nd.default


def padded_alike(joint: Part, group: Any) -> Part:
    """All ranks of `group` call this together. The part itself where they pad alike, or launch different numbers of
    collectives, which is for others to find. Raises DisagreementError when a rank does not come."""
    began = time.perf_counter()
    collectives = [node for node in joint.graph.nodes if nodes.is_collective(node)]
    mine = bytes(is_padded(node) for node in collectives)
    device = transport(group)[1]
    counts = exchange(len(mine).to_bytes(8, "little"), group, None, device)  # ranks come from their captures
    if len(set(counts)) > 1 or not mine:
        return joint
    told = exchange(mine, group, DEADLINE_S, device)
    lacking = {node for at, node in enumerate(collectives) if not mine[at] and any(each[at] for each in told)}
    if not lacking:
        return joint
    rewriter = GraphRewriter(whose="paddings")
    for node in joint.graph.nodes:
        if node not in lacking:
            rewriter.copy(node)
            continue
        value = node.all_input_nodes[0]
        given = rewriter.of(value)
        rewriter.made[value] = _padded(rewriter, value)  # for this node alone
        rewriter.copy(node)
        rewriter.made[value] = given
    module = rewriter.module(joint.module, joint.module)
    made = replace(joint, module=module).stamped("paddings", time.perf_counter() - began)
    verify(made)
    return made


def is_padded(collective: fx.Node) -> bool:
    """Whether what it sends was padded right before."""
    given = collective.all_input_nodes
    return len(given) == 1 and given[0].target is PAD and len(given[0].users) == 1


def _padded(rewriter: GraphRewriter, value: fx.Node) -> fx.Node:
    """By nothing."""
    padded = rewriter.graph.call_function(PAD, (rewriter.of(value), [0, 0]))
    padded.meta["val"] = value.meta["val"]
    where = nodes.origin(value)
    set_origin(padded, Origin(where.module, where.backward, where.order, padded.name))
    return padded
