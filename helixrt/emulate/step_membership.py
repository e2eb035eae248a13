"""The membership service of the simulated world: who heartbeats, who has asked, and when a quorum forms."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from helixrt.emulate.step_node import Node
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.quorum import Member

if TYPE_CHECKING:
    from helixrt.emulate.step_world import StepWorld

JOIN_S, HEARTBEAT_S = 12.0, 2.0


class Lighthouse:
    def __init__(self, world: StepWorld) -> None:
        self._world = world
        self._joins: dict[int, tuple[Node, Member, float]] = {}
        self._looking = False  # there is something to decide

    def forget(self) -> None:
        """It was started again: no request of it is open."""
        self._joins.clear()

    def restarted(self) -> None:
        """Its process was lost: whoever has asked is told, and asks the next one, which begins with the store."""
        for node, _, _ in self._joins.values():
            if node.alive:
                self._world.answer(node, p.JoinFailed("the lighthouse cannot be reached"), 0.5, 1.0)
        self._joins.clear()

    def lost(self, node: Node) -> None:
        """The process that has asked is gone."""
        if node.replica in self._joins and self._joins[node.replica][0] is node:
            del self._joins[node.replica]

    def beats(self, node: Node) -> bool:
        """Whether the membership service takes it for living."""
        if node.alive and node.paused_until <= self._world.now and not self._world.cut(node.replica):
            node.silent_since = None
            return True
        return node.silent_since is not None and self._world.now - node.silent_since < HEARTBEAT_S

    def ask(self, node: Node, me: Member) -> None:
        if not node.alive:
            return
        if self._world.cut(node.replica) or self._world.now < self._world.store.down_until:
            self._world.answer(node, p.JoinFailed("unreachable"), 0.5, 1.0)
            return
        if self._world.fence_holds(node):
            return
        current = self._joins.get(me.replica)
        if current is not None and current[0] is not node:
            older = current[0] if current[0].incarnation < me.incarnation else node
            self._world.answer(older, p.JoinFailed("started again"), 0.5, 1.0)
        if current is None or current[0].incarnation <= me.incarnation:
            self._joins[me.replica] = (node, me, self._world.now)
        self.form()
        if not self._looking:
            self._looking = True
            self._world.at(0.5, self.look)

    def look(self) -> None:
        """What the membership service does without being asked."""
        for replica, (node, _, since) in list(self._joins.items()):
            if not node.alive or self._world.now - since > 1.5 * JOIN_S:
                del self._joins[replica]
                if node.alive:
                    self._world.deliver(node, p.JoinFailed("timeout"))
        self._looking = bool(self._joins)
        if self._looking:
            self._world.at(0.5, self.look)
            self.form()

    def form(self) -> None:
        """As torchft's: a quorum forms when all that heartbeat have joined, or some waited too long."""
        living = {(n.replica, n.incarnation) for n in (*self._world.nodes.values(), *self._world.fenced) if self.beats(n)}
        joined = {(r, n.incarnation) for r, (n, _, _) in self._joins.items() if (r, n.incarnation) in living}
        if not joined or 2 * len(joined) <= len(living):
            return
        oldest = min(since for _, _, since in self._joins.values())
        if joined != living and self._world.now - oldest < JOIN_S:
            return
        self._world.count["quorum"] += 1
        self._world.left_out |= set(range(self._world.replicas)) - {replica for replica, _ in joined}
        members = tuple(m for r, (n, m, _) in sorted(self._joins.items()) if (r, n.incarnation) in joined)
        generation = self._world.store.generation(self._world.now, self._world.clock_offset_s)
        for member in members:
            node, _, _ = self._joins.pop(member.replica)
            self._world.at(self._world.random.uniform(0.001, 0.1), partial(self.formed, node, generation, members))

    def formed(self, node: Node, generation: int, members: tuple[Member, ...]) -> None:
        world = self._world
        if world.cut(node.replica) or world.now < world.store.down_until or node.life != world.store.life:
            if node.alive:
                world.answer(node, p.JoinFailed("log not read"), 0.5, 1.0)
            return
        entries = tuple(world.store.entries[len(node.machine.log) :])
        world.deliver(node, p.Formed(generation, members, entries, world.store.begin))
        if node.machine.standing.sits_until > generation:
            world.count["sat_out"] += 1
            world.left_out.add(node.replica)
