"""Uncut: a captured model as a single chunk, for a pipeline of one stage.

In: the joint `Part` of a model with its loss. Out: a `CutModel` of one chunk. The model needs no list of layers.
"""

from __future__ import annotations

import time

from helixrt.passes.cut import check_joint, described, draws
from helixrt.passes.cut_model import CutModel, ModelChunk, ModelInput
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.seeding import SEED, seeded
from helixrt.passes.verify import order_hash


def uncut(joint: Part) -> CutModel:
    """Random operators draw what they draw in the chunks of `cut`. Raises CaptureError for a graph without one loss."""
    began = time.perf_counter()
    check_joint(joint)
    part = seeded(joint)

    def names(of: tuple[Port, ...], role: Role) -> tuple[str, ...]:
        return tuple(port.name for port in of if port.role is role)

    inputs = [port for port in part.inputs if port.role in (Role.INPUT, Role.TARGET) and port != SEED]
    chunk = ModelChunk(
        number=0,
        part=part.stamped("uncut", time.perf_counter() - began),
        first="",
        layers=(),
        inputs=tuple(ModelInput(port, port) for port in inputs),
        parameters=names(part.inputs, Role.PARAMETER),
        gradients=names(part.outputs, Role.GRADIENT),
        buffers=names(part.inputs, Role.BUFFER),
        changed=names(part.outputs, Role.BUFFER),
        seeded=SEED in part.inputs,
        before=None,
        after=None,
    )
    lines = described((chunk,))
    return CutModel((chunk,), (), (), draws((chunk,)), lines, order_hash(lines))
