"""The exchanges of the step world: rings that break half-way, and what their members know of the cause.

In: which replica gives what in which generation. Out: `RingDone` and `RingFailed` at each of them. A cut between
two replicas breaks every ring that has both; each of the two may or may not see whom it does not hear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from helixrt.emulate.step_store import Batch
from helixrt.protocol.step import messages as p

if TYPE_CHECKING:
    from helixrt.emulate.step_world import Node, StepWorld

EXCHANGE_S = 8.0  # deadline of an exchange


@dataclass
class Ring:
    """One (generation, ring): who is in, what each gave, who has the sum, who lost it."""

    members: tuple[int, ...]
    nodes: dict[int, Node] = field(default_factory=dict)
    given: dict[int, frozenset[Batch]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    broken: bool = False


class Rings:
    """All exchanges of a world."""

    def __init__(self, world: StepWorld) -> None:
        self.world = world
        self._rings: dict[tuple[int, int], Ring] = {}

    def start(self, node: Node, action: p.Exchange) -> None:
        world = self.world
        node.generation = action.generation
        node.reduced.clear()
        node.waiting.clear()
        for number in range(world.rings):
            key = (action.generation, number)
            ring = self._rings.setdefault(key, Ring(action.members))
            ring.nodes[node.replica] = node
            if not action.contribute:
                self.give(node, key, frozenset())
            elif node.gradients and node.work is not None:
                self.give(node, key, frozenset({(node.replica, node.work[1])}))
            else:
                node.waiting.append(key)
            world.at(EXCHANGE_S, partial(self._lose, node, key, "deadline", ()))

    def give(self, node: Node, key: tuple[int, int], what: frozenset[Batch]) -> None:
        world, ring = self.world, self._rings[key]
        ring.given[node.replica] = what
        for member in ring.members:
            other = world.nodes.get(member)
            if other is None or not other.alive or world.cut(member):
                self._break(key, ring, "peer unreachable", {m: (member,) for m in ring.members})
        for a, b in world.cut_pairs():
            if a in ring.members and b in ring.members:
                seen = {x: (y,) for x, y in ((a, b), (b, a)) if world.random.random() < 0.8}
                self._break(key, ring, "peer silent", seen)
        if ring.broken or set(ring.given) != set(ring.members):
            return
        for member in ring.members:
            world.at(world.random.uniform(0.01, 0.4), partial(self._gain, ring.nodes[member], key))

    def lost(self, node: Node) -> None:
        """Its process ended: every ring that it is in breaks."""
        for key, ring in self._rings.items():
            if ring.nodes.get(node.replica) is node:
                self._break(key, ring, "peer died", {m: (node.replica,) for m in ring.members})

    def abort(self, node: Node, generation: int, reason: str) -> None:
        for number in range(self.world.rings):
            self._break((generation, number), self._rings[(generation, number)], reason, {})

    def _gain(self, node: Node, key: tuple[int, int]) -> None:
        world, ring = self.world, self._rings[key]
        if not node.alive or node.replica in ring.ended or (ring.broken and world.random.random() < 0.5):
            return
        if node.paused_until > world.now:
            world.at(node.paused_until - world.now, lambda: self._gain(node, key))
            return
        if world.cut(node.replica):
            return
        ring.ended.add(node.replica)
        total: frozenset[Batch] = frozenset().union(*ring.given.values())
        node.reduced[key] = total
        world.deliver(node, p.RingDone(*key, finite=world.finite_sum(total, key[1])))

    def _break(self, key: tuple[int, int], ring: Ring, reason: str, suspects: Mapping[int, tuple[int, ...]]) -> None:
        if ring.broken:
            return
        ring.broken = True
        self.world.count["broken"] += 1
        for member, node in ring.nodes.items():
            blamed = tuple(s for s in suspects.get(member, ()) if s != member)
            self.world.at(self.world.random.uniform(0.3, 0.9), partial(self._lose, node, key, reason, blamed))

    def _lose(self, node: Node, key: tuple[int, int], reason: str, suspects: tuple[int, ...]) -> None:
        world, ring = self.world, self._rings[key]
        if not node.alive or node.replica in ring.ended or node.generation != key[0]:
            return
        if node.paused_until > world.now:
            world.at(node.paused_until - world.now, lambda: self._lose(node, key, reason, suspects))
            return
        ring.ended.add(node.replica)
        if key in node.waiting:
            node.waiting.remove(key)
        world.deliver(node, p.RingFailed(*key, reason, suspects))
        self._break(key, ring, reason, {})
