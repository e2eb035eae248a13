"""What goes wrong in the step world: which fault strikes which replica, and when a crashed one is started again.

In: the kinds that may happen (`FAULTS`, `STOP`, `REMADE`). Out: replicas that are paused, cut off, crashed, fenced or resumed;
a store that is away; a clock that jumps; gradients that are not finite. Every choice is drawn from the world's seeded
generator.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from helixrt.protocol.step.lineage import Log

if TYPE_CHECKING:
    from helixrt.emulate.step_node import Node
    from helixrt.emulate.step_world import StepWorld

FAULTS = ("crash", "pause", "partition", "store", "links", "fence", "clock", "nonfinite", "resume", "outage")
STOP = "stop"  # no fault: a replica's program ends the run early
REMADE = "remade"  # the process of store and membership service is killed, and another one reads the store's journal
REMADE_S = (0.5, 3.0, 20.0, 90.0)  # until it serves
SPANS_S = (0.3, 1.5, 4.0, 10.0, 20.0, 20.0, 150.0, 1500.0)


class Faults:
    """The faults of a world. Fields of the world and its nodes are changed from here as a fault would change them."""

    def __init__(self, world: StepWorld) -> None:
        self.world = world

    def strike(self) -> None:
        """One fault of a random kind, at a random replica."""
        world = self.world
        kind = world.random.choice(world.faults)
        replica = world.random.randrange(world.replicas)
        node = world.nodes.get(replica)
        span = world.random.choice(SPANS_S)
        if kind == "store":
            world.store.down_until = world.now + min(span, 150.0)
        elif kind == REMADE:
            world.calls.lose(world.random.choice(REMADE_S))
        elif kind == "clock":
            world.clock_offset_s += world.random.choice((-1.0, 1.0)) * span
            world.store.jumps += 1
        elif kind == "resume":
            self.kill_the_run()
        elif kind == "links" and world.replicas > 1:
            pair = tuple(sorted(world.random.sample(range(world.replicas), 2)))
            world.pairs[pair] = world.now + span  # type: ignore[index]
        elif kind == "nonfinite":
            ahead = world.store.head.positions.get(replica, 0) + world.random.randint(1, 2)
            world.spoilt[(replica, ahead)] = world.random.randrange(world.group_world_size)
        elif node is None or not node.alive:
            return
        elif kind == "stop":
            node.machine.stop = f"replica {replica} has seen enough"
        elif kind == "outage":
            self.outage(node)
        elif kind == "crash":
            self.crash(node)
        elif kind == "fence":
            self.fence(node)
        elif kind == "pause":
            node.paused_until = world.now + span
            node.silent_since = world.now
        elif kind == "partition":
            world.lonely[replica] = world.now + span
            node.silent_since = world.now

    def outage(self, spared: Node) -> None:
        """One replica is paused and keeps old state; then all others crash, or some are paused for long."""
        world = self.world
        spared.paused_until = world.now + world.random.uniform(6.0, 20.0)
        spared.silent_since = world.now

        def strike() -> None:
            for node in list(world.nodes.values()):
                if node is spared or not node.alive:
                    continue
                if world.random.random() < 0.7:
                    self.crash(node)
                else:
                    node.paused_until = world.now + world.random.choice((40.0, 150.0, 1500.0))
                    node.silent_since = world.now

        world.at(world.random.uniform(4.0, 6.0), strike)

    def crash(self, node: Node) -> None:
        world = self.world
        world.gone(node)
        world.count["crash"] += 1
        if world.random.random() < 0.8:  # else a host is lost, and only the successor writes that it ended
            world.at(world.random.uniform(0.05, 1.0), partial(world.seen_to_end, node))
        life = world.store.life
        wait_s = world.random.choice((1.0, 1.0, 100.0)) * world.random.uniform(0.5, 6.0)
        world.at(wait_s, lambda: world.boot(node.replica, node.incarnation + 1) if life == world.store.life else None)

    def fence(self, node: Node) -> None:
        """The launcher believes that it ended and starts a successor; its process may go on."""
        world = self.world
        world.crashed.add(node.replica)
        world.fenced.append(node)
        if world.random.random() < 0.5:
            node.paused_until = world.now + world.random.choice((3.0, 30.0))
            node.silent_since = world.now
        world.boot(node.replica, node.incarnation + 1)

    def kill_the_run(self) -> None:
        """The driver and every rank end; after a while the run is resumed from what is on disk."""
        world = self.world
        if world.store.life >= 2:
            return
        for node in (*world.nodes.values(), *world.fenced):
            world.gone(node)
        world.nodes.clear()
        log = Log(world.store.entries)
        saved = world.store.newest_durable(log)[0]
        least = 1 + max(i for i, entry in enumerate(world.store.entries) if entry.hash == saved)
        keep = world.random.randint(least, len(world.store.entries))  # a checkpoint is behind its lineage, never before it
        world.persisted = {i: h for i, h in world.persisted.items() if i < keep}
        world.store.resume(keep, world.now + 0.5)
        world.lighthouse.forget()
        for replica in range(world.replicas):
            life = world.store.life
            world.at(world.random.uniform(1.0, 4.0), partial(self._boot_in, life, replica))

    def _boot_in(self, life: int, replica: int) -> None:
        world = self.world
        if life == world.store.life:
            world.boot(replica, 0)
