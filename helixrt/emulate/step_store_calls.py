"""What replicas of the step world ask the run's store, and how that fails: it is away, an answer is lost, or its process is
killed.

In: the actions of a node. Out: their events, when the store has answered; operations on the simulated store and its journal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from helixrt.emulate.step_journal import StepJournal
from helixrt.emulate.step_node import Node
from helixrt.protocol.step import messages as p

if TYPE_CHECKING:
    from helixrt.emulate.step_world import StepWorld


class StoreCalls:
    """Of a world. With `journaled` the store has a journal, from which it can be made again."""

    def __init__(self, world: StepWorld, journaled: bool) -> None:
        self._world = world
        self.journal = StepJournal(world.store) if journaled else None
        self._torn_s = 0.0  # the next change is the last of the store's process; the next one serves after so long (0: no)
        self._unanswered_s = -1.0  # what the store was asked until then, and has not answered yet, it does not answer

    def noted(self) -> None:
        """After each event of the world."""
        if self.journal is not None:
            self.journal.note()

    def lose(self, span_s: float) -> None:
        """The store's process is killed: now, between two operations; or in the next one, whose change is written in part, or
        whole but not answered. Another one serves after `span_s`."""
        world = self._world
        if self.journal is None or world.now < world.store.down_until:
            return
        if world.random.random() < 0.5:
            self._torn_s = span_s
        else:
            self._make_again(len(self.journal.data), span_s)

    def _make_again(self, written: int, span_s: float) -> None:
        world = self._world
        assert self.journal is not None
        world.count["remade"] += 1
        self.journal.make_again(written)
        world.store.down_until = world.now + span_s
        self._unanswered_s = world.now
        world.lighthouse.restarted()

    def append(self, node: Node, action: p.Append) -> p.Event | None:
        world = self._world
        if world.fence_holds(node):
            return None
        standing, complaint = world.store.put(action.index, action.record, world.now)
        if complaint:
            raise world.fail(complaint)
        return p.Appended(action.index, standing)

    def ask(self, node: Node, ask: Callable[[], p.Event | None]) -> None:
        world = self._world

        def arrive() -> None:
            if node.life != world.store.life:
                return
            if world.now < world.store.down_until or world.cut(node.replica):
                world.answer(node, p.StoreLost(), 0.5, 1.0)
                return
            answer, asked_s = ask(), world.now
            lost = self._torn() or ("store" in world.faults and world.random.random() < 0.02)
            if answer is None:
                return
            given = p.StoreLost() if lost else answer

            def deliver() -> None:
                world.deliver(node, given if asked_s > self._unanswered_s else p.StoreLost())

            world.at(world.random.uniform(0.001, 0.05), deliver)

        world.at(world.random.uniform(0.001, 0.3), arrive)

    def _torn(self) -> bool:
        """Whether the store's process was killed in the operation that was just carried out: any part of its change is in the
        journal, and it is not answered."""
        if self.journal is None or not self._torn_s:
            return False
        before = len(self.journal.data)
        self.journal.note()
        after = len(self.journal.data)
        if before == after:
            return False  # it changed nothing; the next one
        span_s, self._torn_s = self._torn_s, 0.0
        self._make_again(self._world.random.randint(before, after), span_s)
        return True

    def _away(self, node: Node) -> bool:
        world = self._world
        return world.now < world.store.down_until or world.cut(node.replica) or node.paused_until > world.now

    def wait(self, node: Node, action: p.Wait) -> None:
        world = self._world
        if node.life != world.store.life or not node.alive:
            return
        if self._away(node):
            world.at(1.0, lambda: self.wait(node, action))
            return
        world.answer(node, p.WaitEnded(world.store.evidence(action.head, action.generation)))

    def claim(self, node: Node, lineage: str, then: Callable[[], None]) -> None:
        """The holder entry, before a state is fetched or read."""
        world = self._world
        if not node.alive or node.life != world.store.life:
            return
        if self._away(node):
            world.at(0.5, lambda: self.claim(node, lineage, then))
            return
        world.store.holders.append(((node.replica, node.incarnation), lineage))
        then()
