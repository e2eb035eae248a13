"""The states of the step world: updates, snapshots, fetches from peers and checkpoints, each checked against the lineage.

In: the machines' actions. Out: what each replica holds, and a Violation at once if an update does not fit the lineage, or has
a gradient that is not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helixrt.emulate.step_store import Batch, State
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.protocol.step.quorum import Member

if TYPE_CHECKING:
    from helixrt.emulate.step_node import Node
    from helixrt.emulate.step_world import StepWorld

DONOR_S = 6.0  # a fetch fails when no donor had what it asks for, for so long


class States:
    """What moves between the replicas of a world."""

    def __init__(self, world: StepWorld) -> None:
        self.world = world

    def taken(self, node: Node, record: CommitRecord) -> frozenset[Batch]:
        world = self.world
        sums = {node.reduced.get((record.generation, rank)) for rank in range(world.group_world_size)}
        if len(sums) != 1:
            raise world.fail(f"replica {node.replica}: ranks disagree for step {record.step}: {sums}")
        (found,) = sums
        assert found is not None
        return found

    def apply(self, node: Node, record: CommitRecord, what: frozenset[Batch]) -> None:
        world = self.world
        log = Log(world.store.entries)
        if node.state[0] != record.parent or what != world.summed(record, log):
            raise world.fail(f"replica {node.replica}: update {record.step} does not fit: {node.state[0][:6]} {set(what)}")
        if what & set(world.spoilt):
            raise world.fail(f"update {record.step} has a gradient that is not finite: {set(what)}")
        node.state = (record.hash, (*node.state[1], what))
        if record.applied:
            node.work, node.gradients = None, False  # the update overwrites them
        node.offered_reduced = (record.hash, what) if record.applied else ("", frozenset())
        if record.step % 3 == 0 and node.replica == min(record.committers)[0]:
            state = node.state
            world.at(world.random.uniform(0.1, 2.0), lambda: self.saved(node, state))

    def saved(self, node: Node, state: State) -> None:
        world = self.world
        if node.alive and node.life == world.store.life and state[0] in {e.hash for e in world.store.entries}:
            world.store.durable.setdefault(state[0], state)
            if world.compacts:
                world.store.compact(world.compacts)

    def reload(self, node: Node, action: p.Reload) -> None:
        world = self.world

        def read() -> None:
            log = node.machine.log
            newest = world.store.newest_durable(log)
            record = log.get(newest[0])
            assert record is not None
            if record.step > action.newer_than:
                node.state = newest
            world.count["reload"] += 1
            world.answer(node, p.Reloaded(node.state[0] if record.step > action.newer_than else node.machine.held), 0.1, 1.0)

        world.calls.claim(node, world.store.newest_durable(node.machine.log)[0], read)

    def fetch(self, node: Node, action: p.FetchState | p.FetchReduced) -> None:
        """A fetch takes one of the world's durations, as long as some donor has what it asks for."""
        world = self.world
        ready = world.now + world.random.choice(world.fetch_s) * world.random.uniform(0.5, 1.5)
        missing_since: list[float] = []

        def attempt() -> None:
            if not node.alive or node.machine.following.fetching != action.lineage:
                return
            donors = [other for d in action.donors if (other := self._server(d, node, action)) is not None]
            if donors and world.now >= ready:
                self._receive(node, donors[0], action)
                return
            missing_since[:] = [] if donors else (missing_since or [world.now])
            if missing_since and world.now - missing_since[0] >= DONOR_S:
                world.deliver(node, p.FetchFailed(action.lineage, "no donor"))
            else:
                world.at(min(max(ready - world.now, 0.2), DONOR_S / 2) * world.random.uniform(1.0, 1.2), attempt)

        attempt()

    def _server(self, donor: Member, node: Node, action: p.FetchState | p.FetchReduced) -> Node | None:
        """The donor, if it serves that now; one that was declared ended does so as long as its process lives."""
        world = self.world
        every = (*world.nodes.values(), *world.fenced)
        found = [n for n in every if (n.replica, n.incarnation) == (donor.replica, donor.incarnation)]
        if not found or not found[0].alive or found[0].paused_until > world.now:
            return None
        other = found[0]
        has = action.lineage in other.offers if isinstance(action, p.FetchState) else other.offered_reduced[0] == action.lineage
        return other if has and world.reaches(other, node) else None

    def _receive(self, node: Node, donor: Node, action: p.FetchState | p.FetchReduced) -> None:
        world = self.world
        if isinstance(action, p.FetchState):
            node.fetched[action.lineage] = donor.offers[action.lineage]
        else:
            node.kept[action.lineage] = donor.offered_reduced[1]
            world.count["repaired"] += 1
        world.count["fetched"] += 1
        world.deliver(node, p.Fetched(action.lineage))
