"""A simulated world for FTAR: collectives over links over rails, and everything may fail.

In: a seed, the number of ranks, rails and collectives, and which kinds of fault may happen. Out: a
`Verdict`, or a `Violation` with the broken rule and the one line that replays it.

The machines are the ones that run in production (`CollectiveMachine`, `Link` with its liveness, and the plans of
`protocol/algorithms`); simulated are the clock, the network (`fabric`), memory, and the service that forms generations.
Every generation runs the same list of collectives, several at once, and of point-to-point messages beside them. A break
ends it; the ranks that are there form the next one and run the list again, until one generation gets to its end with
every living rank in it.

Checked all the time: sums are right and bitwise equal on all ranks that have them, no message is received
twice, nothing is written after its collective ended, the first cause stands, sources are preserved, garbage ends the
generation before it touches memory, there is an end. Where rails alone fail, for less than the peers' patience, the
first generation must reach the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from helixrt.emulate.collective_faults import FAULTS, RAIL_FAULTS, Faults
from helixrt.emulate.collective_node import Node
from helixrt.emulate.collective_tasks import (
    COLLECTIVES,
    SAME_EVERYWHERE,
    Point,
    Task,
    expected,
    given,
    plan_of,
    point_plan,
    sizes_of,
)
from helixrt.emulate.plans import ELEMENT, Memory
from helixrt.emulate.seeded import Violation
from helixrt.protocol.collective import messages as c
from helixrt.protocol.collective.plan import Plan

DEADLINE_S, PATIENCE_S = 0.5, 30.0
PATIENCE_EVENTS = 100_000
COUNTS = (3, 20, 50)  # elements


@dataclass(frozen=True)
class Verdict:
    """What a run did: its faults, and what the machines made of them."""

    seed: int
    virtual_s: float
    events: int
    generations: int
    points: int  # point-to-point messages that were done, over all generations
    crashes: int
    closes: int
    refused: int  # frames of garbage
    failovers: int
    failbacks: int
    resent: int
    duplicates: int
    stale: int
    failed: int
    skipped: int
    expired: int
    left_out: int
    no_route: int  # attempts to restore a rail that failed while the peer carried out what asked for them
    blocked: int  # writes that a full connection turned away


class CollectiveWorld(Faults):
    """Runs one seed. `faults` are kinds out of FAULTS; they happen in the first part of the run."""

    def __init__(
        self,
        seed: int,
        size: int = 3,
        rails: int = 2,
        collectives: int = 4,
        faults: tuple[str, ...] = FAULTS,
        trace: bool = False,
    ) -> None:
        super().__init__(seed, size, rails, faults, trace)
        self.seed = seed
        self.tasks = [
            Task(self.random.choice(COLLECTIVES), self.random.choice(COUNTS), self.random.random() < 0.5)
            for _ in range(collectives)
        ]
        self.points = [self.draw_point() for _ in range(self.random.choice((0, 0, 1, 2, 4)) if size > 1 else 0)]
        self.results: dict[tuple[int, int], bytes] = {}

    def draw_point(self) -> Point:
        sender, receiver = self.random.sample(range(self.size), 2)
        return Point(sender, receiver, self.random.choice(COUNTS))

    # ---- running

    def fail(self, what: str) -> Violation:
        options = f"--seed {self.seed} --size {self.size} --rails {self.rails} --collectives {len(self.tasks)}"
        replay = f"python -m helixrt.emulate.collective_world {options} --faults {','.join(self.faults)}"
        return Violation(f"{what}; at t={self.clock.now:.4f}; replay: {replay}")

    def run(self) -> Verdict:
        """To the end; raises Violation when an invariant breaks, a machine finds itself misused or nothing ends."""
        try:
            for rank in range(self.size):
                self.boot(rank, 0)
            self.threaten()
            while not self.over():
                if not self.clock.step() or self.clock.now > PATIENCE_S or self.clock.events > PATIENCE_EVENTS:
                    raise self.fail(f"no end in sight: {self.situation()}")
        except (AssertionError, LookupError, ValueError) as error:
            if isinstance(error, Violation):
                raise
            raise self.fail(f"{type(error).__name__}: {error}") from error
        return self.verdict()

    def over(self) -> bool:
        if self.pending or self.joining or len(self.members) < self.size:
            return False
        nodes = self.nodes.values()
        return all(n.alive and n.generation == self.generation and n.finished >= self.to_do(n) for n in nodes)

    def to_do(self, node: Node) -> set[int]:
        return {*range(len(self.tasks)), *self.points_of(node)}

    def points_of(self, node: Node) -> list[int]:
        """The operations that are point-to-point messages from or to this node, of this generation."""
        there = [(-1 - k, (p.sender, p.receiver)) for k, p in enumerate(self.points)]
        return [op for op, pair in there if node.rank in pair and set(pair) <= set(node.ranks)]

    def situation(self) -> str:
        nodes = [
            f"rank {n.rank}{'' if n.alive else ' (dead)'} in {n.generation}: {sorted(n.finished)} of {sorted(n.memories)} done"
            for n in self.nodes.values()
        ]
        return f"generation {self.generation} of {self.members}; " + "; ".join(nodes)

    def verdict(self) -> Verdict:
        for node in self.nodes.values():
            self.check_memories(node)
            self.tally(node)
        if set(self.faults) <= set(RAIL_FAULTS) and self.generation > 1:
            raise self.fail(f"rails alone failed, yet it took {self.generation} generations")
        self.count["blocked"] = sum(socket.turned_away for socket in self.fabric.sockets)
        found = {f.name: self.count[f.name] for f in fields(Verdict)[4:]}
        return Verdict(self.seed, self.clock.now, self.clock.events, self.generation, **found)

    def boot(self, rank: int, incarnation: int) -> None:
        self.pending -= incarnation > 0
        node = Node(self, rank, incarnation, self.random.randint(1, len(self.tasks)))
        node.points_first = self.random.random() < 0.5
        self.nodes[rank] = node
        self.note(f"rank {rank} starts, incarnation {incarnation}")
        self.clock.after((0.0005, 0.005), self.join, node)

    # ---- operations

    def connected(self, node: Node) -> None:
        if len(node.reached) < len(node.peers):
            return
        points = self.points_of(node)
        for op in points:
            self.clock.after((0.0, 0.01), self.submit, node, node.generation, op)
        if not points or not node.points_first:
            self.begin_collectives(node)

    def begin_collectives(self, node: Node) -> None:
        for _ in range(min(node.ahead, len(self.tasks))):
            self.submit_next(node)

    def submit_next(self, node: Node) -> None:
        if node.submitted < len(self.tasks):
            node.submitted += 1
            late = 2 * DEADLINE_S if node.rank in self.late else 0.0
            self.late.discard(node.rank)
            when = self.clock.now + late + self.random.uniform(0.0, 0.003)
            self.clock.at(when, self.submit, node, node.generation, node.submitted - 1)

    def submit(self, node: Node, generation: int, op: int) -> None:
        if not node.alive or self.paused(node, self.submit, node, generation, op) or node.generation != generation:
            return
        if op > 0 and op - 1 not in node.memories:  # an earlier one is late
            self.clock.after((0.001, 0.002), self.submit, node, generation, op)
            return
        plan = self.prepare(node, op) if op >= 0 else self.prepare_point(node, op)
        if "late" in self.faults:
            self.clock.at(self.clock.now + DEADLINE_S, self.expire, node, generation, op)
        self.tell(node, c.Submitted(op, plan))

    def prepare(self, node: Node, op: int) -> Plan:
        """The plan of a collective, and its memory."""
        task, size = self.tasks[op], len(node.ranks)
        plan = plan_of(task, node.me, size)
        source, out = sizes_of(task, size)
        shift = 0 if task.in_place and task.what in ("all_reduce", "broadcast") else None
        numbers = given(node.generation, op, node.me, source)
        node.memories[op] = Memory(numbers, out * ELEMENT, plan.scratch_bytes, shift, "d")
        return plan

    def prepare_point(self, node: Node, op: int) -> Plan:
        """The same of a point-to-point message."""
        point = self.points[-1 - op]
        sends = point.sender == node.rank
        plan = point_plan(point, sends, node.ranks.index(point.receiver if sends else point.sender))
        numbers = given(node.generation, op, node.me, point.count) if sends else ()
        node.memories[op] = Memory(numbers, 0 if sends else point.count * ELEMENT, plan.scratch_bytes, None, "d")
        return plan

    def expire(self, node: Node, generation: int, op: int) -> None:
        if not node.alive or self.paused(node, self.expire, node, generation, op):
            return
        if node.generation == generation and op not in node.finished:
            self.count["expired"] += 1
            self.tell(node, c.Expired(op))

    def ended(self, node: Node, op: int) -> None:
        """Compares a result with what it must be, and its bits with everyone else's."""
        result = bytes(node.memories[op].out)
        what = self.tasks[op].what if op >= 0 else "message"
        self.check_result(node, op, what)
        if what in SAME_EVERYWHERE and self.results.setdefault((node.generation, op), result) != result:
            raise self.fail(f"rank {node.rank}, generation {node.generation}, {what} {op}: other bits than another rank's")
        node.finished.add(op)
        node.after[op] = result
        self.note(f"rank {node.rank}: {what} {op} is done")
        if op >= 0:
            self.submit_next(node)
            return
        self.count["points"] += 1
        if node.points_first and node.finished.issuperset(self.points_of(node)):
            self.begin_collectives(node)

    def check_result(self, node: Node, op: int, what: str) -> None:
        generation, size = node.generation, len(node.ranks)
        if op >= 0:
            wanted = expected(self.tasks[op], generation, op, node.me, size)
        else:
            point = self.points[-1 - op]
            sender = node.ranks.index(point.sender)
            wanted = list(given(generation, op, sender, point.count)) if point.receiver == node.rank else []
        for i, (number, right) in enumerate(zip(node.memories[op].numbers(), wanted, strict=True)):
            if not abs(number - right) <= 1e-9 * abs(right):
                who = f"rank {node.rank}, generation {generation}, {what} {op}"
                raise self.fail(f"{who}: element {i} is {number!r}, not {right!r}")

    def check_memories(self, node: Node) -> None:
        for op, memory in node.memories.items():
            if op in node.after and bytes(memory.out) != node.after[op]:
                raise self.fail(f"rank {node.rank}: result of collective {op} changed after its end")
            shared = op >= 0 and self.tasks[op].in_place and self.tasks[op].what in ("all_reduce", "broadcast")
            if not shared and bytes(memory.source) != memory.given:
                raise self.fail(f"rank {node.rank}: source of collective {op} was not preserved")


def main(arguments: Sequence[str] | None = None) -> None:
    """`--seed N [--count M]`: run one seed, or M seeds from N on, and print what happened; `--text`: message by message."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--rails", type=int, default=2)
    parser.add_argument("--collectives", type=int, default=4)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--text", action="store_true")
    o = parser.parse_args(arguments)
    faults = tuple(f for f in o.faults.split(",") if f)
    for seed in range(o.seed, o.seed + o.count):
        world = CollectiveWorld(seed, o.size, o.rails, o.collectives, faults, o.text)
        try:
            print(world.run())
        finally:
            print(*(world.trace or ()), sep="\n", end="\n" if world.trace else "")


if __name__ == "__main__":
    main()
