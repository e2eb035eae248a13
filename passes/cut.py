"""Cut: one captured graph of a whole model becomes the joint graphs of the chunks of a pipeline.

In: the joint `Part` of an unmodified model with its loss, and where later chunks begin. Out: a `CutModel`: for each chunk a
joint part with the ports of a captured chunk, so that split, whole_backward, weave and executables take it as it is:

- INPUT `0` is the boundary tensor (not in the first chunk); OUTPUT `output` the next boundary's, in the last chunk `loss`.
  TANGENT has the output's name, INPUT_GRADIENT is `0`. GRADIENT per parameter, under its name in the whole model.
- The model's own inputs and targets reach each chunk that needs them, under their names; the one called `0` is called
  `MODEL_0` in later chunks. PARAMETER and BUFFER have their names in the whole model.
- INPUT `SEED` where the chunk draws random numbers: an int64 scalar on the processor, of the step and the micro-batch
  (`seeding.seed_of`). The same seeds give the same numbers for every cut and every schedule.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from helixrt.errors import ConfigError
from helixrt.passes import nodes
from helixrt.passes.aot_private import place_of
from helixrt.passes.chunk_graph import chunk_graph
from helixrt.passes.crossing import crossing
from helixrt.passes.cut_model import BOUNDARY, MODEL_0, OUTPUT, Boundary, CutModel, ModelChunk, ModelInput, Tie
from helixrt.passes.errors import CaptureError, VerifyError
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.seeding import SEED, seeded
from helixrt.passes.units import Units, units
from helixrt.passes.verify import describe, operators, order_hash, sent

__all__ = [
    "BOUNDARY",
    "MODEL_0",
    "OUTPUT",
    "SEED",
    "Boundary",
    "CutModel",
    "ModelChunk",
    "ModelInput",
    "Tie",
    "cut",
]


def cut(joint: Part, boundaries: Sequence[int | str] = ()) -> CutModel:
    """The chunks of a captured model with its loss.

    `boundaries` say what each later chunk begins with: the module, as `model.layers.4`, or the unit (`units.Units`); none
    for one chunk. Raises CaptureError when something else than one hidden state would cross, ConfigError for boundaries
    that are none.
    """
    began = time.perf_counter()
    check_joint(joint)
    joint = seeded(joint)
    found = units(joint)
    starts = starts_of(found, boundaries)
    crosses = crossing(joint, found, starts)
    between = tuple(map(boundary, crosses.forward, crosses.backward))
    parts = [chunk_graph(joint, crosses, between, chunk) for chunk in range(len(starts) + 1)]
    check_complete(parts, joint, found)
    seconds = (time.perf_counter() - began) / len(parts)
    chunks = tuple(_chunk(part.stamped("cut", seconds), at, found, starts, between) for at, part in enumerate(parts))
    lines = described(chunks)
    return CutModel(chunks, between, ties(chunks), lines, order_hash(lines), joint.guards)


def check_joint(joint: Part) -> None:
    """Raises CaptureError for a graph that is none of a whole model with a loss."""
    outputs = [port.name for port in joint.outputs if port.role is Role.OUTPUT]
    if outputs != ["loss"]:
        reason = f"its outputs are {', '.join(outputs)}; a pipeline needs the loss alone"
        raise CaptureError("the model", reason, "give a loss, or let the model return one")
    wanting = [port.name for port in joint.outputs if port.role is Role.INPUT_GRADIENT]
    if wanting:
        raise CaptureError("the model", f"its input {wanting[0]!r} requires grad", "detach it")


def starts_of(found: Units, boundaries: Sequence[int | str]) -> tuple[int, ...]:
    """The first units of later chunks. Raises ConfigError."""
    starts = []
    for each in boundaries:
        unit = found.named(each) if isinstance(each, str) else each
        if not isinstance(unit, int) or not 0 < unit < found.count:
            last = f", or {found.names[-1]}" if found.names[-1] else ""
            rule = f"must be a layer, {found.names[1]} to {found.names[-2]}{last}"
            raise ConfigError("boundaries", each, rule)
        starts.append(unit)
    if starts != sorted(set(starts)):
        raise ConfigError("boundaries", list(boundaries), "must be in the order that the model runs them, each once")
    return tuple(starts)


def boundary(forward: Sequence[fx.Node], backward: Sequence[fx.Node]) -> Boundary:
    """What crosses, as one tensor, in the widest dtype of all. Raises CaptureError for what does not fit in."""
    carrier = forward[0].meta["val"]
    dtype = functools.reduce(torch.promote_types, (node.meta["val"].dtype for node in (*forward, *backward)))
    for node in (*forward, *backward):
        own = node.meta["val"].dtype
        if own != dtype and not own.is_floating_point:
            reason = f"{node} is {own} and would cross beside the hidden state {forward[0]}, {carrier.dtype}"
            raise CaptureError(place_of(node) or "the model", reason, "compute it in the layers that need it")
    count = sum(node.meta["val"].numel() for node in forward)
    back = sum(node.meta["val"].numel() for node in backward)
    if back > count:
        taken, given = (", ".join(map(str, values)) for values in (forward, backward))
        reason = f"backwards {back} numbers would cross ({given}), more than the {count} of {taken}"
        raise CaptureError(place_of(backward[0]) or "the model", reason, "cut elsewhere")
    shape = tuple(carrier.shape) if len(forward) == 1 and back == count else (count,)
    names = tuple(node.name for node in forward), tuple(node.name for node in backward)
    return Boundary(shape, dtype, carrier.device, *names)


def check_complete(parts: Sequence[Part], joint: Part, found: Units) -> None:
    """Raises VerifyError unless each operator with a unit is in one chunk, once."""
    wanted = {(nodes.origin(node).source, str(node.target)) for node in found.of}
    counted = Counter(operators(parts))
    for name, target in wanted:
        if counted[name, target] != 1:
            raise VerifyError(f"operator {name} ({target}) is in the chunks {counted[name, target]} times, must be there once")
    given = [port for part in parts for port in part.outputs]
    for port in joint.outputs:
        if not given.count(port) or (given.count(port) > 1 and port not in found.terms):
            raise VerifyError(f"{describe(port)} comes out of the chunks {given.count(port)} times")


def _chunk(part: Part, number: int, found: Units, starts: tuple[int, ...], between: Sequence[Boundary]) -> ModelChunk:
    limits = (0, *starts, found.count)
    own = range(max(limits[number], 1), min(limits[number + 1], found.count - 1))
    boundary_port = Port(Role.INPUT, BOUNDARY) if number else None
    sources = {Port(Role.INPUT, MODEL_0): Port(Role.INPUT, BOUNDARY)}
    inputs = [port for port in part.inputs if port.role in (Role.INPUT, Role.TARGET) and port not in (boundary_port, SEED)]
    return chunk_of(
        part,
        number=number,
        first=found.names[limits[number]],
        layers=tuple(found.layers[unit - 1] for unit in own),
        inputs=tuple(ModelInput(port, sources.get(port, port)) for port in inputs),
        before=between[number - 1] if number else None,
        after=between[number] if number < len(between) else None,
    )


def chunk_of(part: Part, **more: Any) -> ModelChunk:
    """With the names that its ports have; `more`: the other fields."""

    def names(of: Sequence[Port], role: Role) -> tuple[str, ...]:
        return tuple(port.name for port in of if port.role is role)

    return ModelChunk(
        part=part,
        parameters=names(part.inputs, Role.PARAMETER),
        gradients=names(part.outputs, Role.GRADIENT),
        buffers=names(part.inputs, Role.BUFFER),
        changed=names(part.outputs, Role.BUFFER),
        seeded=SEED in part.inputs,
        **more,
    )


def ties(chunks: Sequence[ModelChunk]) -> tuple[Tie, ...]:
    """Parameters that several chunks take in, in the order of their names in the chunks."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk.parameters)
    found = []
    for name in names:
        using = tuple(chunk.number for chunk in chunks if name in chunk.parameters)
        if len(using) > 1:
            found.append(Tie(name, using))
    return tuple(found)


def described(chunks: Sequence[ModelChunk]) -> tuple[str, ...]:
    """What ranks must have alike: ports, and operators with what they take in and the shape and dtype of what they give.

    Not numbers among arguments: ranks that share a layer have their own parts of it.
    """
    lines = []
    for chunk in chunks:
        for way, given in (("in", chunk.part.inputs), ("out", chunk.part.outputs)):
            lines += [f"chunk {chunk.number} {way}: {describe(port)}" for port in given]
        for node in chunk.part.graph.nodes:
            before = ", ".join(map(str, node.all_input_nodes))
            lines.append(f"{node} = {node.target}({before}): {sent(node)}")
    return tuple(lines)
