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

import functools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from helixrt.emulate.fabric import Clock, Connection, Fabric, Payload, Receiver
from helixrt.emulate.plans import ELEMENT, Memory
from helixrt.errors import Cause
from helixrt.protocol import collective_messages as c
from helixrt.protocol import link_messages as l
from helixrt.protocol.algorithms import choice, direct
from helixrt.protocol.algorithms.layout import Tuning
from helixrt.protocol.collective import CollectiveMachine
from helixrt.protocol.frames import Frame
from helixrt.protocol.link import Link
from helixrt.protocol.plan import Plan

RAIL_FAULTS = ("break", "half-open", "slow", "double")  # a link survives these by itself
FAULTS = (*RAIL_FAULTS, "loss", "silence", "crash", "pause", "partition", "late")

TUNING = Tuning(chunk_bytes=128, chunks=2, least_chunk_bytes=64, direct_bytes=128, two_step_bytes=256)
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
COLLECTIVES = ("all_reduce", "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")


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


@dataclass(frozen=True)
class Task:
    """One collective of the list: what, and how many elements (of each rank, or in all)."""

    what: str
    count: int
    in_place: bool


@functools.lru_cache(maxsize=20_000)
def plan_of(task: Task, rank: int, size: int) -> Plan:
    length, lengths = task.count * ELEMENT, [task.count * ELEMENT] * size
    match task.what:
        case "all_reduce":
            return choice.all_reduce(rank, size, length, ELEMENT, TUNING, task.in_place)
        case "reduce_scatter":
            return choice.reduce_scatter(rank, lengths, ELEMENT, TUNING)
        case "all_gather":
            return choice.all_gather(rank, lengths, ELEMENT, TUNING)
        case "broadcast":
            return choice.broadcast(rank, size, size - 1, length, ELEMENT, TUNING, task.in_place)
        case "all_to_all":
            return direct.all_to_all(rank, lengths, lengths, ELEMENT, TUNING)
        case _:
            return direct.barrier(rank, size)


def sizes_of(task: Task, size: int) -> tuple[int, int]:
    """Elements of SOURCE and OUT of one rank."""
    n = task.count
    match task.what:
        case "barrier":
            return 0, 0
        case "reduce_scatter":
            return n * size, n
        case "all_gather":
            return n, n * size
        case "all_to_all":
            return n * size, n * size
        case _:
            return n, n


def given(generation: int, op: int, rank: int, count: int) -> list[float]:
    """What `rank` gives; thirds, so that the order of a sum shows in its bits."""
    start = generation * 7919 + op * 104729 + rank * 1299709
    return [((start + i * 31) % 9973) / 3.0 for i in range(count)]


def expected(task: Task, generation: int, op: int, rank: int, size: int) -> list[float]:
    source, _ = sizes_of(task, size)
    everyone = [given(generation, op, r, source) for r in range(size)]
    n = task.count
    match task.what:
        case "barrier":
            return []
        case "all_reduce":
            return [math.fsum(column) for column in zip(*everyone, strict=True)]
        case "reduce_scatter":
            return [math.fsum(column) for column in zip(*everyone, strict=True)][rank * n : (rank + 1) * n]
        case "all_gather":
            return [x for numbers in everyone for x in numbers]
        case "broadcast":
            return everyone[size - 1]
        case _:
            return [x for numbers in everyone for x in numbers[rank * n : (rank + 1) * n]]


Name = tuple[int, int, int]  # peer's index in the generation, op, index


@dataclass(eq=False)
class Node:
    """One process: a rank's incarnation, and what it holds for its generation. Peers are numbered by their place in it."""

    rank: int
    incarnation: int
    ahead: int  # collectives it submits before the first of them has ended
    alive: bool = True
    unreachable: bool = False  # it died with its host: nobody is there to refuse a connection
    paused_until: float = 0.0
    backlog: list[tuple[object, ...]] = field(default_factory=list)

    generation: int = 0  # 0: it is in none
    ranks: tuple[int, ...] = ()
    me: int = 0
    machine: CollectiveMachine = field(default_factory=lambda: CollectiveMachine(0, 1, 0))
    links: dict[int, Link] = field(default_factory=dict)
    ticks: dict[int, float] = field(default_factory=dict)  # when the link's next Tick is due
    rails: dict[tuple[int, int], Connection] = field(default_factory=dict)  # (peer, rail)
    reached: set[int] = field(default_factory=set)
    submitted: int = 0
    finished: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)  # collectives that failed or were skipped

    memories: dict[int, Memory] = field(default_factory=dict)
    after: dict[int, bytes] = field(default_factory=dict)  # op -> what OUT was when it ended
    outgoing: dict[Name, memoryview] = field(default_factory=dict)
    kept: dict[Name, bytes] = field(default_factory=dict)
    flying: dict[Name, list[Payload]] = field(default_factory=dict)
    posted: dict[Name, memoryview] = field(default_factory=dict)
    held: dict[Name, bytes] = field(default_factory=dict)
    landing: dict[Connection, memoryview | Name | None] = field(default_factory=dict)
    received: set[Name] = field(default_factory=set)


class CollectiveWorld(Receiver):
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
        self.clock = Clock(seed)
        self.random = self.clock.random
        self.fabric = Fabric(self.clock, self)
        counts = (3, 20, 50)
        self.tasks = [
            Task(self.random.choice(COLLECTIVES), self.random.choice(counts), self.random.random() < 0.5)
            for _ in range(collectives)
        ]
        self.concurrent = self.random.choice((1, 1, 2, 3))
        self.nodes: dict[int, Node] = {}
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.configured: dict[int, list[Node]] = {}
        self.joining: dict[int, tuple[Node, float]] = {}
        self.cut_off: dict[int, float] = {}  # rank -> partitioned until
        self.numbers: Counter[tuple[int, int, int, int]] = Counter()  # (generation, a, b, rail) -> connections so far
        self.connecting: set[tuple[int, int, int, int]] = set()
        self.late: set[int] = set()
        self.results: dict[tuple[int, int], bytes] = {}
        self.pending = 0  # faults and restarts yet to come
        self.count: Counter[str] = Counter()
        self.trace: list[str] | None = [] if trace else None

    # ---- running

    def fail(self, what: str) -> Violation:
        options = f"--seed {self.seed} --size {self.size} --rails {self.rails} --collectives {len(self.tasks)}"
        replay = f"python -m helixrt.emulate.collective_world {options} --faults {','.join(self.faults)}"
        return Violation(f"{what}; at t={self.clock.now:.4f}; replay: {replay}")

    def note(self, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.clock.now * 1e3:10.3f} ms  {what}")

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
        if self.pending or self.joining or set(self.members) != set(self.nodes):
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

    def paused(self, node: Node, *what: object) -> bool:
        """A stopped process hears nothing now; `what` waits for it."""
        if node.paused_until > self.clock.now:
            node.backlog.append(what)
            return True
        return False

    def awake(self, node: Node) -> None:
        if not node.alive or node.paused_until > self.clock.now:
            return
        backlog, node.backlog = node.backlog, []
        for call, *what in sorted(backlog, key=lambda b: b[0] == self.tick):  # a driver reads first, then looks at the time
            call(*what)  # type: ignore[operator]

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
        node.links = {p: Link(generation, p, self.rails, OPTIONS) for p in range(len(members)) if p != node.me}
        node.ticks = dict.fromkeys(node.links, math.inf)
        node.submitted = 0
        for table in (
            node.rails,
            node.reached,
            node.finished,
            node.given_up,
            node.memories,
            node.after,
            node.outgoing,
            node.kept,
        ):
            table.clear()  # type: ignore[attr-defined]
        for table in (node.flying, node.posted, node.held, node.landing, node.received):
            table.clear()  # type: ignore[attr-defined]
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

    def computed(self, node: Node, generation: int, op: int, action: c.Compute) -> None:
        if not node.alive or self.paused(node, self.computed, node, generation, op, action):
            return
        if node.generation == generation:
            node.memories[op].carry_out(action.work)
            self.drive(node, -1, c.Computed(op, action.node))

    def ended(self, node: Node, op: int) -> None:
        """Compares a result with the sum, and its bits with everyone else's."""
        task, memory, size = self.tasks[op], node.memories[op], len(node.ranks)
        result = bytes(memory.out)
        who = f"rank {node.rank}, generation {node.generation}, {task.what} {op}"
        wanted = expected(task, node.generation, op, node.me, size)
        for i, (number, right) in enumerate(zip(memory.numbers(), wanted, strict=True)):
            if not abs(number - right) <= 1e-9 * abs(right):
                raise self.fail(f"{who}: element {i} is {number!r}, not {right!r}")
        if task.what in ("all_reduce", "broadcast", "all_gather"):
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

    # ---- one rank's driver: carries out what its machines ask for, in their order

    def drive(self, node: Node, peer: int, event: object) -> None:
        """`event` is for the link to `peer`, or for the collective machine (-1)."""
        todo: deque[tuple[int, object]] = deque([(peer, event)])
        generation, now = node.generation, self.clock.now
        broken: Cause | None = None
        touched: set[int] = set()
        while todo:
            peer, event = todo.popleft()
            if peer < 0:
                for action in node.machine.on(event):  # type: ignore[arg-type]
                    kind = action.__class__
                    if kind is c.Transmit:
                        name = (action.peer, action.op, action.index)  # type: ignore[union-attr]
                        node.outgoing[name] = node.memories[action.op].view(action.region)  # type: ignore[union-attr]
                        todo.append((action.peer, l.Submit(*name[1:], action.region.length)))  # type: ignore[union-attr]
                    elif kind is c.Await:
                        name = (action.peer, action.op, action.index)  # type: ignore[union-attr]
                        node.posted[name] = node.memories[action.op].view(action.region)  # type: ignore[union-attr]
                        todo.append((action.peer, l.Post(*name[1:], action.region.length)))  # type: ignore[union-attr]
                    elif kind is c.Compute:
                        self.clock.after((0.00005, 0.0005), self.computed, node, generation, action.op, action)  # type: ignore[union-attr]
                    elif kind is c.Done:
                        self.ended(node, action.op)  # type: ignore[union-attr]
                    elif kind is c.Break:
                        broken = action.cause  # type: ignore[union-attr]
                    else:
                        self.count["failed" if kind is c.Failed else "skipped"] += 1
                        node.given_up.add(action.op)  # type: ignore[union-attr]
                        if broken is None or action.cause != broken:  # type: ignore[union-attr]
                            raise self.fail(f"rank {node.rank}: {action} before its Break, or with another cause than {broken}")
                continue
            touched.add(peer)
            for act in node.links[peer].on(event, now):  # type: ignore[arg-type]
                self.perform(node, peer, act, todo)
        if broken is not None:
            self.leave(node, broken)
            return
        for peer in touched:
            self.schedule(node, peer)

    def perform(self, node: Node, peer: int, act: l.Action, todo: deque[tuple[int, object]]) -> None:
        kind = act.__class__
        if kind is l.SendFrame:
            self.write(node, peer, act.rail, act.frame, None)  # type: ignore[union-attr]
            return
        if kind is l.SendData:
            frame = act.frame  # type: ignore[union-attr]
            name = (peer, frame.op, frame.index)
            payload = Payload(node.kept[name] if name in node.kept else node.outgoing[name])
            node.flying.setdefault(name, []).append(payload)
            self.write(node, peer, act.rail, frame, payload)  # type: ignore[union-attr]
            return
        if kind is l.Accept:
            name = (peer, act.op, act.index)  # type: ignore[union-attr]
            connection = node.rails[peer, act.rail]  # type: ignore[union-attr]
            landing = act.landing  # type: ignore[union-attr]
            place = node.posted[name] if landing is l.Landing.PLACE else name if landing is l.Landing.HOLD else None
            node.landing[connection] = place
            if isinstance(place, memoryview):
                place[: len(place) // 2] = b"\xaa" * (len(place) // 2)  # the first half is on its way in
        elif kind is l.Discard:
            node.landing[node.rails[peer, act.rail]] = None  # type: ignore[union-attr]
        elif kind is l.Sent:
            todo.append((-1, c.Sent(act.op, peer, act.index)))  # type: ignore[union-attr]
        elif kind is l.Received:
            name = (peer, act.op, act.index)  # type: ignore[union-attr]
            if name in node.received or name not in node.posted:
                raise self.fail(f"rank {node.rank}: message {name} was received twice, or never asked for")
            node.received.add(name)
            todo.append((-1, c.Received(act.op, peer, act.index)))  # type: ignore[union-attr]
        elif kind is l.Keep:
            name = (peer, act.op, act.index)  # type: ignore[union-attr]
            node.kept[name] = bytes(node.outgoing[name])
        elif kind is l.Release:
            del node.kept[peer, act.op, act.index]  # type: ignore[union-attr]
        elif kind is l.Deliver:
            name = (peer, act.op, act.index)  # type: ignore[union-attr]
            node.posted[name][:] = node.held.pop(name)
        elif kind is l.Free:
            del node.held[peer, act.op, act.index]  # type: ignore[union-attr]
        elif kind is l.Detach:
            for payload in node.flying.get((peer, act.op, act.index), ()):  # type: ignore[union-attr]
                payload.data = bytes(payload.data)
        elif kind is l.RestoreRail:
            self.restore(node, peer, act.rail)  # type: ignore[union-attr]
        elif kind is l.ResetRail:
            self.drop(node, peer, act.rail)  # type: ignore[union-attr]
        elif kind is l.Lost or kind is l.PeerAborted:
            todo.append((-1, c.PeerLost(peer, act.cause)))  # type: ignore[union-attr]
        else:
            raise self.fail(f"rank {node.rank}: unexpected {act} of the link to {peer}")

    def schedule(self, node: Node, peer: int) -> None:
        due = node.links[peer].deadline
        if due < node.ticks[peer]:
            node.ticks[peer] = due
            self.clock.at(max(due, self.clock.now), self.tick, node, node.generation, peer, due)

    def tick(self, node: Node, generation: int, peer: int, due: float) -> None:
        if not node.alive or self.paused(node, self.tick, node, generation, peer, due):
            return
        if node.generation == generation and node.ticks[peer] == due:
            node.ticks[peer] = math.inf
            if node.links[peer].deadline <= self.clock.now:
                self.drive(node, peer, l.Tick())
            else:
                self.schedule(node, peer)

    # ---- rails

    def end(self, node: Node, peer: int) -> int:
        """Which end of its connections to `peer` a node is: the lower rank's is 0."""
        return int(node.rank > node.ranks[peer])

    def write(self, node: Node, peer: int, rail: int, frame: Frame, payload: Payload | None) -> None:
        connection = node.rails.get((peer, rail))
        if self.trace is not None:
            what = f"{frame.kind.name} {frame.sequence or ''} ({frame.op}, {frame.index}) {frame.length} B"
            self.note(f"{node.rank} -> {node.ranks[peer]} rail {rail}: {what}")
        if connection is not None:
            self.fabric.send(connection, self.end(node, peer), frame, payload)
            self.fabric.remember(node.rank, node.ranks[peer], frame)

    def drop(self, node: Node, peer: int, rail: int) -> None:
        connection = node.rails.pop((peer, rail), None)
        if connection is not None:
            node.landing.pop(connection, None)
            self.fabric.close(connection, self.end(node, peer))

    def restore(self, node: Node, peer: int, rail: int) -> None:
        generation, other = node.generation, node.ranks[peer]
        low, high = min(node.rank, other), max(node.rank, other)
        if (generation, low, high, rail) in self.connecting:
            return
        there = self.nodes[other]
        nobody = not there.unreachable and (not there.alive or there.generation != generation)
        if nobody and self.fabric.connectable(low, high, rail):
            self.clock.after((0.001, 0.008), self.refused, node, generation, peer, rail, l.Failure.PEER_GONE)
        elif not there.alive or not self.fabric.connectable(low, high, rail):
            self.clock.after((0.005, 0.02), self.refused, node, generation, peer, rail, l.Failure.PATH)
        else:
            self.connecting.add((generation, low, high, rail))
            self.clock.after((0.001, 0.008), self.dial, generation, low, high, rail)

    def refused(self, node: Node, generation: int, peer: int, rail: int, failure: l.Failure) -> None:
        if not node.alive or self.paused(node, self.refused, node, generation, peer, rail, failure):
            return
        if node.generation == generation and (peer, rail) not in node.rails:
            self.drive(node, peer, l.RailDown(rail, failure, "cannot connect"))

    def dial(self, generation: int, a: int, b: int, rail: int) -> None:
        low, high = min(a, b), max(a, b)
        self.connecting.discard((generation, low, high, rail))
        ends = [self.nodes[low], self.nodes[high]]
        if any(not n.alive or n.generation != generation for n in ends) or not self.fabric.connectable(low, high, rail):
            for node, other in zip(ends, (high, low), strict=True):
                if node.alive and node.generation == generation:
                    self.refused(node, generation, node.ranks.index(other), rail, l.Failure.PATH)
            return
        self.numbers[generation, low, high, rail] += 1
        connection = self.fabric.connect(generation, rail, self.numbers[generation, low, high, rail], low, high)
        if connection.number == 1 and self.random.random() < 0.3:
            self.fabric.haunt(connection, self.random.randrange(2))

    def receiver_of(self, connection: Connection, end: int) -> tuple[Node, int] | None:
        """The node at this end and the peer's number, if the node is still in the connection's generation."""
        node = self.nodes[connection.ranks[end]]
        if not node.alive or node.generation != connection.generation:
            return None
        return node, node.ranks.index(connection.ranks[1 - end])

    def up(self, connection: Connection, end: int) -> None:
        found = self.receiver_of(connection, end)
        if found is None:
            self.fabric.close(connection, end)
            return
        node, peer = found
        if self.paused(node, self.up, connection, end):
            return
        if not connection.open[end]:
            self.drive(node, peer, l.RailDown(connection.rail, l.Failure.PATH, "closed before it was taken"))
            return
        old = node.rails.get((peer, connection.rail))
        if old is not None:
            if old.number > connection.number:
                self.fabric.close(connection, end)
                return
            node.landing.pop(old, None)
            self.fabric.close(old, end)
        node.rails[peer, connection.rail] = connection
        self.drive(node, peer, l.RailUp(connection.rail, connection.number))
        if node.generation == connection.generation and peer not in node.reached:
            node.reached.add(peer)
            self.connected(node)

    def down(self, connection: Connection, end: int, failure: l.Failure, reason: str) -> None:
        found = self.receiver_of(connection, end)
        if found is None or self.paused(found[0], self.down, connection, end, failure, reason):
            return
        node, peer = found
        if node.rails.get((peer, connection.rail)) is connection:
            del node.rails[peer, connection.rail]
            node.landing.pop(connection, None)
            self.drive(node, peer, l.RailDown(connection.rail, failure, reason))

    def header(self, connection: Connection, end: int, frame: Frame) -> None:
        found = self.receiver_of(connection, end)
        if found is None or self.paused(found[0], self.header, connection, end, frame):
            return
        node, peer = found
        if node.rails.get((peer, connection.rail)) is connection:
            self.drive(node, peer, l.FrameArrived(connection.rail, frame))

    def payload(self, connection: Connection, end: int, frame: Frame, payload: Payload) -> None:
        found = self.receiver_of(connection, end)
        if found is None or self.paused(found[0], self.payload, connection, end, frame, payload):
            return
        node, peer = found
        if node.rails.get((peer, connection.rail)) is not connection:
            return
        place = node.landing.pop(connection)
        if isinstance(place, memoryview):
            place[:] = payload.data
        elif place is not None:
            node.held[place] = bytes(payload.data)
        self.drive(node, peer, l.PayloadArrived(connection.rail, frame.sequence))


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
