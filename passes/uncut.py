"""Uncut: a captured model as a single chunk, for a pipeline of one stage.

In: the joint `Part` of a model with its loss. Out: a `CutModel` of one chunk. The model needs no list of layers.
"""

from __future__ import annotations

import time

from helixrt.passes.cut import check_joint, chunk_of, described
from helixrt.passes.cut_model import CutModel, ModelInput
from helixrt.passes.parts import Part, Role
from helixrt.passes.seeding import SEED, seeded
from helixrt.passes.verify import order_hash


def uncut(joint: Part) -> CutModel:
    """Random operators draw what they draw in the chunks of `cut`. Raises CaptureError for a graph without one loss."""
    began = time.perf_counter()
    check_joint(joint)
    part = seeded(joint)
    given = [port for port in part.inputs if port.role in (Role.INPUT, Role.TARGET) and port != SEED]
    part, inputs = part.stamped("uncut", time.perf_counter() - began), tuple(ModelInput(port, port) for port in given)
    chunk = chunk_of(part, number=0, first="", layers=(), inputs=inputs, before=None, after=None)
    lines = described((chunk,))
    return CutModel((chunk,), (), (), lines, order_hash(lines), joint.guards)
