"""The start of many ranks, emulated: each is a thread of this process that does what a rank does until its first exchange.

In: how many replicas of one rank. Out: the time to the first quorum and to the exchange's rendezvous, and what that asks of the
run's store. The store, the server's launcher, claims, settings, the manifest of the state, the log, the step machine, quorums
over the store and the rendezvous are those of a job (`environment.joined`, `leading.Leading`); there is no model and nothing is
exchanged. Requests are counted by each rank. A rank that waits looks again and again, so the number of requests depends on the
machine; the number of different things that it asks for (a call and its key) does not. Those that a quorum over the store asks
for are counted apart: two members look at all others (`protocol.store_quorum`), and replicas that start in the same moment try
the places of the list of members one after another.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.rendezvous import all_connected, meet
from helixrt.errors import Retryable
from helixrt.job.agreements import LayoutAgreement, agree_on_plan
from helixrt.job.claims import Claim, claim
from helixrt.job.config import JobConfig, MeshConfig
from helixrt.job.environment import SessionChoices, admitted, agree_on_settings
from helixrt.job.external_launcher import ExternalLauncher, Patience
from helixrt.job.genesis import GenesisDigest
from helixrt.job.leading import address_key, await_the_others
from helixrt.job.places import coordinates
from helixrt.job.starters import Place
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import Log, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.replica.contracts import RankSpec, RunStore, State
from helixrt.replica.evidence import Holders
from helixrt.replica.runlog import RunLog
from helixrt.replica.state_shards import digest
from helixrt.replica.store import TcpRunStore, host_store, split_address
from helixrt.replica.store_membership import StoreMembership
from helixrt.timeouts import derive

SECRET, RUN = "of the emulated ranks", "starting"
LIMIT_S, BEAT_S = 240.0, 60.0  # threads of one process share an interpreter, so none is lost for being slow
ADDRESS_BYTES, POLL_S = 200, 0.05
QUORUM = ("quorum/", "ended/")  # keys of the membership (`protocol.store_quorum`)


@dataclass(frozen=True)
class Start:
    """Of so many `ranks`, which began at one moment. `asked`: different things that all ranks asked the store for, and the most
    that one did, but for the quorum's, `quorum_asked`; `requests`: all that they sent; `by_server`: the server's requests."""

    ranks: int
    first_quorum_s: float
    connected_s: float
    members: int  # of the first quorum of the last rank
    asked: int
    asked_most: int
    quorum_asked: int
    requests: int
    by_server: int


class CountedRunStore(RunStore):
    """Counts what one rank asks `inner` for."""

    def __init__(self, inner: RunStore) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.requests, self.asked = 0, set[tuple[str, str]]()

    def _count(self, call: str, key: str) -> None:
        with self._lock:
            self.requests += 1
            self.asked.add((call, key))

    def things(self, of_quorum: bool) -> int:
        """How many different things the rank asked for to form a quorum, or for all else."""
        return sum(key.startswith(QUORUM) == of_quorum for _, key in self.asked)

    def put_if_absent(self, key: str, value: str) -> str:
        self._count("put_if_absent", key)
        return self._inner.put_if_absent(key, value)

    def set(self, key: str, value: str) -> None:
        self._count("set", key)
        self._inner.set(key, value)

    def get(self, key: str) -> str | None:
        self._count("get", key)
        return self._inner.get(key)

    def wait(self, key: str, timeout_s: float) -> str:
        self._count("wait", key)
        return self._inner.wait(key, timeout_s)

    def delete(self, key: str) -> None:
        self._count("delete", key)
        self._inner.delete(key)


class CountedClient:
    """A client of a c10d store that counts the keys that it asks for with those of the same rank."""

    def __init__(self, client: dist.Store, counts: CountedRunStore) -> None:
        self._client, self._counts = client, counts

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def counted(*arguments: Any) -> Any:
            for key in arguments[0] if isinstance(arguments[0], list) else [arguments[0]]:
                self._counts._count(name, key)
            return call(*arguments)

        return counted


@dataclass
class _Rank:
    """One emulated rank; its thread writes the last three fields."""

    replica: int
    store: CountedRunStore
    quorum_s: float = 0.0  # since the start
    connected_s: float = 0.0
    members: tuple[int, ...] = ()


def start(ranks: int) -> Start:
    """Start so many ranks at one moment. Raises what a rank raises first."""
    server, address = host_store()
    failed, over = list[BaseException](), threading.Event()
    counted = CountedRunStore(TcpRunStore(address))
    RunLog(counted).restore(Log([genesis(RUN, ranks)]))
    every = [_Rank(replica, CountedRunStore(TcpRunStore(address))) for replica in range(ranks)]
    together = threading.Barrier(ranks + 2)
    begun_s = time.time()

    def guarded(run: Callable[[], None]) -> Callable[[], None]:
        def one() -> None:
            try:
                together.wait(LIMIT_S)
                run()
            except BaseException as error:
                failed.append(error)

        return one

    with tempfile.TemporaryDirectory() as folder:
        specs = _specs(ranks, address, folder, begun_s)
        launcher = ExternalLauncher(counted, MeshConfig(ranks, 1), Patience(LIMIT_S, LIMIT_S, 0.0))
        serving = threading.Thread(target=guarded(partial(_serve, launcher, specs, over)), name="server")
        threads = [threading.Thread(target=guarded(partial(_begin, each, ranks, address))) for each in every]
        for thread in (serving, *threads):
            thread.start()
        together.wait(LIMIT_S)
        begin_s = time.monotonic()
        for thread in threads:
            thread.join()
        over.set()
        serving.join()
    del server
    if failed:
        raise failed[0]
    return Start(
        ranks,
        max(each.quorum_s for each in every) - begin_s,
        max(each.connected_s for each in every) - begin_s,
        min(len(each.members) for each in every),
        sum(each.store.things(False) for each in every),
        max(each.store.things(False) for each in every),
        sum(each.store.things(True) for each in every),
        sum(each.store.requests for each in every),
        counted.requests,
    )


def _specs(ranks: int, address: str, folder: str, epoch_s: float) -> list[RankSpec]:
    mesh = MeshConfig(ranks, 1)
    config = JobConfig(mesh=mesh).to_plain()
    return [
        RankSpec(RUN, at, 0, address, "", folder, "", epoch_s, config)
        for replica in range(ranks)
        for at in coordinates(mesh, replica)
    ]


def _serve(launcher: ExternalLauncher, specs: list[RankSpec], over: threading.Event) -> None:
    """As the server does: start all, answer those that claim."""
    for spec in specs:
        launcher.start(spec)
    while not over.wait(POLL_S):
        launcher.poll()


def _begin(me: _Rank, ranks: int, address: str) -> None:
    """What a process that joins a run does, in its order."""
    store, place = me.store, Place(address, me.replica, SECRET)
    incarnation = claim(Claim(store, place, f"emulated:{me.replica}"), place, LIMIT_S)
    spec = admitted(store, place, incarnation)
    agree_on_settings(store, SessionChoices())
    agree_on_plan(store, 1_000, 1)
    state = State({f"parameter/layer{layer}.weight": torch.zeros(4) for layer in range(8)}, {"scheduler/step": 0})
    engine: Any = SimpleNamespace(state=lambda: state, registered=SimpleNamespace(optimizers={}))
    LayoutAgreement(store, 0, engine).initial()
    life, timeouts = f"{me.replica}/{incarnation}", derive(LIMIT_S, BEAT_S)
    store.put_if_absent(address_key(life, 0), f"http://10.0.0.{me.replica}:1")
    digested = GenesisDigest(store, life, 0, 1, digest(state).state, timeouts.start_s)
    log = RunLog(store).read()
    Holders(store, me.replica, incarnation).end_predecessors()
    machine = StepMachine(me.replica, incarnation, 1, log, log.genesis if digested.holds() else "", 1_000)
    membership = StoreMembership(me.replica, incarnation, store, timeouts, spec.run_epoch_s)
    try:
        membership.announce()
        await_the_others(store, me.replica, ranks, timeouts.start_s)
        exchange = _first_exchange(me, machine, membership, digested)
        me.quorum_s, me.members = time.monotonic(), exchange.members
        host, port = split_address(address)
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        met: Any = CountedClient(dist.PrefixStore(f"exchange/{exchange.generation}", client), store)
        number = exchange.members.index(me.replica)
        size, limit = len(exchange.members), Deadline(LIMIT_S)
        meet(met, number, size, b"x" * ADDRESS_BYTES, exchange.generation, limit, lambda: False)
        all_connected(met, number, size, limit, lambda: False)
        me.connected_s = time.monotonic()
    finally:
        membership.close()


def _first_exchange(me: _Rank, machine: StepMachine, membership: StoreMembership, digested: GenesisDigest) -> p.Exchange:
    """Join until the machine has a quorum with which to exchange."""
    log, holders = RunLog(me.store), Holders(me.store, me.replica, machine.incarnation)
    actions = machine.on(p.Begin())
    while True:
        exchange = next((action for action in actions if isinstance(action, p.Exchange)), None)
        if exchange is not None:
            return exchange
        account = next(action.me for action in actions if isinstance(action, p.Join))
        account = dataclasses.replace(account, addresses=("http://emulated:1",), initial=digested.mine)
        holders.check_fence()
        event: p.Event = p.JoinFailed("no quorum yet")
        with suppress(Retryable):
            formed = membership.join(account, LIMIT_S)
            entries = tuple(log.read_from(len(machine.log)))
            instead = digested.agree(formed.members, account, machine.log.genesis, print)
            event = instead or p.Formed(formed.generation, formed.members, entries, log.begin)
        actions = machine.on(event)
