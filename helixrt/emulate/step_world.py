"""A simulated world for the step protocol: virtual clock, seeded order, and everything may fail.

In: a seed, the numbers of replicas, ranks of a replica and steps, and which kinds of fault may happen. Out: a
`Verdict`, or a `Violation` that says what was broken and the one line that replays it.

The machines are the ones the job runs (`helixrt.protocol.step.machine`); only what they act on is simulated:
a membership service with heartbeats, the run's store with outages, exchanges that break half-way, peer fetch,
checkpoints. "Parameters" are the list of what was summed into them, so every update is checked
against the lineage at once, not only at the end; and every superseding record against what is lost by it.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from helixrt.emulate.step_exchanges import Exchanges
from helixrt.emulate.step_faults import FAULTS, REMADE, Faults
from helixrt.emulate.step_membership import Lighthouse
from helixrt.emulate.step_node import Node, Verdict, Violation
from helixrt.emulate.step_orders import Orders
from helixrt.emulate.step_state import States
from helixrt.emulate.step_store import Batch, SimulatedStore, State
from helixrt.emulate.step_store_calls import StoreCalls
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.batches import BatchRules
from helixrt.protocol.step.lineage import CommitRecord, Log, audit, genesis, is_last
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import StepRules

LIMIT_S = 60_000.0


class StepWorld:
    """Runs one seed. `faults` are kinds out of FAULTS; they happen in the first part of the run.

    `fetch_s` are the durations of a fetch to choose from; `cut` names pairs of replicas that never reach each other. With
    `orders` replicas change the order of their schedule now and then, each time to one with a higher number. `compacts`: the
    log is cut behind durable records, to so many entries at least; 0: never. `skips`: this part of all batches is not computed.
    """

    def __init__(
        self,
        seed: int,
        replicas: int = 3,
        group_world_size: int = 2,
        steps: int = 8,
        faults: tuple[str, ...] = FAULTS,
        rules: StepRules | None = None,
        fetch_s: tuple[float, ...] = (0.1, 0.5, 2.5),
        cut: tuple[tuple[int, int], ...] = (),
        orders: bool = False,
        compacts: int = 0,
        skips: float = 0.0,
    ) -> None:
        self.seed, self.replicas, self.group_world_size, self.steps, self.faults = (
            seed,
            replicas,
            group_world_size,
            steps,
            faults,
        )
        self.rules, self.fetch_s = rules or StepRules(replay=4), fetch_s
        self.rules = replace(self.rules, batches=BatchRules((0,) * group_world_size))
        self.random = random.Random(seed)
        self.now, self.events, self.heap = 0.0, 0, list[tuple[float, int, Callable[[], None]]]()
        self.store = SimulatedStore(genesis("sim", replicas), self.rules.supersede_after_s, self.held_anywhere)
        self.persisted: dict[int, str] = {}
        self.nodes: dict[int, Node] = {}
        self.fenced: list[Node] = []  # replaced while their processes may live on
        self.lonely: dict[int, float] = {}  # replica -> partitioned until
        self.pairs: dict[tuple[int, int], float] = {tuple(sorted(pair)): LIMIT_S * 2 for pair in cut}  # type: ignore[misc]
        self.generation, self.clock_offset_s = 0, 0.0
        self.lighthouse, self.exchange, self.states, self.trouble = (
            Lighthouse(self),
            Exchanges(self),
            States(self),
            Faults(self),
        )
        self.worked: Counter[tuple[int, int, Batch]] = Counter()  # (life, incarnation, batch)
        self.spoilt: dict[Batch, int] = {}  # batches whose gradient is not finite -> the rank that has it
        self.count: Counter[str] = Counter()
        self.crashed: set[int] = set()
        self.left_out: set[int] = set()
        self.orders, self.compacts, self.skips = Orders(seed) if orders else None, compacts, skips
        self.calls = StoreCalls(self, REMADE in faults)
        self.until_all = True  # the run ends when every replica holds the last state, not only one

    # ---- running

    def at(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + delay, self.random.getrandbits(32), call))

    def fail(self, what: str) -> Violation:
        options = (
            f"--seed {self.seed} --replicas {self.replicas} --group-world-size {self.group_world_size} --steps {self.steps}"
        )
        options += " --orders" if self.orders else ""
        options += f" --compacts {self.compacts}" if self.compacts else ""
        options += f" --skips {self.skips}" if self.skips else ""
        replay = f"python -m helixrt.emulate.step_world {options} --faults {','.join(self.faults)}"
        return Violation(f"{what}; at t={self.now:.3f}; replay: {replay}")

    def run(self, limit_s: float = LIMIT_S) -> Verdict:
        """To the end of training; raises Violation when an invariant breaks, a machine is misused or nothing ends."""
        try:
            return self._run(limit_s)
        except (AssertionError, LookupError, ValueError) as error:
            if isinstance(error, Violation):
                raise
            raise self.fail(f"{type(error).__name__}: {error}") from error

    def _run(self, limit_s: float) -> Verdict:
        for replica in range(self.replicas):
            self.boot(replica, 0)
        if self.faults:
            for _ in range(self.random.randint(1, 6)):
                self.at(self.random.uniform(0.0, 1.5 * self.steps), self.trouble.strike)
        while self.heap and not self.ended():
            when, _, call = heapq.heappop(self.heap)
            self.now = when
            self.events += 1
            call()
            self.calls.noted()
            if self.now > limit_s or self.events > 2_000_000:
                phases = {r: (n.machine.phase.value, n.machine.held_step) for r, n in self.nodes.items()}
                raise self.fail(f"no end in sight, replicas (phase, step): {phases}, head {self.store.head.step}")
        return self.verdict()

    def ended(self) -> bool:
        head = self.store.entries[-1]
        if not is_last(head, self.steps, self.store.life) or len(self.nodes) < self.replicas:
            return False
        holding = [n.alive and n.machine.held == head.hash for n in self.nodes.values()]
        return all(holding) if self.until_all else any(holding)

    def verdict(self) -> Verdict:
        log = Log(self.store.entries)
        chain = log.chain()
        found = audit(chain)
        if not found.clean:
            raise self.fail(f"audit {found}")
        for before, record in zip(chain, chain[1:], strict=False):
            if is_last(before, self.steps, record.life):
                raise self.fail(f"step {record.step} follows step {before.step}, with which the run ended")
        if self.orders and (complaint := self.orders.complaint(chain)):
            raise self.fail(complaint)
        expected = self.content(log.head)
        for node in self.nodes.values():
            if node.state != (log.head.hash, expected) and self.until_all:
                raise self.fail(f"replica {node.replica} ends with another state than the lineage's")
        spared = self.crashed | self.left_out
        redone = [b for (life, _, b), times in self.worked.items() if times > 1 and life == 0 and b[0] not in spared]
        if redone and not self.store.life:
            raise self.fail(f"survivors worked twice on batches (replica, position) {redone}")
        c = self.count
        return Verdict(
            seed=self.seed,
            virtual_s=self.now,
            events=self.events,
            crashes=c["crash"],
            generations=c["quorum"],
            superseded=len(log.superseded()),
            retried=c["broken"],
            fetches=c["fetched"],
            repaired=c["repaired"],
            left_out=len(self.left_out),
            waits=c["wait"],
            lost_steps=self.store.lost,
            reloads=c["reload"],
            held=c["hold"],
            excluded=found.excluded,
            not_applied=sum(not r.applied for r in chain),
            sat_out=c["sat_out"],
            lives=self.store.life + 1,
            stopped=int(log.head.last != ""),
            dropped=sum(node.machine.log.behind.begin > 0 for node in self.nodes.values()),
            switched=len({(r, order) for record in chain for r, order in record.orders.items()}),
            remade=c["remade"],
        )

    def content(self, record: CommitRecord) -> tuple[frozenset[Batch], ...]:
        """What was summed into the state of `record` according to the lineage, update by update."""
        log = Log(self.store.entries)
        return tuple(self.summed(r, log) for r in log.chain(record.hash)[1:])

    def summed(self, record: CommitRecord, log: Log) -> frozenset[Batch]:
        parent = log.get(record.parent)
        assert parent is not None
        return frozenset((r, parent.positions.get(r, 0)) for r in record.summed)

    def finite_sum(self, what: frozenset[Batch], rank: int) -> bool:
        """Whether a sum is finite on this rank: no summand is spoilt there, and it does not overflow."""
        overflows = "nonfinite" in self.faults and len(what) > 1 and hash((self.seed, *sorted(what))) % 40 == 0
        return not overflows and all(self.spoilt.get(batch) != rank for batch in what)

    def held_anywhere(self) -> Iterator[str]:
        """The states that living replicas hold; those that were fenced have ended by the store's word."""
        for node in self.nodes.values():
            if node.alive and (node.replica, node.incarnation) not in self.store.ended:
                yield node.machine.held

    # ---- replicas and their faults

    def boot(self, replica: int, incarnation: int) -> None:
        """Start this incarnation, unless it was started already (a replica can be fenced and crash at a time)."""
        known = self.nodes.get(replica)
        if known is not None and known.life == self.store.life and known.incarnation >= incarnation:
            return
        if self.now < self.store.down_until:
            life = self.store.life
            self.at(0.5, lambda: self.boot(replica, incarnation) if life == self.store.life else None)
            return
        self.store.ended |= {(replica, earlier) for earlier in range(incarnation)}  # the successor's word
        log = self.store.log()
        state: State = ("", ())
        if log.head == self.store.root:
            state = self.store.durable[log.head.hash]
        machine = StepMachine(
            replica,
            incarnation,
            self.group_world_size,
            log,
            state[0],
            self.steps,
            self.rules,
            self.store.life,
            self.skipped(replica),
            order=None,
        )
        node = Node(replica, incarnation, self.store.life, machine, state)
        self.nodes[replica] = node
        self.deliver(node, p.Begin())

    def skipped(self, replica: int) -> list[int]:
        """Positions of its stream whose batches it does not compute: in all of its lives the same."""
        draw = random.Random(f"skips {self.seed} {replica}")
        return [position for position in range(4 * self.steps) if draw.random() < self.skips]

    def gone(self, node: Node) -> None:
        node.alive = False
        node.silent_since = self.now if node.silent_since is None else node.silent_since
        self.crashed.add(node.replica)
        self.lighthouse.lost(node)
        self.exchange.lost(node)

    def seen_to_end(self, node: Node) -> None:
        if node.life == self.store.life:
            self.store.ended.add((node.replica, node.incarnation))

    def cut(self, replica: int) -> bool:
        return self.lonely.get(replica, 0.0) > self.now

    def cut_pairs(self) -> list[tuple[int, int]]:
        return [pair for pair, until in self.pairs.items() if until > self.now]

    def reaches(self, a: Node, b: Node) -> bool:
        pair = (min(a.replica, b.replica), max(a.replica, b.replica))
        return not self.cut(a.replica) and not self.cut(b.replica) and self.pairs.get(pair, 0.0) <= self.now

    def deliver(self, node: Node, event: p.Event) -> None:
        """Hand an event to a replica, later if it is paused, never if it is gone."""
        if not node.alive:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until - self.now, lambda: self.deliver(node, event))
            return
        for action in node.machine.on(event):
            self.perform(node, action)
            if not node.alive:
                return
        if self.orders:
            self.orders.handled(node)

    def answer(self, node: Node, event: p.Event, low: float = 0.001, high: float = 0.05) -> None:
        self.at(self.random.uniform(low, high), lambda: self.deliver(node, event))

    def fence_holds(self, node: Node) -> bool:
        """A rank reads its own entry at every quorum and before every append, and stops if it has ended."""
        if node.life == self.store.life and (node.replica, node.incarnation) not in self.store.ended:
            return False
        self.gone(node)
        return True

    # ---- what the machines ask for

    def perform(self, node: Node, action: p.Action) -> None:
        match action:
            case p.Join():
                self.at(self.random.uniform(0.001, 0.02), lambda: self.lighthouse.ask(node, action.me))
            case p.Work():
                self.start_work(node, action)
            case p.Exchange():
                if not action.contribute:
                    self.left_out.add(node.replica)
                self.exchange.start(node, action)
            case p.Examine():
                for rank in range(self.group_world_size):
                    assert node.work is not None
                    finite = self.spoilt.get((node.replica, node.work[1])) != rank
                    self.answer(node, p.Examined(action.generation, rank, finite))
            case p.Abort():
                self.exchange.abort(node, action.generation, action.reason)
            case p.Append():
                self.calls.ask(node, lambda: self.calls.append(node, action))
            case p.ReadLog():
                self.calls.ask(node, lambda: p.LogRead(tuple(self.store.entries[action.index :])))
            case p.Persist():
                if self.persisted.setdefault(action.index, action.record.hash) != action.record.hash:
                    raise self.fail(f"two records persisted at {action.index}")
            case p.Apply():
                record = action.record
                self.states.apply(node, record, self.states.taken(node, record) if record.applied else frozenset())
            case p.Keep():
                node.kept[action.record.hash] = self.states.taken(node, action.record)
                if len(node.kept) > self.rules.replay + 2:
                    raise self.fail(f"replica {node.replica} keeps {len(node.kept)} sets of buckets")
            case p.Forget():
                node.kept.pop(action.lineage, None)
                node.fetched.pop(action.lineage, None)
            case p.Replay():
                record = action.record
                self.states.apply(node, record, node.kept.pop(record.hash) if record.applied else frozenset())
            case p.Load():
                node.state = node.fetched.pop(action.lineage)
            case p.Offer():
                if node.state[0] != action.lineage:
                    raise self.fail(f"replica {node.replica} offers a state it does not hold")
                node.offers[action.lineage] = node.state
                if len(node.offers) > self.rules.snapshots:
                    raise self.fail(f"replica {node.replica} keeps {len(node.offers)} snapshots")
            case p.Withdraw():
                node.offers.pop(action.lineage, None)
            case p.FetchState() | p.FetchReduced():
                self.calls.claim(node, action.lineage, lambda: self.states.fetch(node, action))
            case p.Reload():
                self.states.reload(node, action)
            case p.Wait():
                self.count["wait"] += 1
                self.at(self.random.uniform(0.5, 9.0), lambda: self.calls.wait(node, action))
            case p.WaitOver():
                self.store.wait_over(action.head, action.generation)
            case p.Hold():
                self.count["hold"] += 1
                self.answer(node, p.HoldEnded(), 0.2, 0.5)
            case p.Restart():
                self.trouble.crash(node)
            case p.Refuse() | p.Differ():
                raise self.fail(f"replica {node.replica} refuses the run: {action}")
            case p.Rest():
                self.answer(node, p.Rested(), 0.5, 9.0)

    def start_work(self, node: Node, action: p.Work) -> None:
        wanted = (action.base, action.position)
        if node.state[0] != action.base:
            raise self.fail(f"replica {node.replica} works on a state it does not hold")
        node.work, node.gradients = wanted, False
        if self.orders:
            self.orders.works(node, action)
        self.worked[(node.life, node.incarnation, (node.replica, action.position))] += 1

        def finish() -> None:
            if node.paused_until > self.now:
                self.at(node.paused_until - self.now, finish)
            elif node.alive and node.work == wanted:
                node.gradients = True
                waiting, node.waiting = node.waiting, []
                for key in waiting:
                    self.exchange.give(node, key, frozenset({(node.replica, action.position)}))

        self.at(self.random.uniform(0.2, 1.2), finish)


def main(arguments: list[str] | None = None) -> None:
    """`--seed N [--count M]`: run one seed, or M seeds from N on, and print what happened."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--group-world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--orders", action="store_true")
    parser.add_argument("--compacts", type=int, default=0)
    parser.add_argument("--skips", type=float, default=0.0)
    o = parser.parse_args(arguments)
    faults = tuple(f for f in o.faults.split(",") if f)
    for seed in range(o.seed, o.seed + o.count):
        world = StepWorld(
            seed, o.replicas, o.group_world_size, o.steps, faults, orders=o.orders, compacts=o.compacts, skips=o.skips
        )
        print(world.run())


if __name__ == "__main__":
    main()
