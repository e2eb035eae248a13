"""A simulated world for FTAR: collectives over links over rails, and everything may fail.

In: a seed, the number of ranks, rails and collectives, and which kinds of fault may happen. Out: a
`Verdict`, or a `Violation` that says what was broken and the one line that replays it.

The machines are the ones that run in production (`CollectiveMachine`, `Link` with its liveness, and the plans of
`protocol/algorithms`); simulated are the clock, the network (`fabric`), memory, and whoever forms generations.
Every generation runs the same list of collectives, several at once. A break ends it; the ranks that are
there form the next one and run the list again, until one generation gets to its end with every living rank in it.

Checked all the time: sums are right and bitwise equal on all ranks that have them, no message is received
twice, nothing is written after its collective ended, the first cause stands, sources are preserved, there
is an end. Where rails alone fail, for less than the peers' patience, the first generation must reach the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from helixrt.emulate.collective_driver import Driver, Node
from helixrt.emulate.collective_tasks import COLLECTIVES, SAME_EVERYWHERE, Task, expected, given, plan_of, sizes_of
from helixrt.emulate.plans import ELEMENT, Memory
from helixrt.errors import Cause
from helixrt.protocol import collective_messages as c
from helixrt.protocol import link_messages as l
from helixrt.protocol.collective import CollectiveMachine
from helixrt.protocol.link import Link

RAIL_FAULTS = ("break", "half-open", "slow", "double")  # a link survives these by itself
FAULTS = (*RAIL_FAULTS, "loss", "silence", "crash", "pause", "partition", "late")

OPTIONS = l.LinkOptions(
    eager_bytes=64,
    eager_memory_bytes=512,
    window_bytes=512,
    window_frames=16,
    period_s=0.4,
    attempt_s=0.25,
    probe_s=0.04,
    retry_s=0.02,
    rest_s=0.01,
    longest_rest_s=0.1,
    steady_s=1.0,
    acknowledge_s=0.004,
)
WINDOW_BYTES, DEADLINE_S, CONNECT_S, QUORUM_S, PATIENCE_S = 384, 0.5, 0.6, 0.5, 30.0
PATIENCE_EVENTS = 100_000


class Violation(AssertionError):
    """An invariant was broken; the message ends with the line that replays it."""


@dataclass(frozen=True)
class Verdict:
    """What a run did: its faults, and what the machines made of them."""

    seed: int
    virtual_s: float
    events: int
    generations: int
    crashes: int
    failovers: int
    failbacks: int
    resent: int
    duplicates: int
    stale: int
    failed: int
    skipped: int
    expired: int
    left_out: int


class CollectiveWorld(Driver):
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
        self.seed, self.size, self.rails, self.faults = seed, size, rails, faults
        super().__init__(seed, trace)
        counts = (3, 20, 50)
        self.tasks = [
            Task(self.random.choice(COLLECTIVES), self.random.choice(counts), self.random.random() < 0.5)
            for _ in range(collectives)
        ]
        self.concurrent = self.random.choice((1, 1, 2, 3))
        self.options = replace(OPTIONS, striped=self.random.random() < 0.7)
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.configured: dict[int, list[Node]] = {}
        self.joining: dict[int, tuple[Node, float]] = {}
        self.cut_off: dict[int, float] = {}  # rank -> partitioned until
        self.late: set[int] = set()
        self.results: dict[tuple[int, int], bytes] = {}
        self.pending = 0  # faults and restarts yet to come

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
            if self.faults:
                when = self.random.uniform(0.002, 0.03)
                for _ in range(self.random.randint(1, 4)):  # the next one often while the last one is being repaired
                    self.pending += 1
                    self.clock.at(when, self.fault)
                    when += self.random.choice((0.002, 0.01, 0.05)) * self.random.random()
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
        return all(n.alive and n.generation == self.generation and len(n.finished) == len(self.tasks) for n in nodes)

    def situation(self) -> str:
        nodes = [
            f"rank {n.rank}{'' if n.alive else ' (dead)'} in {n.generation}: {sorted(n.finished)} of {len(n.memories)} done"
            for n in self.nodes.values()
        ]
        return f"generation {self.generation} of {self.members}; " + "; ".join(nodes)

    def verdict(self) -> Verdict:
        for node in self.nodes.values():
            self.check_memories(node)
            self.tally(node)
        if set(self.faults) <= set(RAIL_FAULTS) and self.generation > 1:
            raise self.fail(f"rails alone failed, yet it took {self.generation} generations")
        found = {f.name: self.count[f.name] for f in fields(Verdict)[4:]}
        return Verdict(self.seed, self.clock.now, self.clock.events, self.generation, **found)

    def tally(self, node: Node) -> None:
        for link in node.links.values():
            self.count["failovers"] += link.failovers
            self.count["failbacks"] += link.failbacks
            self.count["resent"] += link.resent
            self.count["duplicates"] += link.duplicates
            self.count["stale"] += link.stale

    # ---- faults

    def boot(self, rank: int, incarnation: int) -> None:
        self.pending -= incarnation > 0
        node = Node(rank, incarnation, self.random.randint(1, len(self.tasks)))
        self.nodes[rank] = node
        self.note(f"rank {rank} starts, incarnation {incarnation}")
        self.clock.after((0.0005, 0.005), self.join, node)

    def fault(self) -> None:
        self.pending -= 1
        kind, rank = self.random.choice(self.faults), self.random.randrange(self.size)
        node = self.nodes[rank]
        now = self.clock.now
        long = kind not in RAIL_FAULTS
        until = now + self.random.choice((0.005, 0.03, 0.3, 0.8) if long else (0.005, 0.02, 0.06))
        self.note(f"fault: {kind} of rank {rank}, until {until * 1e3:.3f} ms")
        if not node.alive:
            return
        if kind == "crash":
            self.crash(node)
        elif kind == "pause":
            node.paused_until = max(node.paused_until, until)
            self.clock.at(node.paused_until, self.awake, node)
        elif kind == "partition":
            self.cut_off[rank] = until
            for other in range(self.size):
                for rail in range(self.rails) if other != rank else ():
                    weather = self.fabric.of(rank, other, rail)
                    weather.silent = [max(until, s) for s in weather.silent]
                    weather.ails = max(weather.ails, until)
        elif kind == "late":
            self.late.add(rank)
        else:
            self.rail_fault(kind, node, until)

    def rail_fault(self, kind: str, node: Node, until: float) -> None:
        peer = self.random.choice([r for r in range(self.size) if r != node.rank])
        rail = self.random.randrange(self.rails)
        weather = self.fabric.of(node.rank, peer, rail)
        weather.ails = max(weather.ails, until)
        match kind:
            case "break":
                weather.broken = max(weather.broken, until)
            case "slow":
                weather.slow = max(weather.slow, until)
            case "loss":
                weather.losing = max(weather.losing, until)
            case "double":
                weather.doubling = max(weather.doubling, until)
            case "silence":
                direction = self.random.randrange(2)
                weather.silent[direction] = max(weather.silent[direction], until)
        if not node.generation or peer not in node.ranks:
            return
        index = node.ranks.index(peer)
        connection = node.rails.get((index, rail))
        if connection is None:
            return
        if kind == "break":
            self.fabric.break_(connection, (0, 1))
        elif kind == "half-open":
            self.fabric.break_(connection, (self.random.randrange(2),))
        elif kind == "slow":
            self.drive(node, index, l.RailSlow(rail))

    def crash(self, node: Node) -> None:
        node.alive = False
        self.count["crashes"] += 1
        self.joining.pop(node.rank, None)
        silent = node.unreachable = self.random.random() < 0.3
        for (peer, _), connection in node.rails.items():
            self.fabric.crash(connection, self.end(node, peer), silent)
        self.tally(node)
        # a death is noticed by the connection at once, by silence within one and a half periods
        plain = not silent and set(self.faults) <= {"crash", "late"}
        bound = 0.02 if plain else 1.55 * OPTIONS.period_s
        for other in self.nodes.values():
            if node.generation and other.alive and other.generation == node.generation and other.rank in node.ranks:
                self.clock.at(self.clock.now + bound, self.noticed, other, node, self.clock.now)
        self.pending += 1
        self.clock.after((0.01, 0.8), self.boot, node.rank, node.incarnation + 1)

    def noticed(self, node: Node, dead: Node, since: float) -> None:
        if node.alive and node.generation == dead.generation and node.paused_until < since:
            raise self.fail(f"rank {node.rank} has not noticed the death of rank {dead.rank} at {since:.4f}")

    # ---- generations

    def join(self, node: Node) -> None:
        if not node.alive or self.paused(node, self.join, node):
            return
        if self.cut_off.get(node.rank, 0.0) > self.clock.now:
            self.clock.at(self.cut_off[node.rank] + 0.001, self.join, node)
            return
        self.joining[node.rank] = (node, self.clock.now)
        self.clock.after((0.0005, 0.002), self.form)
        self.clock.at(self.clock.now + QUORUM_S, self.form)

    def form(self) -> None:
        """A quorum: all who are there, or whoever has come when the first one has waited long enough."""
        now = self.clock.now
        if not self.joining:
            return
        there = {n.rank for n in self.nodes.values() if n.alive and max(n.paused_until, self.cut_off.get(n.rank, 0)) <= now}
        if not there <= self.joining.keys() and now < min(since for _, since in self.joining.values()) + QUORUM_S:
            for rank in self.members:  # those who still run are asked to come too
                node = self.nodes[rank]
                if node.generation == self.generation and rank not in self.joining:
                    self.clock.after((0.001, 0.01), self.ask_to_reconfigure, node, self.generation)
            return
        self.generation += 1
        members = tuple(sorted(self.joining))
        self.count["left_out"] += self.size - len(members)
        self.members = members
        self.note(f"generation {self.generation}: ranks {members}")
        for node, _ in self.joining.values():
            self.clock.after((0.0005, 0.004), self.configure, node, self.generation, members)
        self.joining.clear()
        for node in self.nodes.values():
            if node.rank not in members:
                self.clock.after((0.001, 0.01), self.ask_to_reconfigure, node, node.generation)

    def ask_to_reconfigure(self, node: Node, generation: int) -> None:
        """A member of `generation` is told that it is over, as soon as it can be reached."""
        if not node.alive or self.paused(node, self.ask_to_reconfigure, node, generation):
            return
        if self.cut_off.get(node.rank, 0.0) > self.clock.now:
            self.clock.at(self.cut_off[node.rank], self.ask_to_reconfigure, node, generation)
        elif generation and node.generation == generation:
            self.drive(node, -1, c.Aborted(Cause("another rank wants to join", f"rank {node.rank}")))

    def configure(self, node: Node, generation: int, members: tuple[int, ...]) -> None:
        if not node.alive or self.paused(node, self.configure, node, generation, members):
            return
        if generation != self.generation:  # it went on without us
            self.join(node)
            return
        node.generation, node.ranks, node.me = generation, members, members.index(node.rank)
        node.machine = CollectiveMachine(node.me, len(members), WINDOW_BYTES, self.concurrent)
        node.links = {p: Link(generation, p, self.rails, self.options) for p in range(len(members)) if p != node.me}
        node.ticks = dict.fromkeys(node.links, math.inf)
        node.submitted = 0
        node.begin_again()
        others = self.configured.setdefault(generation, [])
        for other in others:
            if other.alive and other.generation == generation:
                for rail in range(self.rails):
                    self.dial(generation, node.rank, other.rank, rail)
        others.append(node)
        self.clock.at(self.clock.now + CONNECT_S, self.connected_in_time, node, generation)
        self.connected(node)

    def connected_in_time(self, node: Node, generation: int) -> None:
        if not node.alive or self.paused(node, self.connected_in_time, node, generation):
            return
        if node.generation == generation and len(node.reached) < len(node.links):
            self.drive(node, -1, c.Aborted(Cause("not all peers came", f"rank {node.rank}")))

    def connected(self, node: Node) -> None:
        if len(node.reached) == len(node.links):
            for _ in range(min(node.ahead, len(self.tasks))):
                self.submit_next(node)

    def leave(self, node: Node, cause: Cause) -> None:
        """What a communicator does at Break: tell the peers, close, take back memory, ask for the next generation."""
        self.note(f"rank {node.rank} leaves generation {node.generation}: {cause}")
        if node.finished & node.given_up or node.finished | node.given_up != node.memories.keys():
            ends = f"done {sorted(node.finished)}, failed or skipped {sorted(node.given_up)}"
            raise self.fail(f"rank {node.rank}: collectives {sorted(node.memories)} were submitted; {ends}")
        for peer, link in node.links.items():
            for action in link.on(l.Abort(cause), self.clock.now):
                if isinstance(action, l.SendFrame):
                    self.write(node, peer, action.rail, action.frame, None)
        for (peer, _), connection in node.rails.items():
            self.fabric.close(connection, self.end(node, peer), flush=self.random.random() < 0.5)
        for payloads in node.flying.values():
            for payload in payloads:
                payload.data = bytes(payload.data)
        self.check_memories(node)
        for memory in node.memories.values():
            memory.out[:] = b"\xbb" * len(memory.out)  # the caller's again, to do with what it likes
        self.tally(node)
        node.links.clear()
        node.generation = 0
        self.clock.after((0.0005, 0.01), self.join, node)

    # ---- collectives

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
        if op != len(node.memories):  # an earlier one is late
            self.clock.after((0.001, 0.002), self.submit, node, generation, op)
            return
        task, size = self.tasks[op], len(node.ranks)
        plan = plan_of(task, node.me, size)
        source, out = sizes_of(task, size)
        shift = 0 if task.in_place and task.what in ("all_reduce", "broadcast") else None
        numbers = given(generation, op, node.me, source)
        node.memories[op] = Memory(numbers, out * ELEMENT, plan.scratch_bytes, shift, "d")
        if "late" in self.faults:
            self.clock.at(self.clock.now + DEADLINE_S, self.expire, node, generation, op)
        self.drive(node, -1, c.Submitted(op, plan))

    def expire(self, node: Node, generation: int, op: int) -> None:
        if not node.alive or self.paused(node, self.expire, node, generation, op):
            return
        if node.generation == generation and op not in node.finished:
            self.count["expired"] += 1
            self.drive(node, -1, c.Expired(op))

    def ended(self, node: Node, op: int) -> None:
        """Compares a result with the sum, and its bits with everyone else's."""
        task, memory, size = self.tasks[op], node.memories[op], len(node.ranks)
        result = bytes(memory.out)
        who = f"rank {node.rank}, generation {node.generation}, {task.what} {op}"
        wanted = expected(task, node.generation, op, node.me, size)
        for i, (number, right) in enumerate(zip(memory.numbers(), wanted, strict=True)):
            if not abs(number - right) <= 1e-9 * abs(right):
                raise self.fail(f"{who}: element {i} is {number!r}, not {right!r}")
        if task.what in SAME_EVERYWHERE:
            if self.results.setdefault((node.generation, op), result) != result:
                raise self.fail(f"{who}: other bits than another rank's")
        node.finished.add(op)
        node.after[op] = result
        self.note(f"rank {node.rank}: {task.what} {op} is done")
        self.submit_next(node)

    def check_memories(self, node: Node) -> None:
        for op, memory in node.memories.items():
            if op in node.after and bytes(memory.out) != node.after[op]:
                raise self.fail(f"rank {node.rank}: result of collective {op} changed after its end")
            shared = self.tasks[op].in_place and self.tasks[op].what in ("all_reduce", "broadcast")
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
