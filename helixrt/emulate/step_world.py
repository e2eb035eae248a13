"""A simulated world for the step protocol: virtual clock, seeded order, and everything may fail.

In: a seed, the number of replicas, rings and steps, and which kinds of fault may happen. Out: a
`Verdict`, or a `Violation` that says what was broken and the one line that replays it.

The machines are the ones the job runs (`helixrt.protocol.step.machine`); only what they act on is simulated:
a lighthouse with heartbeats, the run's log with outages, rings that break half-way, peer fetch,
checkpoints. "Parameters" are the list of what was summed into them, so every update is checked
against the lineage at once, not only at the end.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Log, audit, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member

Batch = tuple[int, int]  # (replica, position)
State = tuple[str, tuple[frozenset[Batch], ...]]  # lineage hash, what each update summed

FAULTS = ("crash", "pause", "partition", "store")


class Violation(AssertionError):
    """An invariant was broken; the message ends with the line that replays it."""


@dataclass(frozen=True)
class Verdict:
    """What a run did. `left_out` are replicas that some quorum went on without, or that were behind."""

    seed: int
    virtual_s: float
    events: int
    crashes: int
    generations: int
    superseded: int
    retried: int
    fetches: int
    repaired: int
    left_out: int


@dataclass
class Ring:
    """One (generation, ring): who is in, what each gave, who has the sum, who lost it."""

    members: tuple[int, ...]
    given: dict[int, frozenset[Batch]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    broken: bool = False


@dataclass
class Node:
    """One replica's incarnation and all that a crash wipes out."""

    replica: int
    incarnation: int
    machine: StepMachine
    state: State
    alive: bool = True
    paused_until: float = 0.0
    work: tuple[str, int] | None = None
    gradients: bool = False
    waiting: list[tuple[int, int]] = field(default_factory=list)  # rings that wait for gradients
    reduced: dict[tuple[int, int], frozenset[Batch]] = field(default_factory=dict)
    generation: int = -1
    kept: dict[str, frozenset[Batch]] = field(default_factory=dict)
    offers: dict[str, State] = field(default_factory=dict)
    offered_reduced: tuple[str, frozenset[Batch]] = ("", frozenset())
    fetched: dict[str, State] = field(default_factory=dict)


class StepWorld:
    """Runs one seed. `faults` are kinds out of FAULTS; they happen in the first part of the run."""

    EXCHANGE_S, JOIN_S, HEARTBEAT_S, FETCH_S = 8.0, 12.0, 2.0, 6.0

    def __init__(self, seed: int, replicas: int = 3, rings: int = 2, steps: int = 8, faults: tuple[str, ...] = FAULTS) -> None:
        self.seed, self.replicas, self.rings, self.steps, self.faults = seed, replicas, rings, steps, faults
        self.random = random.Random(seed)
        self.now, self.events, self.heap = 0.0, 0, list[tuple[float, int, Callable[[], None]]]()
        self.root = genesis("sim", replicas)
        self.store: list[CommitRecord] = [self.root]
        self.store_down_until = 0.0
        self.durable: dict[str, State] = {self.root.hash: (self.root.hash, ())}
        self.persisted: dict[int, str] = {}
        self.nodes: dict[int, Node] = {}
        self.lonely: dict[int, float] = {}  # replica -> partitioned until
        self.last_heartbeat: dict[tuple[int, int], float] = {}
        self.joins: dict[int, tuple[Node, Member, float]] = {}
        self.generation = 0
        self.exchange: dict[tuple[int, int], Ring] = {}
        self.worked: Counter[tuple[int, Batch]] = Counter()  # (incarnation, batch)
        self.count: Counter[str] = Counter()
        self.crashed: set[int] = set()
        self.left_out: set[int] = set()

    # ---- running

    def at(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + delay, self.random.getrandbits(32), call))

    def fail(self, what: str) -> Violation:
        options = f"--seed {self.seed} --replicas {self.replicas} --rings {self.rings} --steps {self.steps}"
        replay = f"python -m helixrt.emulate.step_world {options} --faults {','.join(self.faults)}"
        return Violation(f"{what}; at t={self.now:.3f}; replay: {replay}")

    def run(self, limit_s: float = 2000.0) -> Verdict:
        """To the end of training; raises Violation when an invariant breaks or nothing ends."""
        for replica in range(self.replicas):
            self.boot(replica, 0)
        if self.faults:
            for _ in range(self.random.randint(1, 6)):
                self.at(self.random.uniform(0.0, 1.5 * self.steps), self.fault)
        self.at(0.05, self.lighthouse)
        while self.heap:
            when, _, call = heapq.heappop(self.heap)
            self.now = when
            self.events += 1
            call()
            if self.now > limit_s:
                phases = {r: (n.machine.phase.value, n.machine.held_step) for r, n in self.nodes.items()}
                raise self.fail(f"no end in sight, replicas (phase, step): {phases}, head {self.store[-1].step}")
            head = self.store[-1]
            if head.step >= self.steps and all(n.alive and n.machine.held == head.hash for n in self.nodes.values()):
                break
        return self.verdict()

    def verdict(self) -> Verdict:
        log = Log(self.store)
        chain = log.chain()
        found = audit(chain)
        if not found.clean:
            raise self.fail(f"audit {found}")
        expected = self.content(log.head)
        for node in self.nodes.values():
            if node.state != (log.head.hash, expected):
                raise self.fail(f"replica {node.replica} ends with another state than the lineage's")
        redone = [b for (_, b), times in self.worked.items() if times > 1 and b[0] not in self.crashed | self.left_out]
        if redone:
            raise self.fail(f"survivors worked twice on batches (replica, position) {redone}")
        c = self.count
        return Verdict(
            seed=self.seed,
            virtual_s=self.now,
            events=self.events,
            crashes=c["crash"],
            generations=self.generation,
            superseded=len(log.superseded()),
            retried=c["broken"],
            fetches=c["fetched"],
            repaired=c["repaired"],
            left_out=len(self.left_out),
        )

    def content(self, record: CommitRecord) -> tuple[frozenset[Batch], ...]:
        """What the lineage says was summed into the state of `record`, update by update."""
        log = Log(self.store)
        return tuple(self.summed(r, log) for r in log.chain(record.hash)[1:])

    def summed(self, record: CommitRecord, log: Log) -> frozenset[Batch]:
        parent = log.get(record.parent)
        assert parent is not None
        return frozenset((r, parent.positions.get(r, 0)) for r in record.contributors)

    # ---- replicas and their faults

    def boot(self, replica: int, incarnation: int) -> None:
        if self.now < self.store_down_until:
            self.at(0.5, lambda: self.boot(replica, incarnation))
            return
        log = Log(self.store)
        state = self.newest_durable(log)
        machine = StepMachine(replica, incarnation, self.rings, log, state[0], self.steps, replay=4)
        node = Node(replica, incarnation, machine, state)
        self.nodes[replica] = node
        self.deliver(node, p.Begin())
        self.heartbeat(node)

    def newest_durable(self, log: Log) -> State:
        return next(self.durable[r.hash] for r in reversed(log.chain()) if r.hash in self.durable)

    def fault(self) -> None:
        kind = self.random.choice(self.faults)
        replica = self.random.randrange(self.replicas)
        node = self.nodes.get(replica)
        span = self.random.choice((0.3, 1.5, 4.0, 10.0, 20.0))
        if kind == "store":
            self.store_down_until = self.now + span
        elif node is None or not node.alive:
            return
        elif kind == "crash":
            self.crash(node)
        elif kind == "pause":
            node.paused_until = self.now + span
        else:
            self.lonely[replica] = self.now + span

    def crash(self, node: Node) -> None:
        node.alive = False
        self.crashed.add(node.replica)
        self.count["crash"] += 1
        self.joins.pop(node.replica, None)
        for key, ring in list(self.exchange.items()):
            if node.replica in ring.members:
                self.break_ring(key, ring, "peer died")
        self.at(self.random.uniform(0.5, 6.0), lambda: self.boot(node.replica, node.incarnation + 1))

    def cut(self, replica: int) -> bool:
        return self.lonely.get(replica, 0.0) > self.now

    def deliver(self, node: Node, event: p.Event) -> None:
        """Hand an event to a replica, later if it is paused, never if it is gone."""
        if not node.alive:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until - self.now, lambda: self.deliver(node, event))
            return
        for action in node.machine.on(event):
            self.perform(node, action)

    def answer(self, node: Node, event: p.Event, low: float = 0.001, high: float = 0.05) -> None:
        self.at(self.random.uniform(low, high), lambda: self.deliver(node, event))

    # ---- membership

    def heartbeat(self, node: Node) -> None:
        if not node.alive:
            return
        if node.paused_until <= self.now and not self.cut(node.replica):
            self.last_heartbeat[(node.replica, node.incarnation)] = self.now
        self.at(0.3, lambda: self.heartbeat(node))

    def lighthouse(self) -> None:
        """As torchft's: a quorum forms when all that heartbeat have joined, or some waited too long."""
        self.at(0.05, self.lighthouse)
        living = {key for key, seen in self.last_heartbeat.items() if self.now - seen < self.HEARTBEAT_S}
        for replica, (node, _, since) in list(self.joins.items()):
            if not node.alive or self.now - since > 1.5 * self.JOIN_S:
                del self.joins[replica]
                if node.alive:
                    self.deliver(node, p.JoinFailed("timeout"))
        joined = {(r, n.incarnation) for r, (n, _, _) in self.joins.items() if (r, n.incarnation) in living}
        if not joined or 2 * len(joined) <= len(living):
            return
        oldest = min(since for _, _, since in self.joins.values())
        if joined != living and self.now - oldest < self.JOIN_S:
            return
        self.generation += 1
        self.left_out |= set(range(self.replicas)) - {replica for replica, _ in joined}
        members = tuple(m for r, (n, m, _) in sorted(self.joins.items()) if (r, n.incarnation) in joined)
        for member in members:
            node, _, _ = self.joins.pop(member.replica)
            self.at(self.random.uniform(0.001, 0.1), partial(self.formed, node, self.generation, members))

    def formed(self, node: Node, generation: int, members: tuple[Member, ...]) -> None:
        if self.cut(node.replica) or self.now < self.store_down_until:
            if node.alive:
                self.answer(node, p.JoinFailed("log not read"), 0.5, 1.0)
            return
        self.deliver(node, p.Formed(generation, members, tuple(self.store[len(node.machine.log) :])))

    # ---- what the machines ask for

    def perform(self, node: Node, action: p.Action) -> None:
        match action:
            case p.Join():
                self.at(self.random.uniform(0.001, 0.02), lambda: self.ask_join(node, action.me))
            case p.Work():
                self.start_work(node, action)
            case p.Exchange():
                self.start_exchange(node, action)
            case p.Abort():
                for ring in range(self.rings):
                    self.break_ring((action.generation, ring), self.exchange[(action.generation, ring)], action.reason)
            case p.Append():
                self.ask_store(node, lambda: self.put(action.index, action.record))
            case p.ReadLog():
                self.ask_store(node, lambda: p.LogRead(tuple(self.store[action.index :])))
            case p.Persist():
                if self.persisted.setdefault(action.index, action.record.hash) != action.record.hash:
                    raise self.fail(f"two records persisted at {action.index}")
            case p.Apply():
                self.apply(node, action.record, self.taken(node, action.record))
            case p.Keep():
                node.kept[action.record.hash] = self.taken(node, action.record)
            case p.Forget():
                node.kept.pop(action.lineage, None)
            case p.Replay():
                self.apply(node, action.record, node.kept.pop(action.record.hash))
            case p.Load():
                node.state = node.fetched.pop(action.lineage)
            case p.Offer():
                if node.state[0] != action.lineage:
                    raise self.fail(f"replica {node.replica} offers a state it does not hold")
                node.offers[action.lineage] = node.state
            case p.Withdraw():
                node.offers.pop(action.lineage, None)
            case p.FetchState() | p.FetchReduced():
                self.fetch(node, action, self.now + self.FETCH_S)
            case p.Reload():
                node.state = self.newest_durable(node.machine.log)
                self.answer(node, p.Reloaded(node.state[0]))
            case p.Rest():
                self.answer(node, p.Rested(), 0.05, 0.1)

    def ask_join(self, node: Node, me: Member) -> None:
        if not node.alive:
            return
        if self.cut(node.replica):
            self.answer(node, p.JoinFailed("unreachable"), 0.5, 1.0)
            return
        current = self.joins.get(me.replica)
        if current is None or current[0].incarnation <= me.incarnation:
            self.joins[me.replica] = (node, me, self.now)

    def start_work(self, node: Node, action: p.Work) -> None:
        wanted = (action.base, action.position)
        if node.state[0] != action.base:
            raise self.fail(f"replica {node.replica} works on a state it does not hold")
        node.work, node.gradients = wanted, False
        self.worked[(node.incarnation, (node.replica, action.position))] += 1

        def finish() -> None:
            if node.paused_until > self.now:
                self.at(node.paused_until - self.now, finish)
            elif node.alive and node.work == wanted:
                node.gradients = True
                waiting, node.waiting = node.waiting, []
                for key in waiting:
                    self.give(node, key, frozenset({(node.replica, action.position)}))

        self.at(self.random.uniform(0.2, 1.2), finish)

    def start_exchange(self, node: Node, action: p.Exchange) -> None:
        node.generation = action.generation
        node.reduced.clear()
        node.waiting.clear()
        for number in range(self.rings):
            key = (action.generation, number)
            self.exchange.setdefault(key, Ring(action.members))
            if not action.contribute:
                self.left_out.add(node.replica)
                self.give(node, key, frozenset())
            elif node.gradients and node.work is not None:
                self.give(node, key, frozenset({(node.replica, node.work[1])}))
            else:
                node.waiting.append(key)
            self.at(self.EXCHANGE_S, partial(self.lose, node, key, "deadline"))

    def give(self, node: Node, key: tuple[int, int], what: frozenset[Batch]) -> None:
        ring = self.exchange[key]
        ring.given[node.replica] = what
        for member in ring.members:
            other = self.nodes.get(member)
            if other is None or not other.alive or self.cut(member):
                self.break_ring(key, ring, "peer unreachable")
        if ring.broken or set(ring.given) != set(ring.members):
            return
        for member in ring.members:
            self.at(self.random.uniform(0.01, 0.4), partial(self.gain, self.nodes[member], key))

    def gain(self, node: Node, key: tuple[int, int]) -> None:
        ring = self.exchange[key]
        if not node.alive or node.replica in ring.ended or (ring.broken and self.random.random() < 0.5):
            return
        if node.paused_until > self.now:
            self.at(node.paused_until - self.now, lambda: self.gain(node, key))
            return
        if self.cut(node.replica):
            return
        ring.ended.add(node.replica)
        node.reduced[key] = frozenset().union(*ring.given.values())
        self.deliver(node, p.RingDone(*key))

    def break_ring(self, key: tuple[int, int], ring: Ring, reason: str) -> None:
        if ring.broken:
            return
        ring.broken = True
        self.count["broken"] += 1
        for member in ring.members:
            other = self.nodes.get(member)
            if other is not None:
                self.at(self.random.uniform(0.3, 0.9), partial(self.lose, other, key, reason))

    def lose(self, node: Node, key: tuple[int, int], reason: str) -> None:
        ring = self.exchange[key]
        if not node.alive or node.replica in ring.ended or node.generation != key[0]:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until - self.now, lambda: self.lose(node, key, reason))
            return
        ring.ended.add(node.replica)
        if key in node.waiting:
            node.waiting.remove(key)
        self.deliver(node, p.RingFailed(key[0], key[1], reason))
        self.break_ring(key, ring, reason)

    # ---- store

    def put(self, index: int, record: CommitRecord) -> p.Event:
        if index == len(self.store):
            self.store.append(record)
        return p.Appended(index, self.store[index])

    def ask_store(self, node: Node, ask: Callable[[], p.Event]) -> None:
        def arrive() -> None:
            if self.now < self.store_down_until or self.cut(node.replica):
                self.answer(node, p.StoreLost(), 0.5, 1.0)
                return
            answer = ask()
            lost = "store" in self.faults and self.random.random() < 0.02
            self.answer(node, p.StoreLost() if lost else answer)

        self.at(self.random.uniform(0.001, 0.3), arrive)

    # ---- state

    def taken(self, node: Node, record: CommitRecord) -> frozenset[Batch]:
        sums = {node.reduced.get((record.generation, ring)) for ring in range(self.rings)}
        if len(sums) != 1:
            raise self.fail(f"replica {node.replica}: rings disagree for step {record.step}: {sums}")
        (found,) = sums
        assert found is not None
        return found

    def apply(self, node: Node, record: CommitRecord, what: frozenset[Batch]) -> None:
        log = Log(self.store)
        if node.state[0] != record.parent or what != self.summed(record, log):
            raise self.fail(f"replica {node.replica}: update {record.step} does not fit: {node.state[0][:6]} {set(what)}")
        node.state = (record.hash, (*node.state[1], what))
        node.offered_reduced = (record.hash, what)
        if record.step % 3 == 0 and node.replica == min(record.contributors):
            state = node.state
            self.at(self.random.uniform(0.1, 2.0), lambda: self.durable.setdefault(state[0], state) and None)

    def fetch(self, node: Node, action: p.FetchState | p.FetchReduced, deadline: float) -> None:
        def attempt() -> None:
            if not node.alive:
                return
            for donor in action.donors:
                other = self.nodes.get(donor.replica)
                if other is None or not other.alive or other.incarnation != donor.incarnation:
                    continue
                if self.cut(donor.replica) or self.cut(node.replica) or other.paused_until > self.now:
                    continue
                if isinstance(action, p.FetchState) and action.lineage in other.offers:
                    node.fetched[action.lineage] = other.offers[action.lineage]
                elif isinstance(action, p.FetchReduced) and other.offered_reduced[0] == action.lineage:
                    node.kept[action.lineage] = other.offered_reduced[1]
                    self.count["repaired"] += 1
                else:
                    continue
                self.count["fetched"] += 1
                self.deliver(node, p.Fetched(action.lineage))
                return
            if self.now >= deadline:
                self.deliver(node, p.FetchFailed(action.lineage, "no donor"))
            else:
                self.at(self.random.uniform(0.2, 0.6), attempt)

        self.at(self.random.choice((0.1, 0.5, 2.5)) * self.random.uniform(0.5, 1.5), attempt)


def main(arguments: list[str] | None = None) -> None:
    """`--seed N [--count M]`: run one seed, or M seeds from N on, and print what happened."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rings", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--faults", default=",".join(FAULTS))
    o = parser.parse_args(arguments)
    faults = tuple(f for f in o.faults.split(",") if f)
    for seed in range(o.seed, o.seed + o.count):
        print(StepWorld(seed, o.replicas, o.rings, o.steps, faults).run())


if __name__ == "__main__":
    main()
