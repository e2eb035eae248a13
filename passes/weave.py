"""Weave: a forward of one micro-batch and a backward of another become one graph, in a given issue order.

In: the two parts of one split (the backward may be B alone, or B and W in one), and the order in which their operators
are issued, as the pairing search gives it. Out: a `Part` whose ports say their strand: 0 the forward's, 1 the
backward's. Parameters, and buffers that stay as they are, are shared: one port, of strand 0.

The order decides where a collective is launched and where it is waited for; operators between the two are what
hides it. Nothing else is changed: of each strand the operators and their arguments are those of its part, so that the
results are bitwise those of the parts run one after the other. DHelix, section 4.3, with events in place of its
barriers: a wait holds up what needs it and no more.

Random operators draw from one generator, so their order is part of the result: each strand's stay in the captured order,
and where both strands draw, the backward's come first, as if the strands ran one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.classify import strand
from helixrt.passes.errors import VerifyError
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.timing import BACKWARD, FORWARD, Place
from helixrt.passes.verify import returned, verify, verify_made_from

SHARED = frozenset({Role.PARAMETER, Role.CAST, Role.BUFFER})
LETTERS = {FORWARD: "f", BACKWARD: "b"}


def weave(forward: Part, backward: Part, order: Sequence[Place]) -> Part:
    """One part that runs both. `order` has (strand, index in `classify.strand`) of every operator of both, once.

    Raises VerifyError when the order misses an operator, puts one before what it needs, or draws random numbers in
    another order, naming both.
    """
    began = time.perf_counter()
    loom = Loom((forward, backward))
    for place in order:
        loom.issue(*place)
    woven = loom.part()
    verify(woven)
    verify_made_from((woven,), (forward, backward))
    return woven.stamped("weave", time.perf_counter() - began)


class Loom:
    """The graph being made, and what each strand's nodes have become in it."""

    def __init__(self, parts: tuple[Part, Part]) -> None:
        self.parts = parts
        self.listed = tuple(strand(part) for part in parts)
        self.to_draw = [  # by which strand: all of the backward's first
            (which, node) for which in (BACKWARD, FORWARD) for node in self.listed[which] if nodes.is_random(node)
        ][::-1]
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.rewriters = tuple(GraphRewriter(self.graph, f"strand {which}") for which in range(2))
        self.inputs: dict[Port, fx.Node] = {}
        for which, part in enumerate(parts):
            for port, node in zip(part.inputs, part.graph.find_nodes(op="placeholder"), strict=True):
                self.place(which, port, node)

    def place(self, which: int, port: Port, node: fx.Node) -> None:
        shared = port.role in SHARED
        port = replace(port, strand=FORWARD if shared else which)
        if port not in self.inputs:
            name = node.name if shared else f"{LETTERS[which]}_{node.name}"
            copy = self.rewriters[which].placeholder(node, name)
            copy.target = copy.name  # parameters of two chunks may have equal names
            self.inputs[port] = copy
        self.rewriters[which].made[node] = self.inputs[port]

    def issue(self, which: int, index: int) -> None:
        listed = self.listed[which]
        if not 0 <= index < len(listed):
            raise VerifyError(f"strand {which} has {len(listed)} operators, the order asks for number {index}")
        node, rewriter = listed[index], self.rewriters[which]
        if node in rewriter.made:
            raise VerifyError(f"strand {which}: {node} is issued twice")
        rewriter.check_ready(node)
        if nodes.is_random(node) and (self.to_draw[-1] != (which, node)):
            strand_of, first = self.to_draw[-1]
            where = "" if strand_of == which else f" of strand {strand_of}"
            raise VerifyError(f"strand {which}: {node} draws random numbers before {first}{where}, which must draw first")
        if nodes.is_random(node):
            self.to_draw.pop()
        target = self.constant(which, node) if node.op == "get_attr" else None
        rewriter.copy(node, name=f"{LETTERS[which]}_{node.name}", target=target)

    def constant(self, which: int, node: fx.Node) -> str:
        """The name in the new root of a constant; both strands' may be called the same."""
        value: Any = self.parts[which].module
        for piece in str(node.target).split("."):
            value = getattr(value, piece)
        name = str(node.target).replace(".", "_")
        if getattr(self.root, name, value) is not value:
            name = f"{LETTERS[which]}_{name}"
        setattr(self.root, name, value)
        return name

    def part(self) -> Part:
        results: list[fx.Node] = []
        outputs: list[Port] = []
        for which, part in enumerate(self.parts):
            rewriter = self.rewriters[which]
            missed = [node for node in self.listed[which] if node not in rewriter.made]
            if missed:
                raise VerifyError(f"strand {which}: {missed[0]} is never issued")
            results += [rewriter.of(node) for node in returned(part)]
            outputs += [replace(port, strand=which) for port in part.outputs]
        self.graph.output(tuple(results))
        module = self.rewriters[FORWARD].module(self.root, "Woven")
        stamps = tuple(dict.fromkeys(stamp for part in self.parts for stamp in part.stamps))
        layouts = {**self.parts[FORWARD].layouts, **self.parts[BACKWARD].layouts}
        return Part(module, tuple(self.inputs), tuple(outputs), stamps, layouts)


def alternating(forward: Part, backward: Part) -> list[Place]:
    """The order in which both strands progress evenly, the backward a little ahead; for parts without communication."""
    places = []
    for which, part in ((BACKWARD, backward), (FORWARD, forward)):
        count = len(strand(part))
        places += [((index + (which == FORWARD)) / count, which, index) for index in range(count)]
    places.sort(key=lambda place: (place[0], -place[1], place[2]))
    return [(which, index) for _, which, index in places]
