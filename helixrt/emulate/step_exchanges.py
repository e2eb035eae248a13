"""The exchanges of the step world: they break half-way, and what their members know of the cause.

In: which replica gives what in which generation. Out: `RankDone` and `RankFailed` at each of them. A cut between
two replicas breaks every exchange that has both; each of the two may or may not see whom it does not hear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from helixrt.emulate.step_store import Batch, digest_before
from helixrt.protocol.step import messages as p

if TYPE_CHECKING:
    from helixrt.emulate.step_node import Node
    from helixrt.emulate.step_world import StepWorld

EXCHANGE_S = 8.0  # deadline of an exchange


@dataclass
class GroupExchange:
    """One (generation, group rank): its members, what each contributed, which of them have the sum, which lost it."""

    members: tuple[int, ...]
    nodes: dict[int, Node] = field(default_factory=dict)
    given: dict[int, frozenset[Batch]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    broken: bool = False


class Exchanges:
    """All exchanges of a world."""

    def __init__(self, world: StepWorld) -> None:
        self.world = world
        self._exchanges: dict[tuple[int, int], GroupExchange] = {}

    def start(self, node: Node, action: p.Exchange) -> None:
        world = self.world
        node.generation = action.generation
        node.reduced.clear()
        node.waiting.clear()
        if action.contribute and (node.work is None or node.work[0] != node.state[0]):
            raise world.fail(f"replica {node.replica} contributes gradients that it has not, or that are of another state")
        for number in range(world.group_world_size):
            key = (action.generation, number)
            exchange = self._exchanges.setdefault(key, GroupExchange(action.members))
            exchange.nodes[node.replica] = node
            if not action.contribute:
                self.give(node, key, frozenset())
            elif node.gradients and node.work is not None:
                self.give(node, key, frozenset({(node.replica, node.work[1])}))
            else:
                node.waiting.append(key)
            world.at(EXCHANGE_S, partial(self._lose, node, key, "deadline", ()))

    def give(self, node: Node, key: tuple[int, int], what: frozenset[Batch]) -> None:
        world, exchange = self.world, self._exchanges[key]
        exchange.given[node.replica] = what
        for member in exchange.members:
            other = world.nodes.get(member)
            if other is None or not other.alive or world.cut(member):
                self._break(key, exchange, "peer unreachable", {m: (member,) for m in exchange.members})
        for a, b in world.cut_pairs():
            if a in exchange.members and b in exchange.members:
                seen = {x: (y,) for x, y in ((a, b), (b, a)) if world.random.random() < 0.8}
                self._break(key, exchange, "peer silent", seen)
        if exchange.broken or set(exchange.given) != set(exchange.members):
            return
        for member in exchange.members:
            world.at(world.random.uniform(0.01, 0.4), partial(self._gain, exchange.nodes[member], key))

    def lost(self, node: Node) -> None:
        """Its process ended: every exchange that it is in breaks."""
        for key, exchange in self._exchanges.items():
            if exchange.nodes.get(node.replica) is node:
                self._break(key, exchange, "peer died", {m: (node.replica,) for m in exchange.members})

    def abort(self, node: Node, generation: int, reason: str) -> None:
        for number in range(self.world.group_world_size):
            self._break((generation, number), self._exchanges[(generation, number)], reason, {})

    def _gain(self, node: Node, key: tuple[int, int]) -> None:
        world, exchange = self.world, self._exchanges[key]
        if not node.alive or node.replica in exchange.ended or (exchange.broken and world.random.random() < 0.5):
            return
        if node.paused_until > world.now:
            world.at(node.paused_until - world.now, lambda: self._gain(node, key))
            return
        if world.cut(node.replica):
            return
        exchange.ended.add(node.replica)
        total: frozenset[Batch] = frozenset().union(*exchange.given.values())
        node.reduced[key] = total
        batches = [0] * world.replicas
        for replica, position in total:
            batches[replica] = digest_before(replica, position + 1)
        world.deliver(node, p.RankDone(*key, world.finite_sum(total, key[1]), tuple(batches)))

    def _break(
        self, key: tuple[int, int], exchange: GroupExchange, reason: str, suspects: Mapping[int, tuple[int, ...]]
    ) -> None:
        if exchange.broken:
            return
        exchange.broken = True
        self.world.count["broken"] += 1
        for member, node in exchange.nodes.items():
            blamed = tuple(s for s in suspects.get(member, ()) if s != member)
            self.world.at(self.world.random.uniform(0.3, 0.9), partial(self._lose, node, key, reason, blamed))

    def _lose(self, node: Node, key: tuple[int, int], reason: str, suspects: tuple[int, ...]) -> None:
        world, exchange = self.world, self._exchanges[key]
        if not node.alive or node.replica in exchange.ended or node.generation != key[0]:
            return
        if node.paused_until > world.now:
            world.at(node.paused_until - world.now, lambda: self._lose(node, key, reason, suspects))
            return
        exchange.ended.add(node.replica)
        if key in node.waiting:
            node.waiting.remove(key)
        world.deliver(node, p.RankFailed(*key, reason, suspects))
        self._break(key, exchange, reason, {})
