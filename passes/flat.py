"""Flat: an issue order is changed so that two strands need no more memory than one.

In: the two parts of one split, an order of both. Out: an order in which forward operators wait until the backward has
released what they need, so that at no moment more is alive than `SLACK` times the most that is alive when the strands
run one after the other. Of each strand the order stays. The pairing search has a coarser rule, by layers, that leaves
it room to choose; this one counts bytes, and holds at both ends, where logits and embeddings lie.

DHelix, section 3.3: the backward of one micro-batch frees what the forward of the next one takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from helixrt.passes import nodes
from helixrt.passes.classify import strand
from helixrt.passes.parts import Part, Role
from helixrt.passes.timing import BACKWARD, FORWARD, Place
from helixrt.passes.verify import returned

SLACK = 1.01


@dataclass(frozen=True)
class Profile:
    """Bytes alive in one strand: `before[i]` and `during[i]` of operator i in its own order; `before` has one more.

    Parameters, buffers, inputs of the micro-batch and gradients once they are handed out do not count.
    """

    before: tuple[int, ...]
    during: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max((*self.before, *self.during))


def profile(part: Part, order: Sequence[int], owners: dict[str, str] | None = None, sizes: dict[str, int] | None = None) -> Profile:
    """What is alive as the operators run in `order`.

    `owners` says of a saved value in whose memory it lies, `sizes` how large that is (`lying_in`); by default each has
    memory of its own.
    """
    owners, sizes = owners or {}, sizes or {}
    listed = strand(part)
    owner: dict[fx.Node, object] = {}
    size: dict[object, int] = {}
    alive = 0
    for port, node in zip(part.inputs, part.graph.find_nodes(op="placeholder"), strict=True):
        if port.role is Role.SAVED:
            owner[node] = owners.get(port.name, port.name)
            fresh = owner[node] not in size
            size[owner[node]] = sizes.get(port.name, nodes.size_bytes(node))
            alive += size[owner[node]] if fresh else 0
    for node in listed:
        if makes_memory(node):
            owner[node], size[node] = node, nodes.size_bytes(node)
        elif node.all_input_nodes and (memory := nodes.tensor_arguments(node)[0]) in owner:
            owner[node] = owner[memory]
    last: dict[object, int] = {}
    for at, index in enumerate(order):
        for touched in (listed[index], *listed[index].all_input_nodes):
            if touched in owner:
                last[owner[touched]] = at
    for port, node in zip(part.outputs, returned(part), strict=True):
        if port.role is not Role.GRADIENT and node in owner:
            last[owner[node]] = len(order)
    ends: dict[int, int] = {}
    for memory, at in last.items():
        ends[at] = ends.get(at, 0) + size[memory]
    before, during = [alive], []
    for at, index in enumerate(order):
        alive += size[listed[index]] if owner.get(listed[index]) is listed[index] else 0
        during.append(alive)
        alive -= ends.get(at, 0)
        before.append(alive)
    return Profile(tuple(before), tuple(during))


def makes_memory(node: fx.Node) -> bool:
    """The node's result is a tensor of its own. Operators with several results make none, their items do."""
    if node.op != "call_function" or nodes.is_view(node) or nodes.is_wait(node):
        return False
    return not isinstance(node.meta.get("val"), list | tuple)


def lying_in(forward: Part) -> tuple[dict[str, str], dict[str, int]]:
    """Of each value that the forward saves: the node in whose memory it lies, and the size of that."""
    owners, sizes = {}, {}
    for port, node in zip(forward.outputs, returned(forward), strict=True):
        if port.role is Role.SAVED:
            memory = node
            while memory.op == "call_function" and not makes_memory(memory):
                memory = nodes.tensor_arguments(memory)[0]
            owners[port.name] = memory.name
            sizes[port.name] = 0 if memory.op == "placeholder" else nodes.size_bytes(memory)
    return owners, sizes


def flat(forward: Part, backward: Part, order: Sequence[Place], slack: float = SLACK) -> list[Place]:
    """`order` with forward operators put off until there is room; see the module's docstring."""
    lines = [[index for which, index in order if which == strand] for strand in (FORWARD, BACKWARD)]
    ahead = profile(forward, lines[FORWARD])
    behind = profile(backward, lines[BACKWARD], *lying_in(forward))
    limit = slack * max(ahead.peak, behind.peak)
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
