"""The forward of a joint graph alone, for evaluation: it saves nothing.

In: a captured joint `Part`. Out: a part with its OUTPUT ports and what these need. New values of buffers are left out.
"""

from __future__ import annotations

import time

from torch import fx

from helixrt.passes.parts import Part, Role, Stamp
from helixrt.passes.split import Builder
from helixrt.passes.verify import returned, verify


def forward_alone(joint: Part) -> Part:
    """Raises VerifyError."""
    began = time.perf_counter()
    outputs = [(port, node) for port, node in zip(joint.outputs, returned(joint), strict=True) if port.role is Role.OUTPUT]
    needed: set[fx.Node] = set()
    stack = [node for _, node in outputs]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    given = dict(zip(joint.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    builder = Builder(given, {node.name: node for node in joint.graph.nodes})
    for node in joint.graph.nodes:
        if node in needed and node.op != "placeholder":
            builder.emit(node)
    part = builder.part(joint, "ForwardAlone", outputs, (*joint.stamps, Stamp("forward_alone", time.perf_counter() - began)))
    verify(part)
    return part
