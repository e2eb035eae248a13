"""Units: what of a captured model must stay together when it is cut, and which unit each operator belongs to.

In: a joint `Part`. Out: `Units`: what comes before the layers (embeddings), each layer, what comes after them (norm, head,
loss). Layers are the children of the numbered container (ModuleList, Sequential) with most parameters.

Operators come in three kinds. *Derived* ones (views, casts) belong to their users. *Free* ones stand on no parameter
and no tangent (masks, rotary tables, losses' targets): every chunk computes its own. All others have one unit:

- forward: the layer whose module ran it; outside of layers the first unit if no layer comes before it and one after; the
  last layer before it if it is between layers, or between the last one and a module behind it (a norm, a head); else the
  last unit.
- backward: the smallest of the units of its backward arguments and of the last uses of its forward values, lowered to the
  unit of its module where that is lower. What no module claims and what stands on one backward value alone (the gradient of
  what is computed between layers) is lowered to the highest unit that uses it.

The sum of a parameter's gradients from several units has none: its terms do, see `Units.terms`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.aot_private import place_of
from helixrt.passes.errors import CaptureError
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.verify import returned


@dataclass(frozen=True)
class Units:
    """`names[u]` is the module that unit u begins with, "" for the first; `layers[u - 1]` the number of layer u.

    `of` has all operators that are neither derived nor free. `terms` are the gradients of parameters that several units
    use, by the GRADIENT port: the nodes whose sum it is, in the order they are added; `sums` are the nodes that add them.
    """

    container: str
    names: tuple[str, ...]
    layers: tuple[int, ...]
    of: Mapping[fx.Node, int]
    free: frozenset[fx.Node]
    terms: Mapping[Port, tuple[fx.Node, ...]]
    sums: frozenset[fx.Node]

    @property
    def count(self) -> int:
        return len(self.names)

    def is_layer(self, unit: int) -> bool:
        return 0 < unit < self.count - 1

    def named(self, module: str) -> int | None:
        """The unit that begins with `module`, or with a part of it behind the layers; None if there is none."""
        last = self.names[-1]
        if module and f"{last}.".startswith(f"{module}.") and not f"{self.container}.".startswith(f"{module}."):
            return self.count - 1
        return self.names.index(module) if module in self.names[1:] else None

    def layer_of(self, name: str) -> int | None:
        """The unit of a module, parameter or buffer inside a layer, by its name."""
        return layer_unit(name, self.container, self.layers)

    def owner(self, node: fx.Node) -> fx.Node | None:
        """The operator with a unit that `node` is made of by views and casts alone; None if there is none."""
        while node not in self.of and node not in self.free and nodes.is_derived(node):
            node = nodes.tensor_arguments(node)[0]
        return node if node in self.of else None


def units(joint: Part) -> Units:
    """Raises CaptureError for a model without a list of layers, or that runs its layers in another order."""
    container, layers = container_of(joint)
    return _Placing(joint, container, layers).units()


def container_of(joint: Part) -> tuple[str, tuple[int, ...]]:
    """The numbered container with most parameters (the outermost of equals), and the numbers of its children."""
    sizes: dict[tuple[str, ...], int] = {}
    numbers: dict[tuple[str, ...], set[int]] = {}
    named = [(port.name, nodes.size_bytes(node)) for port, node in ports(joint) if port.role is Role.PARAMETER]
    modules = [(f"{nodes.origin(node).module}.", 0) for node in joint.graph.nodes]
    for name, size in (*named, *modules):
        path = tuple(name.split("."))[:-1]
        for at, piece in enumerate(path):
            if piece.isdecimal() and path[0] != "loss":
                sizes[path[:at]] = sizes.get(path[:at], 0) + size
                numbers.setdefault(path[:at], set()).add(int(piece))
    found = [path for path in sizes if sizes[path] and len(numbers[path]) > 1]
    if not found:
        remedy = "keep the layers in one nn.ModuleList or nn.Sequential, or train it without a pipeline (pp=1)"
        raise CaptureError("the model", "it has no list of layers to cut it between", remedy)
    path = min(found, key=lambda path: (-sizes[path], len(path), path))
    return ".".join(path), tuple(sorted(numbers[path]))


def layer_unit(name: str, container: str, layers: Sequence[int]) -> int | None:
    """The unit of what is called `name`, if it is in one of the `layers` of the container."""
    prefix = f"{container}." if container else ""
    piece = name.removeprefix(prefix).split(".", 1)[0]
    inside = name.startswith(prefix) and piece.isdecimal() and int(piece) in layers
    return layers.index(int(piece)) + 1 if inside else None


def ports(part: Part) -> Iterator[tuple[Port, fx.Node]]:
    """Inputs by port."""
    return zip(part.inputs, part.graph.find_nodes(op="placeholder"), strict=True)


class _Placing:
    def __init__(self, joint: Part, container: str, layers: tuple[int, ...]) -> None:
        self.joint, self.container, self.layers = joint, container, layers
        self.prefix = f"{container}." if container else ""
        self.layer_of = functools.cache(functools.partial(layer_unit, container=container, layers=layers))
        self.end = len(layers) + 1
        self.inputs = {node: port for port, node in ports(joint)}
        self.operators = [node for node in joint.graph.nodes if node.op == "call_function"]
        self.free: set[fx.Node] = set()
        self.of: dict[fx.Node, int] = {}
        self.terms: dict[Port, tuple[fx.Node, ...]] = {}
        self.sums: set[fx.Node] = set()
        self.used: dict[str, int] = {}  # the last unit that uses a parameter
        self.highest: dict[fx.Node, int] = {}  # for what makes a parameter's gradient

    def units(self) -> Units:
        self.find_free()
        self.place_forward()
        self.modules = self.outside_modules()
        self.last_use = self.last_uses()
        self.find_terms()
        self.place_backward()
        names = ("", *(f"{self.prefix}{layer}" for layer in self.layers), self.first_after())
        sums = frozenset(self.sums)
        return Units(self.container, names, self.layers, self.of, frozenset(self.free), self.terms, sums)

    def stands(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a node needs that has a unit, through views and casts."""
        for before in node.all_input_nodes:
            if before in self.of:
                yield before
            elif nodes.is_derived(before) and before not in self.free:
                yield from self.stands(before)

    # forward

    def find_free(self) -> None:
        fixed = (Role.INPUT, Role.TARGET, Role.BUFFER)
        for node in self.joint.graph.nodes:
            if node.op == "placeholder" and self.inputs[node].role in fixed:
                self.free.add(node)
            elif node.op == "get_attr" or (node.op == "call_function" and not nodes.is_pinned(node)):
                if all(before in self.free for before in node.all_input_nodes):
                    self.free.add(node)

    def placeable(self, node: fx.Node) -> bool:
        return node not in self.free and not nodes.is_derived(node)

    def place_forward(self) -> None:
        """Raises CaptureError when a layer needs a value of a later one."""
        forward = [node for node in self.operators if not nodes.origin(node).backward and self.placeable(node)]
        into_layers = self.reaching(lambda module: self.layer_of(module) is not None)
        into_modules = self.reaching(lambda module: self.layer_of(module) is None and not self.runs_layers(module))
        latest: dict[fx.Node, int] = {}  # the last layer among what it stands on
        for node in forward:
            before = [latest[each] for each in self.stands(node) if each in latest]
            last = max(before, default=0)
            between = self.runs_layers(nodes.origin(node).module) and node in into_modules and last > 0
            ends = any(self.of[each] == self.end for each in self.stands(node))
            latest[node] = self.placed_forward(node, last, node in into_layers or (between and not ends))

    def reaching(self, wanted: Callable[[str], bool]) -> set[fx.Node]:
        """What operators of the forward need whose module is wanted."""
        found: set[fx.Node] = set()
        for node in reversed(self.operators):
            if node in found or (not nodes.origin(node).backward and wanted(nodes.origin(node).module)):
                found.update(node.all_input_nodes)
        return found

    def runs_layers(self, module: str) -> bool:
        """Whether the list of layers is in this module."""
        return not module or f"{self.container}.".startswith(f"{module}.")

    def placed_forward(self, node: fx.Node, before: int, feeds: bool) -> int:
        """Sets the unit; returns the last layer so far, 0 for none."""
        layer = self.layer_of(nodes.origin(node).module)
        producer = nodes.tensor_arguments(node)[0] if node.target is operator.getitem or nodes.is_wait(node) else None
        if producer in self.of:
            self.of[node] = self.of[producer]
        elif layer is not None:
            if before > layer:
                name, later = (f"{self.prefix}{self.layers[unit - 1]}" for unit in (layer, before))
                again = layer in self.of.values()
                used = f"runs again after {later}, as a layer that is used several times"
                reason = f"{name} {used if again else f'needs a value of {later}, so layers do not run in their order'}"
                remedy = "keep them in the order of their run, each used once, or train this model with pp=1"
                raise CaptureError(place_of(node) or nodes.origin(node).module, reason, remedy)
            self.of[node] = layer
        elif feeds:
            self.of[node] = before
        else:
            self.of[node] = self.end
        return before if layer is None else layer

    def outside_modules(self) -> dict[str, int]:
        """The unit of each module outside of layers that has one."""
        found: dict[str, set[int]] = {}
        for node, unit in self.of.items():
            found.setdefault(nodes.origin(node).module, set()).add(unit)
        return {module: min(all_of) for module, all_of in found.items() if len(all_of) == 1}

    def first_after(self) -> str:
        """The first module of the last unit."""
        modules = [nodes.origin(node).module for node, unit in self.of.items() if unit == self.end]
        return next((module for module in modules if not self.runs_layers(module)), "")

    def last_uses(self) -> dict[fx.Node, int]:
        """The last unit that uses each forward value, its own included."""
        found = dict(self.of)
        for node, unit in self.of.items():
            for before in self.stands(node):
                found[before] = max(found[before], unit)
        return found

    # backward

    def find_terms(self) -> None:
        """Terms of gradients of parameters that several units use, and how high the unit of a gradient may be."""
        first: dict[str, int] = {}
        for node, unit in self.of.items():
            for name in self.parameters(node):
                self.used[name] = max(self.used.get(name, 0), unit)
                first[name] = min(first.get(name, unit), unit)
        for port, node in zip(self.joint.outputs, returned(self.joint), strict=True):
            if port.role is Role.GRADIENT and port.name in self.used:
                terms: tuple[fx.Node, ...] = (node,)
                if first[port.name] < self.used[port.name]:
                    terms = tuple(self.added(node))
                if len(terms) > 1:
                    self.terms[port] = terms
                for term in terms:
                    self.highest[self.made_of(term)] = self.used[port.name]

    def made_of(self, node: fx.Node) -> fx.Node:
        while nodes.is_derived(node) or node.target is operator.getitem:
            node = nodes.tensor_arguments(node)[0]
        return node

    def parameters(self, node: fx.Node) -> Iterator[str]:
        """Parameters that a node takes in, through views and casts."""
        for before in node.all_input_nodes:
            if before in self.inputs:
                if self.inputs[before].role is Role.PARAMETER:
                    yield self.inputs[before].name
            elif nodes.is_derived(before):
                yield from self.parameters(before)

    def added(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a gradient is the sum of: operands of additions that nothing else uses, and that only move data."""
        plain = node.target is torch.ops.aten.add.Tensor and not node.kwargs
        alike = plain and all(
            isinstance(each, fx.Node) and each.meta["val"].shape == node.meta["val"].shape for each in node.args
        )
        if node.target is torch.ops.aten.clone.default and len(node.all_input_nodes[0].users) == 1:
            inner = list(self.added(node.all_input_nodes[0]))
            if len(inner) > 1:
                self.sums.add(node)
                yield from inner
                return
        if alike and len(node.users) == 1 and nodes.origin(node).backward:
            self.sums.add(node)
            for each in node.args:
                yield from self.added(each)  # type: ignore[arg-type]
        else:
            yield node

    def place_backward(self) -> None:
        placed = [node for node in self.operators if nodes.origin(node).backward and self.placeable(node)]
        placed = [node for node in placed if node not in self.sums]
        for node in placed:
            self.of[node] = self.placed_backward(node)
        users: dict[fx.Node, list[fx.Node]] = {}
        for node in placed:
            for before in self.stands(node):
                users.setdefault(before, []).append(node)
        for node in reversed(placed):
            module = nodes.origin(node).module
            claimed = self.layer_of(module) is not None or module in self.modules
            items = node.target is operator.getitem or any(user.target is operator.getitem for user in node.users)
            if node in users and not claimed and not items and not nodes.is_wait(node) and not nodes.is_pinned(node):
                lowest = max(self.of[user] for user in users[node])
                above = {each for each in self.stands(node) if nodes.origin(each).backward and self.of[each] > lowest}
                if len(above) == 1:
                    self.of[node] = max(lowest, self.least(node))

    def least(self, node: fx.Node) -> int:
        """The first unit that has all forward values it needs."""
        return max((self.of[each] for each in self.stands(node) if not nodes.origin(each).backward), default=0)

    def placed_backward(self, node: fx.Node) -> int:
        if node.target is operator.getitem or nodes.is_wait(node):
            return self.of[nodes.tensor_arguments(node)[0]]
        most = self.highest.get(node, self.end)
        for name in self.parameters(node):
            most = min(most, self.used.get(name, most))
        for before in self.stands(node):
            most = min(most, self.of[before] if nodes.origin(before).backward else self.last_use[before])
        module = nodes.origin(node).module
        layer = self.layer_of(module)
        own = self.modules.get(module, most) if layer is None else layer
        return min(most, max(self.least(node), own))
