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

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from helixrt.errors import ConfigError
from helixrt.passes import nodes
from helixrt.passes.aot_private import place_of
from helixrt.passes.crossing import Crossing, crossing
from helixrt.passes.errors import CaptureError, VerifyError
from helixrt.passes.nodes import Origin, set_origin
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.seeding import SEED, order_of, seeded
from helixrt.passes.split import Builder
from helixrt.passes.units import Units, ports, units
from helixrt.passes.verify import describe, operators, order_hash, sent, verify

ATEN = torch.ops.aten

BOUNDARY = "0"  # of INPUT and INPUT_GRADIENT
OUTPUT = "output"  # of OUTPUT and TANGENT in all chunks but the last
MODEL_0 = "model.0"  # what later chunks call the model's own input `0`


@dataclass(frozen=True)
class Boundary:
    """The tensor that crosses between two neighbouring chunks, as INPUT `0` and, backwards, as INPUT_GRADIENT `0`.

    `shape` and `dtype` are the same both ways; it is contiguous. It is the hidden state, as it is, unless the end of the
    model also uses values of earlier layers (router logits for an auxiliary loss): then it is flat, with all of `values`
    one after the other. `values` and `gradients` name the nodes of the whole graph that it carries.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: tuple[str, ...]
    gradients: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ModelInput:
    """A tensor of the micro-batch that a chunk takes in: by which port, and which INPUT or TARGET of the model it is."""

    port: Port
    source: Port


@dataclass(frozen=True)
class ModelChunk:
    """One chunk. `part` is its joint graph; all names are those of the whole model.

    `first` is the module that it begins with ("" for the first chunk), `layers` the numbers of its layers. `parameters` and
    `buffers` are what the graphs take in, in the order of the ports; `gradients` the parameters that it gives a gradient
    of, `changed` the buffers that it gives new values of: for the caller to copy in after each forward. `seeded` tells
    whether `SEED` is among the inputs. `before` and `after` are the boundaries on both sides, None at the ends.
    """

    number: int
    part: Part
    first: str
    layers: tuple[int, ...]
    inputs: tuple[ModelInput, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    buffers: tuple[str, ...]
    changed: tuple[str, ...]
    seeded: bool
    before: Boundary | None
    after: Boundary | None


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several chunks use. Each of `chunks` has it as a PARAMETER; those in `terms` give a term of its
    gradient, to be added once per step."""

    name: str
    chunks: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """A random operator: `order` is its number among those of the whole graph, from 0; with the seed it says what is drawn.

    `chunks` are those that run it: several where all of them need what it draws.
    """

    order: int
    node: str
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class CutModel:
    """A model cut into chunks; `boundaries[i]` is between chunks i and i + 1.

    `lines` describe ports, boundaries and operators of all chunks; ranks compare them (`agree.agree_on`), since ports are
    named by nodes. `hash` is their SHA-256.
    """

    chunks: tuple[ModelChunk, ...]
    boundaries: tuple[Boundary, ...]
    ties: tuple[Tie, ...]
    draws: tuple[Draw, ...]
    lines: tuple[str, ...]
    hash: bytes


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
    parts = [_Building(joint, crosses, between, chunk).part() for chunk in range(len(starts) + 1)]
    check_complete(parts, joint, found)
    seconds = (time.perf_counter() - began) / len(parts)
    chunks = tuple(_chunk(part.stamped("cut", seconds), at, found, starts, between, joint) for at, part in enumerate(parts))
    lines = described(chunks)
    return CutModel(chunks, between, ties(chunks), draws(chunks), lines, order_hash(lines))


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
    """What crosses, as one tensor. Raises CaptureError when a dtype does not fit in."""
    carrier = forward[0].meta["val"]
    for node in (*forward, *backward):
        if torch.promote_types(node.meta["val"].dtype, carrier.dtype) != carrier.dtype:
            reason = f"{node} is {node.meta['val'].dtype} and would cross beside the hidden state {forward[0]}, {carrier.dtype}"
            raise CaptureError(place_of(node) or "the model", reason, "cast it to the dtype of the hidden state")
    count = sum(node.meta["val"].numel() for node in forward)
    back = sum(node.meta["val"].numel() for node in backward)
    if back > count:
        names = ", ".join(map(str, backward))
        reason = f"backwards {back} numbers would cross ({names}), more than the {count} of {', '.join(map(str, forward))}"
        raise CaptureError(place_of(backward[0]) or "the model", reason, "cut elsewhere")
    shape = tuple(carrier.shape) if len(forward) == 1 and back == count else (count,)
    names = tuple(node.name for node in forward), tuple(node.name for node in backward)
    return Boundary(shape, carrier.dtype, carrier.device, *names)


class _Building:
    """Builds the joint graph of one chunk."""

    def __init__(self, joint: Part, crosses: Crossing, between: Sequence[Boundary], chunk: int) -> None:
        self.joint, self.crosses, self.chunk = joint, crosses, chunk
        self.last = chunk == len(between)
        self.before = between[chunk - 1] if chunk else None
        self.after = None if self.last else between[chunk]
        given = {node: self.port(port) for port, node in ports(joint)}
        self.builder = Builder(given, {node.name: node for node in joint.graph.nodes if node.op != "placeholder"})
        self.graph = self.builder.graph

    def port(self, port: Port) -> Port:
        return Port(Role.INPUT, MODEL_0) if self.chunk and port == Port(Role.INPUT, BOUNDARY) else port

    def part(self) -> Part:
        arriving = []
        if self.before is not None:
            values = self.crosses.forward[self.chunk - 1]
            arriving.append(
                (self.placeholder("boundary", Port(Role.INPUT, BOUNDARY), self.before, values), self.before, values)
            )
        if self.after is not None:
            values = self.crosses.backward[self.chunk]
            tangent = self.placeholder("boundary_gradient", Port(Role.TANGENT, OUTPUT), self.after, values)
            arriving.append((tangent, self.after, values))
        for whole, crossed, values in arriving:
            self.receive(whole, crossed, values)
        for node in self.joint.graph.nodes:
            if self.crosses.home.get(node) == self.chunk:
                self.builder.emit(node)
        outputs = [(port, self.summed(terms)) for port, terms in self.crosses.results[self.chunk]]
        if self.after is not None:
            outputs.insert(0, (Port(Role.OUTPUT, OUTPUT), self.send(self.after, self.crosses.forward[self.chunk])))
        if self.before is not None:
            gradient = self.send(self.before, self.crosses.backward[self.chunk - 1])
            outputs.append((Port(Role.INPUT_GRADIENT, BOUNDARY), gradient))
        return self.closed(outputs)

    def summed(self, terms: Sequence[fx.Node]) -> fx.Node:
        """A result: of a gradient that chunks share, the sum of this chunk's terms."""
        total = self.builder.emit(terms[0])
        for term in terms[1:]:
            total = self.made(ATEN.add.Tensor, total, self.builder.emit(term), like=term)
        return total

    def closed(self, outputs: list[tuple[Port, fx.Node]]) -> Part:
        given = [node for _, node in outputs]
        results = tuple(self.owned(node, given) if port.role is Role.GRADIENT else node for port, node in outputs)
        self.graph.output(results)
        for node in self.graph.find_nodes(op="placeholder"):
            if not node.users:
                self.graph.erase_node(node)
        place = {node: at for at, node in enumerate(self.graph.nodes)}
        taken = sorted((port for port, node in self.builder.taken.items() if node in place), key=self.placed(place))
        module = fx.GraphModule(self.joint.module, self.graph, class_name=f"Chunk{self.chunk}")
        names = {port.name for port in taken if port.role is Role.PARAMETER}
        layouts = {name: layout for name, layout in self.joint.layouts.items() if name in names}
        part = Part(module, tuple(taken), tuple(port for port, _ in outputs), self.joint.stamps, layouts)
        verify(part)
        return part

    def placed(self, place: Mapping[fx.Node, int]) -> Callable[[Port], int]:
        return lambda port: place[self.builder.taken[port]]

    def placeholder(self, name: str, port: Port, crossed: Boundary, values: Sequence[fx.Node]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = values[0].meta["val"].new_empty(crossed.shape, dtype=crossed.dtype)
        set_origin(node, Origin(backward=port.role is Role.TANGENT, source=node.name))
        self.builder.taken[port] = node
        return node

    def receive(self, whole: fx.Node, crossed: Boundary, values: Sequence[fx.Node]) -> None:
        """The values that a boundary's tensor carries."""
        begin = 0
        for value in values:
            like = value.meta["val"]
            node = whole
            if tuple(like.shape) != crossed.shape:
                if crossed.shape != (like.numel(),):
                    flat = whole if len(crossed.shape) == 1 else self.made(ATEN.reshape.default, whole, [-1], like=value)
                    node = self.made(ATEN.slice.Tensor, flat, 0, begin, begin + like.numel(), like=value)
                node = self.made(ATEN.reshape.default, node, list(like.shape), like=value)
            if like.dtype != crossed.dtype:
                node = self.made(ATEN._to_copy.default, node, like=value, dtype=like.dtype)
            self.builder.copies[value.name] = node
            begin += like.numel()

    def send(self, crossed: Boundary, values: Sequence[fx.Node]) -> fx.Node:
        """The tensor that carries `values`."""
        pieces = []
        for value in values:
            node = self.builder.emit(value)
            if value.meta["val"].dtype != crossed.dtype:
                node = self.made(ATEN._to_copy.default, node, like=value, dtype=crossed.dtype)
            pieces.append(node)
        (first, *_), shape = values, list(crossed.shape)
        if len(pieces) == 1 and first.meta["val"].numel() == torch.Size(shape).numel():
            (node,) = pieces
            if list(first.meta["val"].shape) != shape:
                node = self.made(ATEN.reshape.default, node, shape, like=first)
            return node if node.meta["val"].is_contiguous() else self.cloned(node, first)
        flat = [self.made(ATEN.reshape.default, piece, [-1], like=value) for piece, value in zip(pieces, values, strict=True)]
        missing = shape[0] - sum(value.meta["val"].numel() for value in values)
        if missing:
            flat.append(self.made(ATEN.new_zeros.default, flat[0], [missing], like=values[-1]))
        return self.made(ATEN.cat.default, flat, like=values[-1])

    def owned(self, node: fx.Node, results: Sequence[fx.Node]) -> fx.Node:
        return node if nodes.has_own_memory(node, results) else self.cloned(node, node)

    def cloned(self, node: fx.Node, like: fx.Node) -> fx.Node:
        return self.made(ATEN.clone.default, node, like=like, memory_format=torch.contiguous_format)

    def made(self, target: Any, *arguments: Any, like: fx.Node, **keywords: Any) -> fx.Node:
        """A node of the cut's own, at the place of `like`."""
        where = nodes.origin(like)
        node = self.graph.create_node("call_function", target, arguments, keywords, name=f"{like.name}_crossing")
        given, named = fx.node.map_arg((arguments, keywords), lambda before: before.meta["val"])
        node.meta["val"] = target(*given, **named)
        set_origin(node, Origin(where.module, where.backward, where.order, node.name))
        return node


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


def _chunk(
    part: Part, number: int, found: Units, starts: tuple[int, ...], between: Sequence[Boundary], joint: Part
) -> ModelChunk:
    limits = (0, *starts, found.count)
    own = range(max(limits[number], 1), min(limits[number + 1], found.count - 1))
    boundary_port = Port(Role.INPUT, BOUNDARY) if number else None
    sources = {Port(Role.INPUT, MODEL_0): Port(Role.INPUT, BOUNDARY)}
    inputs = [port for port in part.inputs if port.role in (Role.INPUT, Role.TARGET) and port not in (boundary_port, SEED)]

    def names(of: Sequence[Port], role: Role) -> tuple[str, ...]:
        return tuple(port.name for port in of if port.role is role)

    return ModelChunk(
        number=number,
        part=part,
        first=found.names[limits[number]],
        layers=tuple(found.layers[unit - 1] for unit in own),
        inputs=tuple(ModelInput(port, sources.get(port, port)) for port in inputs),
        parameters=names(part.inputs, Role.PARAMETER),
        gradients=names(part.outputs, Role.GRADIENT),
        buffers=names(part.inputs, Role.BUFFER),
        changed=names(part.outputs, Role.BUFFER),
        seeded=SEED in part.inputs,
        before=between[number - 1] if number else None,
        after=between[number] if number < len(between) else None,
    )


def ties(chunks: Sequence[ModelChunk]) -> tuple[Tie, ...]:
    """Parameters that several chunks take in, in the order of their names in the chunks."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk.parameters)
    found = []
    for name in names:
        using = tuple(chunk.number for chunk in chunks if name in chunk.parameters)
        if len(using) > 1:
            found.append(Tie(name, using, tuple(chunk.number for chunk in chunks if name in chunk.gradients)))
    return tuple(found)


def draws(chunks: Sequence[ModelChunk]) -> tuple[Draw, ...]:
    """The random operators by their numbers; what is computed again in the backward does not count."""
    found: dict[int, tuple[str, list[int]]] = {}
    for chunk in chunks:
        for node in chunk.part.graph.nodes:
            order = order_of(node)
            if order is not None:
                _, using = found.setdefault(order, (nodes.origin(node).source, []))
                if chunk.number not in using:
                    using.append(chunk.number)
    return tuple(Draw(order, name, tuple(using)) for order, (name, using) in sorted(found.items()))


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
