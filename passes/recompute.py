"""Recompute: what regions of activation checkpointing do not keep is computed again in the backward.

In: a captured joint graph, whose forward nodes know their region of `torch.utils.checkpoint` and whether its policy has
them computed again (`aot_private.region`). Out: the joint graph with copies of these nodes in the backward, those of a
region before the first operator of its backward, as in eager; what enters a region, what a policy saves, and results of a
region that the backward of something outside of it uses, are kept instead. Everything behind (split, pairing, weaving)
treats the copies as backward operators.

A random operator of a region draws the same numbers again: the state of the generator is kept, not the numbers. A
collective of a region runs again, as in eager. Of nested regions the outermost counts; buffers are changed once, by the
forward.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.aot_private import RECOMPUTED, autograd_number, region
from helixrt.passes.errors import VerifyError
from helixrt.passes.nodes import Origin, origin, set_origin
from helixrt.passes.parts import Part
from helixrt.passes.replay import random_state, replayed
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import operators, verify


def recompute(joint: Part) -> Part:
    """The graph with its regions computed again in the backward. Raises VerifyError when that breaks it."""
    began = time.perf_counter()
    rewriting = _Rewriting(joint.graph)
    if not rewriting.again:
        return joint
    result = replace(joint, module=rewriting.module(joint.module)).stamped("recompute", time.perf_counter() - began)
    verify(result)
    lost = Counter(operators((joint,))) - Counter(operators((result,)))
    if lost:
        raise VerifyError(f"operators are lost by computing regions again: {', '.join(name for name, _ in list(lost)[:3])}")
    return result


class _Rewriting:
    """Which nodes of a joint graph are computed again, and the graph that does it."""

    def __init__(self, joint: fx.Graph) -> None:
        self.joint = joint
        self.regions: dict[fx.Node, int] = {}
        for node in joint.nodes:
            if (number := self._region(node)) is not None:
                self.regions[node] = number
        for node in self._results():
            del self.regions[node]
        self.again = self._needed()
        self.numbers = {autograd_number(node): place for node, place in self.regions.items()}  # -> the region of its backward
        self.used: dict[int, list[fx.Node]] = {}  # region that was not begun -> what its backward uses
        for node in sorted(self.again):
            self.used.setdefault(self.regions[node], []).append(node)
        self.kept = GraphRewriter()  # what stands for a node of the joint graph
        self.repeated = GraphRewriter(self.kept.graph)  # what computes it again
        self.states: dict[fx.Node, fx.Node] = {}  # for a random operator, the state it drew from

    def _region(self, node: fx.Node) -> int | None:
        """Items and waits belong with their operator."""
        if node.op != "call_function" or origin(node).backward:
            return None
        if (node.target is operator.getitem or nodes.is_wait(node)) and not nodes.is_view(node):
            return self.regions.get(nodes.tensor_arguments(node)[0])
        return region(node, RECOMPUTED)

    def _results(self) -> list[fx.Node]:
        """Nodes of regions that operators outside use, in the forward and in their backward."""
        places = {node: region(node) for node in self.joint.nodes if not origin(node).backward} | self.regions
        own = {(place, autograd_number(node)) for node, place in places.items()}
        found = []
        for node, place in self.regions.items():
            users = [user for user in node.users if user.op == "call_function"]
            forward = any(not origin(user).backward and places[user] != place for user in users)
            if forward and any(origin(user).backward and (place, autograd_number(user)) not in own for user in users):
                found.append(node)
        return found

    def _needed(self) -> set[fx.Node]:
        """Nodes of regions that the backward needs, and those of the same region that they need."""
        found: set[fx.Node] = set()
        stack = [
            before
            for node in self.joint.nodes
            if node.op == "call_function" and origin(node).backward
            for before in node.all_input_nodes
            if before in self.regions
        ]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(n for n in node.all_input_nodes if self.regions.get(n) == self.regions[node])
        return found

    def module(self, root: torch.nn.Module) -> fx.GraphModule:
        for node in self.joint.nodes:
            backward = node.op == "call_function" and origin(node).backward
            if backward:
                number = autograd_number(node)
                begun = [] if number is None else self.used.pop(self.numbers.get(number, -1), [])
                for before in (*begun, *node.all_input_nodes):
                    if before in self.again:
                        self._compute_again(before)
            if node in self.again and nodes.is_random(node):
                self.states[node] = self._state(node)
            self.kept.copy(node, taken=self._either if backward else None)
        for order, node in enumerate(self.kept.graph.nodes):
            if origin(node).order >= 0:
                set_origin(node, replace(origin(node), order=order))
        return self.kept.module(root, root)

    def _either(self, node: fx.Node) -> fx.Node:
        return self.repeated.made.get(node) or self.kept.of(node)

    def _compute_again(self, wanted: fx.Node) -> None:
        """Emit copies of `wanted` and of what it stands on in its region, in their order."""
        chain: set[fx.Node] = set()
        stack = [wanted]
        while stack:
            node = stack.pop()
            if node not in self.repeated.made and node not in chain:
                chain.add(node)
                stack.extend(n for n in node.all_input_nodes if self.regions.get(n) == self.regions[node])
        for node in sorted(chain):
            inside = [n for n in node.all_input_nodes if self.regions.get(n) == self.regions[node]]
            if nodes.is_derived(node) and all(self.repeated.of(n) is self.kept.of(n) for n in inside):
                # A view or cast of what is kept: later passes make it where it is needed.
                self.repeated.made[node] = self.kept.of(node)
            else:
                self._repeat(node)

    def _repeat(self, node: fx.Node) -> None:
        place = self.regions[node]

        def taken(before: fx.Node) -> fx.Node:
            return (self.repeated if self.regions.get(before) == place else self.kept).of(before)

        target: Any = None
        ahead: tuple[Any, ...] = ()
        if nodes.is_random(node):
            assert isinstance(node.target, torch._ops.OpOverload), "only operators draw random numbers"
            target, ahead = replayed(node.target), (self.states[node], _device_of(node))
        copy = self.repeated.copy(node, name=f"{node.name}_again", target=target, ahead=ahead, taken=taken)
        set_origin(copy, Origin(origin(node).module, True, origin(node).order, copy.name))

    def _state(self, node: fx.Node) -> fx.Node:
        """A node, at the present end of the graph, that gives the state `node` draws from."""
        device = _device_of(node)
        state = self.kept.graph.call_function(random_state, (device,))
        state.meta["val"] = _example(node).new_empty(random_state(device).shape, dtype=torch.uint8, device="cpu")
        set_origin(state, Origin(origin(node).module, False, origin(node).order, state.name))
        return state


def _example(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return value[0] if isinstance(value, list | tuple) else value


def _device_of(node: fx.Node) -> torch.device:
    return _example(node).device
