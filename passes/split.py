"""Split: a joint graph becomes F, B (gradients of inputs) and W (gradients of weights), by dependency alone.

In: a captured joint `Part`. Out: a `Split`. Running F, then B, then W is bitwise the joint graph.

- F has every operator of the forward, and gives OUTPUT, BUFFER and what the others need as SAVED.
- B has the backward operators that an INPUT_GRADIENT depends on. A first chunk, whose inputs need no gradient, has
  none to define B; there B has the backward operators that gradients of two or more parameters depend on: the chain
  that runs down the layers, which an input's gradient would continue. So the first chunk's B and W cost what the
  other chunks' do, and W can be put off there too. (B may be empty: a chunk with one parameter.)
- W has the rest. Operators with several results go with the part that needs any of them first, so the weight
  gradients of a layer norm come out of B. An item stays with its operator, a wait with its collective. Backward
  operators that draw random numbers are all in B, in order.

What is saved: activations only, nothing is recomputed but views and casts. A part that needs a parameter, a buffer, an
input or a tangent takes it in by its own port, so the caller keeps those until W is done. A view or a cast of such a
port, or of a value that is saved anyway, is made again; of a value and its cast to a wider dtype the narrower is saved.
A buffer that F changes is saved as a copy.

After torch.distributed's split of backward for zero-bubble schedules (Qi et al., 2024) and DHelix, section 4.2, where W
is the movable half.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.errors import VerifyError
from helixrt.passes.parts import Part, Port, Role, Split, Stamp
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import returned, verify, verify_made_from, verify_split


def split(joint: Part) -> Split:
    """F, B and W of a captured graph. Raises VerifyError when the three would not do what the joint graph does."""
    began = time.perf_counter()
    halves = Halves(joint)
    stamps = (*joint.stamps, Stamp("split", time.perf_counter() - began))
    forward, backward, weight = halves.parts(stamps)
    result = Split.of(forward, backward, weight)
    verify_split(result, joint)
    return result


def whole_backward(halves: Split) -> Part:
    """B and W in one graph, in the captured order; for schedules that do not move W. Raises VerifyError."""
    began = time.perf_counter()
    sources: dict[str, fx.Node] = {}
    ports: dict[str, Port] = {}
    wanted: dict[Port, str] = {}
    inside = frozenset(halves.backward_to_weight)
    for part in (halves.backward, halves.weight):
        for port, node in zip(part.inputs, part.graph.find_nodes(op="placeholder"), strict=True):
            if port not in inside:
                ports[node.name] = port
                sources.setdefault(node.name, node)
        for node in part.graph.nodes:
            if node.op not in ("placeholder", "output"):
                sources.setdefault(node.name, node)
        for port, value in zip(part.outputs, returned(part), strict=True):
            if port.role is not Role.SAVED:
                wanted[port] = value.name
    builder = Builder({sources[name]: port for name, port in ports.items()}, sources)
    for node in sorted((n for n in sources.values() if not again(n)), key=lambda n: nodes.origin(n).order):
        if node.op != "placeholder":
            builder.emit(node)
    stamp = Stamp("whole_backward", time.perf_counter() - began)
    outputs = [(port, sources[name]) for port, name in wanted.items()]
    whole = builder.part(halves.backward, "WholeBackward", outputs, (*halves.backward.stamps, stamp))
    verify(whole)
    verify_made_from((whole,), (halves.backward, halves.weight))
    return whole


def again(node: fx.Node) -> bool:
    """Made where it is first needed: views, casts and constants."""
    return nodes.is_derived(node) or node.op == "get_attr"


class Halves:
    """Decides what is in F, B and W, and what is saved between them."""

    def __init__(self, joint: Part) -> None:
        self.joint = joint
        self.ports = dict(zip(joint.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
        self.results = list(zip(joint.outputs, returned(joint), strict=True))
        self.operators = [n for n in joint.graph.nodes if n.op not in ("placeholder", "output")]
        changing = {port.name for port in joint.outputs if port.role is Role.BUFFER}
        self.changing = {n for n, port in self.ports.items() if port.role is Role.BUFFER and port.name in changing}
        self.home = {node: "F" for node in self.operators if not nodes.origin(node).backward}
        chain = self.chain()
        for node in self.operators:
            if node not in self.home:
                self.home[node] = "B" if node in chain else "W"
        self.keep_together()

    def chain(self) -> set[fx.Node]:
        """Backward operators of B; see the module's docstring."""
        backward = [node for node in self.operators if nodes.origin(node).backward]
        roots = [node for port, node in self.results if port.role is Role.INPUT_GRADIENT]
        roots += [node for node in backward if nodes.is_random(node)]
        if any(port.role is Role.INPUT_GRADIENT for port, _ in self.results):
            return ancestors(roots)
        reached: dict[fx.Node, set[str]] = {node: set() for node in backward}
        for port, node in self.results:
            if port.role is Role.GRADIENT and node in reached:
                reached[node].add(port.name)
        for node in reversed(backward):
            for before in node.all_input_nodes:
                if before in reached and len(reached[before]) < 2:
                    reached[before] |= reached[node]
        return ancestors([*roots, *(node for node in backward if len(reached[node]) > 1)])

    def keep_together(self) -> None:
        """Items with their operator, waits with their collective."""
        for node in self.operators:
            if node.target is operator.getitem or nodes.is_wait(node):
                producer = nodes.tensor_arguments(node)[0]
                if producer in self.home and (nodes.is_wait(node) or not nodes.is_view(node)):
                    self.home[node] = self.home[producer]

    def parts(self, stamps: tuple[Stamp, ...]) -> tuple[Part, Part, Part]:
        stood_on = {home: self.stood_on(home) for home in "BW"}
        direct = {node for found in stood_on.values() for node in found if not nodes.is_derived(node)}
        needed = {home: self.saved(found, direct) for home, found in stood_on.items()}
        built = []
        for home in "FBW":
            own = [node for node in self.operators if self.home[node] == home]
            saves = [n for later in "BW" for n in needed[later] if home != later and self.home.get(n, "F") == home]
            given = {node: Port(Role.SAVED, node.name) for node in needed.get(home, ())}
            given |= {node: port for node, port in self.ports.items() if node not in given}
            builder = Builder(given, {node.name: node for node in self.operators})
            for node in own:
                if not again(node):
                    builder.emit(node)
            outputs: list[tuple[Port, fx.Node]] = []
            for port, node in self.results:
                if not isinstance(node, fx.Node):
                    raise VerifyError(f"output {port.role} {port.name!r} is {node!r}, not the result of a node")
                if self.home_of(port, node) == home:
                    outputs.append((port, node))
            outputs += [(Port(Role.SAVED, node.name), node) for node in dict.fromkeys(saves)]
            name = {"F": "Forward", "B": "Backward", "W": "Weight"}[home]
            built.append(builder.part(self.joint, name, outputs, stamps, copied=self.changing))
        return built[0], built[1], built[2]

    def home_of(self, port: Port, node: fx.Node) -> str:
        """The part that gives a result; results that are inputs come with their kind."""
        if node in self.home:
            return self.home[node]
        return {Role.GRADIENT: "W", Role.INPUT_GRADIENT: "B"}.get(port.role, "F")

    # what is saved

    def stood_on(self, home: str) -> list[fx.Node]:
        """What the operators and results of `home` take in from outside it."""
        found: dict[fx.Node, None] = {}
        for node in self.operators:
            if self.home[node] == home and not again(node):
                for before in node.all_input_nodes:
                    self.reach(before, home, found)
        for _, node in self.results:
            if self.home.get(node) == home:
                self.reach(node, home, found)
        return list(found)

    def saved(self, stood_on: list[fx.Node], direct: set[fx.Node]) -> list[fx.Node]:
        """What must be saved so that each of `stood_on` can be had, in the order it is made."""
        sources = {self.source(node, direct) for node in stood_on} - {None}
        return [node for node in self.joint.graph.nodes if node in sources]

    def reach(self, node: fx.Node, home: str, found: dict[fx.Node, None]) -> None:
        """Collect what `node` stands on outside `home`, through views and casts of `home` itself."""
        if self.home.get(node) == home:
            if again(node):
                for before in node.all_input_nodes:
                    self.reach(before, home, found)
            return
        found[node] = None

    def source(self, node: fx.Node, direct: set[fx.Node]) -> fx.Node | None:
        """What to save so that `node` can be made again from it; None if a lasting input will do.

        Walks up through views and casts: to an input, else to a value that is wanted anyway, else to the narrowest.
        """
        chain = [node]
        while nodes.is_derived(chain[-1]):
            chain.append(nodes.tensor_arguments(chain[-1])[0])
        end = chain[-1]
        if end in self.ports:
            return end if end in self.changing else None
        if end.op == "get_attr":
            return None
        savable = [link for link in chain if isinstance(link.meta.get("val"), torch.Tensor)]
        for link in savable:
            if link in direct:
                return link
        narrowest = min(nodes.size_bytes(nodes.storage_owner(link)) for link in savable)
        return next(link for link in savable if nodes.size_bytes(nodes.storage_owner(link)) == narrowest)


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Backward nodes that any of `roots` depends on, themselves included."""
    found: set[fx.Node] = set()
    stack = [node for node in roots if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found and node.op != "placeholder" and nodes.origin(node).backward:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


@dataclass
class Builder:
    """Copies nodes into a new graph, inputs as they are first needed, views and casts just before their first use."""

    given: dict[fx.Node, Port]
    sources: dict[str, fx.Node]
    rewriter: GraphRewriter = field(default_factory=GraphRewriter)
    copies: dict[str, fx.Node] = field(default_factory=dict)  # by name: `sources` may be of several graphs
    taken: dict[Port, fx.Node] = field(default_factory=dict)

    def emit(self, node: fx.Node) -> fx.Node:
        """The copy of `node`, made now if there is none yet, with all it stands on."""
        if node.name in self.copies:
            return self.copies[node.name]
        if node in self.given or (node := self.sources.get(node.name, node)) in self.given:
            return self.take(node)
        if node.op == "placeholder":
            raise VerifyError(f"{node} is needed and neither made nor taken in")
        for before in node.all_input_nodes:
            self.emit(before)
        copy = self.copies[node.name] = self.rewriter.copy(node, taken=lambda before: self.copies[before.name])
        return copy

    def take(self, node: fx.Node) -> fx.Node:
        graph = self.rewriter.graph
        first = next((n for n in graph.nodes if n.op != "placeholder"), None)
        with graph.inserting_before(first) if first is not None else nullcontext():
            copy = self.rewriter.placeholder(node)
        self.copies[node.name] = self.taken[self.given[node]] = copy
        return copy

    def part(
        self,
        like: Part,
        name: str,
        outputs: list[tuple[Port, fx.Node]],
        stamps: tuple[Stamp, ...],
        copied: Iterable[fx.Node] = (),
    ) -> Part:
        """Close the graph. SAVED results that are one of `copied` leave as copies."""
        copied, graph = set(copied), self.rewriter.graph
        results = []
        for port, node in outputs:
            result = self.emit(node)
            if port.role is Role.SAVED and node in copied:
                value = result.meta["val"]
                result = graph.call_function(torch.ops.aten.clone.default, (result,))
                result.meta["val"] = value
            results.append(result)
        graph.output(tuple(results))
        place = {node: i for i, node in enumerate(graph.nodes)}
        taken = sorted(self.taken, key=lambda port: place[self.taken[port]])
        module = self.rewriter.module(like.module, name)
        return Part(module, tuple(taken), tuple(port for port, _ in outputs), stamps, like.layouts)
