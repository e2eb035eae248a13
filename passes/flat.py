"""Flat: an issue order is changed so that two strands need no more memory than one.

In: the two parts of one split (or of two chunks on one stage), an order of both. Out: an order in which forward operators
wait until the backward has released what they need, so that at no moment more is alive than `SLACK` times the most that
is alive when the backward runs first and the forward then. Of each strand the order stays. The pairing search has a
coarser rule, by layers, that leaves it room to choose; this one counts bytes, and holds at both ends, where logits and
embeddings lie.

DHelix, section 3.3: the backward of one micro-batch frees what the forward of the next one takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from helixrt.passes import nodes
from helixrt.passes.classify import strand
from helixrt.passes.layers import layers
from helixrt.passes.parts import Part, Role
from helixrt.passes.timing import BACKWARD, FORWARD, Place
from helixrt.passes.verify import returned

SLACK = 1.01
LAYERS_AHEAD = 0.8  # of one layer's memory, by which a forward that hides communication may be ahead


@dataclass(frozen=True)
class Usage:
    """Bytes alive in one strand: `during[i]` while the i-th operator runs, `before[i]` before it; one more at the end.

    Parameters, buffers, inputs of the micro-batch and gradients once they are handed out do not count.
    """

    before: tuple[int, ...]
    during: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max((*self.before, *self.during))


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a saved value is stored: values may share memory, or be a part of one that is larger."""

    owner: str
    size_bytes: int


def usage(part: Part, order: Sequence[int], saved: Mapping[str, Memory] | None = None) -> Usage:
    """What is alive as the operators run in `order` (indices in `classify.strand`).

    `saved` is where what a backward takes in lies (`lying_in`); by default each value has memory of its own.
    """
    listed = strand(part)
    owner: dict[fx.Node, object] = {}
    size: dict[object, int] = {}
    for port, node in zip(part.inputs, part.graph.find_nodes(op="placeholder"), strict=True):
        if port.role is Role.SAVED:
            memory = (saved or {}).get(port.name, Memory(port.name, nodes.size_bytes(node)))
            owner[node], size[memory.owner] = memory.owner, memory.size_bytes
    alive = sum(size.values())
    for node in listed:
        if makes_memory(node):
            owner[node], size[node] = node, nodes.size_bytes(node)
        elif node.all_input_nodes and (source := nodes.tensor_arguments(node)[0]) in owner:
            owner[node] = owner[source]
    last: dict[object, int] = {}
    for at, index in enumerate(order):
        for touched in (listed[index], *listed[index].all_input_nodes):
            if touched in owner:
                last[owner[touched]] = at
    for port, node in zip(part.outputs, returned(part), strict=True):
        if port.role is not Role.GRADIENT and node in owner:
            last[owner[node]] = len(order)
    freed = [0] * (len(order) + 1)
    for memory_of, at in last.items():
        freed[at] += size[memory_of]
    before, during = [alive], []
    for at, index in enumerate(order):
        alive += size[listed[index]] if owner.get(listed[index]) is listed[index] else 0
        during.append(alive)
        alive -= freed[at]
        before.append(alive)
    return Usage(tuple(before), tuple(during))


def makes_memory(node: fx.Node) -> bool:
    """The node's result is a tensor of its own. Operators with several results make none, their items do."""
    if node.op != "call_function" or nodes.is_view(node) or nodes.is_wait(node):
        return False
    return not isinstance(node.meta.get("val"), list | tuple | Mapping)


def lying_in(forward: Part) -> dict[str, Memory]:
    """Where the values that a forward saves lie; 0 bytes for those in memory that the caller has anyway."""
    found = {}
    for port, node in zip(forward.outputs, returned(forward), strict=True):
        if port.role is Role.SAVED:
            memory = node
            while memory.op == "call_function" and not makes_memory(memory):
                memory = nodes.tensor_arguments(memory)[0]
            found[port.name] = Memory(memory.name, 0 if memory.op == "placeholder" else nodes.size_bytes(memory))
    return found


def slack_of(forward: Part) -> float:
    """What strands that communicate need to pass each other: most of a layer's memory (1.025 with 32 layers).

    A forward that must wait for all of a layer's memory to be free before it takes the first of its own leaves the
    link idle once a layer. Models without layers get `SLACK`.
    """
    listed = strand(forward)
    numbers = layers([nodes.origin(node).module for node in listed], [str(node.target) for node in listed])
    count = len(set(numbers) - {None})
    return max(SLACK, 1.0 + LAYERS_AHEAD / count) if count > 1 else SLACK


def flat(
    forward: Part,
    backward: Part,
    order: Sequence[Place],
    slack: float = SLACK,
    saved: Mapping[str, Memory] | None = None,
) -> list[Place]:
    """`order` with forward operators put off until there is room; see the module's docstring.

    `saved` is where what the backward takes in lies, if its own forward is not `forward`.
    """
    lines = [[index for which, index in order if which == wanted] for wanted in (FORWARD, BACKWARD)]
    ahead = usage(forward, lines[FORWARD])
    behind = usage(backward, lines[BACKWARD], lying_in(forward) if saved is None else saved)
    limit = slack * max(ahead.peak + behind.before[-1], behind.peak)
    to_come = list(behind.during) + [0]  # the most the backward will still need, by how far it has come
    for at in reversed(range(len(behind.during))):
        to_come[at] = max(to_come[at], to_come[at + 1], behind.before[at + 1])
    done = [0, 0]
    found: list[Place] = []

    def fits() -> bool:
        at, back = done
        return ahead.during[at] + behind.before[back] <= limit and ahead.before[at + 1] + to_come[back] <= limit

    held = 0
    for which, _ in order:
        if which == FORWARD:
            held += 1
        else:
            found.append((BACKWARD, lines[BACKWARD][done[BACKWARD]]))
            done[BACKWARD] += 1
        while held and (fits() or done[BACKWARD] == len(lines[BACKWARD])):
            found.append((FORWARD, lines[FORWARD][done[FORWARD]]))
            done[FORWARD] += 1
            held -= 1
    return found
