"""A replica's whole life over in-memory worlds and the plain engine: threads instead of processes.

Leader, rank worker, step machine, run log and engine are the real ones; membership, exchange and
state transport are the smallest things that keep their contracts. Two runs with the same losses must
end bitwise equal to plain training on the same batches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from helixrt.errors import Retryable
from helixrt.protocol.step.lineage import Log, audit, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member
from helixrt.record import FlightRecord, Kind
from helixrt.replica.commands import Exit, RankCommand, RankReport, decode, encode
from helixrt.replica.contracts import FetchReport, Formed, Membership, Shard, layout_of
from helixrt.replica.evidence import Holders
from helixrt.replica.leader import Leader, LeaderHooks
from helixrt.replica.rank import Done, Hooks, RankParts, RankWorker
from helixrt.replica.runlog import RunLog
from helixrt.replica.state_digest import digest
from helixrt.replica.store import MemoryRunStore
from helixrt.timeouts import derive
from tests.replica.stand_ins import Alone, Gated

REPLICAS, STEPS = 2, 12


class Gone(BaseException):
    """Raised in a replica's threads to stand for SIGKILL."""


@dataclass
class Fabric:
    """What connects replicas: a lighthouse, all-reduce by meeting, offers by address."""

    lock: threading.Condition = field(default_factory=threading.Condition)
    alive: set[int] = field(default_factory=set)
    joined: dict[int, Member] = field(default_factory=dict)
    formed: dict[tuple[int, int], Formed] = field(default_factory=dict)  # by (replica, incarnation)
    generation: int = 0
    meetings: dict[tuple[int, int], dict[int, torch.Tensor]] = field(default_factory=dict)
    offers: dict[str, dict[str, Mapping[str, torch.Tensor]]] = field(default_factory=dict)  # by address and name

    def lose(self, replica: int) -> None:
        with self.lock:
            self.alive.discard(replica)
            self.joined.pop(replica, None)
            self.offers.pop(f"mem-{replica}", None)
            self._form()
            self.lock.notify_all()

    def _form(self) -> None:
        if self.joined and set(self.joined) == self.alive:
            self.generation += 1
            formed = Formed(self.generation, tuple(self.joined[r] for r in sorted(self.joined)))
            for member in formed.members:
                self.formed[(member.replica, member.incarnation)] = formed
            self.joined = {}


class MemoryMembership(Membership):
    def __init__(self, fabric: Fabric, replica: int) -> None:
        self.fabric, self.replica, self.closed = fabric, replica, False

    def announce(self) -> None:
        with self.fabric.lock:
            self.fabric.alive.add(self.replica)

    def join(self, me: Member, timeout_s: float) -> Formed:
        life = (me.replica, me.incarnation)
        with self.fabric.lock:
            self.fabric.formed.pop(life, None)
            self.fabric.joined[me.replica] = me
            self.fabric._form()
            self.fabric.lock.notify_all()
            self.fabric.lock.wait_for(lambda: self.closed or life in self.fabric.formed, timeout_s)
            if life not in self.fabric.formed:
                raise Retryable("no quorum")
            return self.fabric.formed.pop(life)

    def close(self) -> None:
        self.closed = True
        self.fabric.lose(self.replica)


class MemoryExchange(Alone):
    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.members, self.aborted = fabric, (), False

    def configure(self, generation: int, members: Sequence[int], me: int, rendezvous: str) -> None:
        self.generation, self.members, self.me, self.calls, self.aborted = generation, tuple(members), me, 0, False

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> None:
        key = (self.generation, self.calls)
        self.calls += 1
        with self.fabric.lock:
            meeting = self.fabric.meetings.setdefault(key, {})
            meeting[self.me] = source / divisor
            self.fabric.lock.notify_all()

            def settled() -> bool:
                return len(meeting) == len(self.members) or self.aborted or not set(self.members) <= self.fabric.alive

            if not self.fabric.lock.wait_for(settled, 20) or len(meeting) < len(self.members):
                raise Retryable("a member is gone")
            torch.sum(torch.stack([meeting[m] for m in self.members]), 0, out=out)

    def abort(self, generation: int = -1) -> None:
        with self.fabric.lock:
            self.aborted = True
            self.fabric.lock.notify_all()


class MemoryTransport(Gated):
    def __init__(self, fabric: Fabric, replica: int) -> None:
        super().__init__()
        self.fabric, self._address = fabric, f"mem-{replica}"
        fabric.offers[self._address] = self.offered

    @property
    def address(self) -> str:
        return self._address

    def found(self, name: str, donors: Sequence[str]) -> tuple[str, Mapping[str, torch.Tensor]]:
        for donor in donors:
            if (offer := self.fabric.offers.get(donor, {}).get(name)) is not None:
                return donor, offer
        raise Retryable("nobody offers it")

    def layout(self, name: str, donors: Sequence[str], wait_s: float) -> tuple[Shard, ...]:
        return layout_of(self.found(name, donors)[1])

    def fetch(  # type: ignore[override]
        self, name: str, layout: Sequence[Shard], donors: Sequence[str], stall_s: float, on_shard: object = None
    ) -> tuple[dict[str, torch.Tensor], FetchReport]:
        donor, offer = self.found(name, donors)
        return {s.name: offer[s.name].clone() for s in layout}, FetchReport(sum(s.nbytes for s in layout), {donor: 1})


class Replica:
    """One replica with one rank, in threads of this process."""

    def __init__(self, world: World, replica: int, incarnation: int, die_at: tuple[Kind, int] | None) -> None:
        self.world, self.replica, self.die_at = world, replica, die_at
        self.record = FlightRecord(f"r{replica}")
        self.record.attach(self._maybe_die)
        self.dead = False
        self.done: list[Done] = []
        self.worked: list[int] = []
        self.error: BaseException | None = None
        timeouts = derive(20)
        self.engine = world.engine(replica, self.worked)
        self.worker = RankWorker(
            RankParts(
                replica,
                0,
                self.engine,
                MemoryExchange(world.fabric),
                MemoryTransport(world.fabric, replica),
                self.record,
                timeouts,
                "memory",
                self._report,
                Hooks(updated=self.done.append),
            )
        )
        log = RunLog(world.store)
        entries = log.read_from(0)
        held = world.root.hash if len(entries) == 1 else ""
        machine = StepMachine(replica, incarnation, 1, Log(entries), held, STEPS)
        holders = Holders(world.store, replica, incarnation)
        holders.end_predecessors()
        self.membership = MemoryMembership(world.fabric, replica)
        hooks = LeaderHooks(lambda i, r: None, lambda c: None, self._resting, self.worker.fail)
        self.leader = Leader(
            machine, self.membership, log, holders, (f"mem-{replica}",), self._tell, self.record, timeouts, hooks
        )
        self.thread = threading.Thread(target=self._run, name=f"replica-{replica}")

    def start(self) -> None:
        self.membership.announce()
        self.leader.start()
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except Gone:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.membership.close()
            self.leader.close()

    def _tell(self, command: RankCommand) -> None:
        assert decode(encode(command)) == command  # every command must survive the way to another rank
        self.worker.dispatch(command)

    def _report(self, report: RankReport) -> None:
        if not self.dead:
            self.leader.report(0, decode(encode(report)))

    def _resting(self, machine: StepMachine) -> bool:
        with self.world.fabric.lock:
            if machine.settled:
                self.world.settled.add(self.replica)
            leave = len(self.world.settled) == REPLICAS
        if leave:
            self._tell(Exit())
        return leave

    def _maybe_die(self, event: object) -> None:
        if self.die_at == (event.kind, event.step):  # type: ignore[attr-defined]
            self.die_at, self.dead = None, True
            self.world.fabric.lose(self.replica)
            self.worker.fail(Gone())
            raise Gone


class World:
    def __init__(self, plain_engine: Callable[..., object]) -> None:
        self.fabric, self.store, self.root = Fabric(), MemoryRunStore(), genesis("test", REPLICAS)
        RunLog(self.store).append(0, self.root)
        self.settled: set[int] = set()
        self._engine = plain_engine

    def batch(self, replica: int, position: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * replica + position)
        return torch.randint(0, 16, (4, 9), generator=generator)

    def engine(self, replica: int, worked: list[int]) -> object:
        def batch_at(position: int) -> torch.Tensor:
            worked.append(position)
            return self.batch(replica, position)

        return self._engine(batch_at, vocab=16, seed=0)

    def plain_training(self) -> object:
        """The lineage's batches, trained without any of helixrt."""
        chain = Log(RunLog(self.store).read_from(0)).chain()
        engine = self._engine(lambda position: torch.empty(0), vocab=16, seed=0)
        for before, record in zip(chain, chain[1:], strict=False):
            gradients = []
            for replica in record.replicas:
                engine.batch_at = lambda position, r=replica: self.batch(r, position)
                engine.run(before.positions[replica], lambda i: None)
                gradients.append(engine.buckets[0].clone())
            engine.apply(record, [torch.stack(gradients).sum(0)])
        return engine


def train(world: World, die_at: tuple[Kind, int] | None = None) -> tuple[list[Replica], list[Replica]]:
    """Two replicas to the end; replica 1 dies at the given event and is started again. Returns (living, dead)."""
    torch.set_num_threads(1)
    living = [Replica(world, 0, 0, None), Replica(world, 1, 0, die_at)]
    for replica in living:
        replica.membership.announce()
    for replica in living:
        replica.start()
    dead: list[Replica] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(r.thread.is_alive() for r in living):
        if living[1].dead and not living[1].thread.is_alive():
            dead.append(living[1])
            living[1] = Replica(world, 1, 1, None)
            living[1].start()
        time.sleep(0.01)
    for replica in living:
        replica.thread.join(timeout=60)
        if replica.error is not None:
            raise replica.error
        assert not replica.thread.is_alive(), f"replica {replica.replica} is {replica.leader.machine.phase}"
    return living, dead


MOMENTS = [None, Kind.QUORUM_JOIN, Kind.WORK_BEGIN, Kind.WORK_END, Kind.EXCHANGE_BUCKET, Kind.VOTE, Kind.COMMIT]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: m.value if m else "none")
def test_whatever_dies_both_end_equal_to_plain_training(plain_engine: Callable[..., object], moment: Kind | None) -> None:
    world = World(plain_engine)
    living, dead = train(world, (moment, 5) if moment else None)
    assert len(dead) == (1 if moment else 0)
    log = Log(RunLog(world.store).read_from(0))
    assert log.head.step == STEPS
    assert audit(log.chain()).clean
    digests = {digest(r.engine.state()) for r in living}
    assert digests == {digest(world.plain_training().state())}
    survivor = living[0].worked
    assert sorted(set(survivor)) == sorted(survivor), f"the survivor did batches twice: {survivor}"
