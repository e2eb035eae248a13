"""Verify: what must hold of a part after every pass, and of parts together against the part they were made from.

In: parts. Out: nothing, or a VerifyError that names the nodes. The rules: placeholders and outputs are what the ports
say; every node comes after what it takes in; nothing writes into a tensor; every collective has exactly one wait,
after it and before any use; every operator that takes a process group is known; no operator is lost, doubled or changed
(views and casts may be computed again).
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from helixrt.passes import nodes
from helixrt.passes.communication import arguments, communication
from helixrt.passes.errors import VerifyError
from helixrt.passes.parts import Part, Port, Role, Split


def verify(part: Part) -> None:
    """Check one part alone. Raises VerifyError."""
    verify_order(part)
    verify_ports(part)
    verify_no_mutation(part)
    verify_communication(part)
    verify_waits(part)


def verify_ports(part: Part) -> None:
    placeholders = part.graph.find_nodes(op="placeholder")
    results = returned(part)
    for what, names, ports in (("inputs", placeholders, part.inputs), ("outputs", results, part.outputs)):
        if len(names) != len(ports):
            raise VerifyError(f"the graph has {len(names)} {what} and {len(ports)} ports: {', '.join(map(str, names))}")
        doubled = [port for port, count in Counter(ports).items() if count > 1]
        if doubled:
            raise VerifyError(f"{what}: {describe(doubled[0])} is there {Counter(ports)[doubled[0]]} times")
    for port, node in zip(part.outputs, results, strict=True):
        if not isinstance(node, fx.Node):
            raise VerifyError(f"outputs: {describe(port)} is {node!r}, not the result of a node")
    first_operator = next((n for n in part.graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    late = [n for n in placeholders if first_operator is not None and first_operator < n]
    if late:
        raise VerifyError(f"placeholder {late[0]} stands after the operator {first_operator}")


def verify_order(part: Part) -> None:
    """Every node after what it takes in, and everything it takes in inside the graph."""
    seen: set[fx.Node] = set()
    for node in part.graph.nodes:
        missing = [n for n in node.all_input_nodes if n not in seen]
        if missing:
            inside = missing[0] in set(part.graph.nodes)
            raise VerifyError(f"{node} uses {missing[0]}, which {'comes after it' if inside else 'is not in the graph'}")
        seen.add(node)
    last = list(part.graph.nodes)[-1]
    if last.op != "output":
        raise VerifyError(f"the output is not the last node, {last} is")


def verify_no_mutation(part: Part) -> None:
    for node in part.graph.nodes:
        if nodes.mutates(node):
            into = ", ".join(map(str, node.all_input_nodes[:1])) if node.args else "its arguments"
            raise VerifyError(f"{node} ({node.target}) writes into {into}; strands may only make new tensors")


def verify_communication(part: Part) -> None:
    """Nothing communicates that passes do not see: by an unknown operator, or inside a graph that an operator runs."""
    for node in part.graph.nodes:
        nodes.communicates(node)
        for hidden in nodes.inner_nodes(node):
            if nodes.communicates(hidden):
                raise VerifyError(
                    f"{hidden} communicates inside {node} ({node.target}): it is in no order that ranks agree on; "
                    "communicate outside of what runs a graph of its own"
                )


def verify_waits(part: Part) -> None:
    """Each collective's results have exactly one wait each, and no other use."""
    for node in part.graph.nodes:
        if nodes.is_collective(node):
            for result in results_of(node):
                waits = [user for user in result.users if nodes.is_wait(user)]
                others = [user for user in result.users if not nodes.is_wait(user)]
                if others:
                    raise VerifyError(f"{others[0]} uses {result} without a wait; collective {node} may still be running")
                if len(waits) != 1:
                    raise VerifyError(f"collective {result} has {len(waits)} waits, must have exactly one: {waits}")
        elif nodes.is_wait(node) and nodes.launched_by(source := nodes.tensor_arguments(node)[0]) is None:
            raise VerifyError(f"{node} waits for {source} ({source.target}), which launches nothing in this graph")


def verify_made_from(parts: Sequence[Part], sources: Sequence[Part]) -> None:
    """Together, `parts` have each operator of `sources` exactly once, with its arguments. Raises VerifyError.

    Views, casts and constants may be there any number of times, at least once if the source uses them, and must be those
    of the source. Results other than SAVED come from the same operators. What a pass adds by itself (copies of buffers
    that change) must carry no origin. Parts of several strands count together.
    """
    wanted, found = Counter(operators(sources)), Counter(operators(parts))
    for key in wanted.keys() | found.keys():
        name, target = key
        if found[key] < wanted[key]:
            raise VerifyError(f"operator {name} ({target}) is lost: {wanted[key]} before the pass, {found[key]} after")
        if found[key] > wanted[key]:
            raise VerifyError(f"operator {name} ({target}) is doubled: {wanted[key]} before the pass, {found[key]} after")
    before, after = values_taken(sources), values_taken(parts)
    for (name, target), taken in after.items():
        known = before.get((name, target), set())
        if other := taken - known:
            had = ", ".join(sorted(known)) or "nothing of that name"
            raise VerifyError(f"{name} ({target}) takes in {sorted(other)[0]} after the pass, {had} before it")
    given, gives = results(sources), results(parts)
    for port in given.keys() & gives.keys():
        if gives[port] != given[port]:
            raise VerifyError(f"{port} gives {sorted(gives[port])} after the pass, {sorted(given[port])} before it")


def values_taken(parts: Sequence[Part]) -> dict[tuple[str, str], set[str]]:
    """What each operator, view and cast takes in: tensors by what makes them, and all else by its value.

    By name and operator; several where strands have operators of the same name.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for part in parts:
        for node in part.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr") or nodes.origin(node).order < 0:
                continue
            said = fx.node.map_arg((node.args, node.kwargs), _Made)
            found.setdefault((nodes.origin(node).source, str(node.target)), set()).add(repr(said))
    return found


class _Made(str):
    """Stands for a node among arguments: what makes its value."""

    def __new__(cls, node: fx.Node) -> _Made:
        return super().__new__(cls, nodes.origin(node).source)

    def __repr__(self) -> str:
        return str(self)


def results(parts: Sequence[Part]) -> dict[str, set[str]]:
    """What makes each result but the SAVED ones, by port; strands count together."""
    found: dict[str, set[str]] = {}
    for part in parts:
        for port, node in zip(part.outputs, returned(part), strict=True):
            if port.role is not Role.SAVED and isinstance(node, fx.Node):
                found.setdefault(f"{port.role} {port.name!r}", set()).add(nodes.origin(node).source)
    return found


def verify_split(split: Split, joint: Part) -> None:
    """F, B and W together do what `joint` does, and each gets what it takes in. Raises VerifyError."""
    parts = (split.forward, split.backward, split.weight)
    for part in parts:
        verify(part)
    verify_made_from(parts, (joint,))
    given = set(joint.inputs)
    for name, part in zip("FBW", parts, strict=True):
        for port in part.inputs:
            if port not in given:
                raise VerifyError(f"{name} takes in {describe(port)}, which nothing before it gives")
        given.update(port for port in part.outputs if port.role is Role.SAVED)
    results = Counter(port for part in parts for port in part.outputs if port.role is not Role.SAVED)
    for port in {*joint.outputs, *results}:
        if results[port] != (port in joint.outputs):
            raise VerifyError(f"{describe(port)} comes out {results[port]} times of F, B and W together")
    random = [[nodes.origin(n).order for n in part.graph.nodes if nodes.is_random(n)] for part in parts]
    drawn = [order for part in random for order in part]
    if drawn != sorted(drawn):
        raise VerifyError("random operators do not run in the captured order, so that they would draw other numbers")


def collective_order(part: Part, group_name: str | None = None) -> tuple[str, ...]:
    """What all ranks must launch in the same order: operator, dtype and shape of what is sent, constants and group.

    Groups have other names on other ranks, so all but `group_name` are numbered as they appear.
    """
    others: dict[str, str] = {}
    lines = []
    for node in part.graph.nodes:
        if (how := communication(node)) is not None:
            said = []
            for name, value in arguments(node).items():
                if name == how.group:
                    value = getattr(value, "group_name", value)
                    value = "this group" if value == group_name else others.setdefault(str(value), f"group {len(others)}")
                said.append(sent(value))
            lines.append(f"{node.target} {', '.join(said)}")
    return tuple(lines)


def order_hash(lines: Iterable[str]) -> bytes:
    """SHA-256 of an order of collectives."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def sent(argument: object) -> str:
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(sent, argument))}]"
    if not isinstance(argument, fx.Node):
        return str(argument)
    value = argument.meta.get("val")
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else "?"


def results_of(node: fx.Node) -> list[fx.Node]:
    """The tensors a collective gives: itself, or its items."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items if items else [node]


def operators(parts: Sequence[Part]) -> Iterable[tuple[str, str]]:
    for part in parts:
        for node in part.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr") or nodes.is_derived(node):
                continue
            if nodes.origin(node).order >= 0:
                yield nodes.origin(node).source, str(node.target)


def returned(part: Part) -> list[Any]:
    """What the graph returns, in the order of the ports."""
    return pytree.tree_leaves(part.graph.output_node().args[0])


def describe(port: Port) -> str:
    return f"{port.role} {port.name!r}" + (f" of strand {port.strand}" if port.strand else "")
