"""The start of many ranks, emulated: each is a fork of one process that does what a rank does until its first exchange.

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
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.rendezvous import all_connected, meet
from helixrt.errors import Fatal, Retryable
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
from helixrt.replica.orphan import PARENT_VARIABLE, die_with_parent
from helixrt.replica.runlog import RunLog
from helixrt.replica.state_digest import digest
from helixrt.replica.store import TcpRunStore, host_store, split_address
from helixrt.replica.store_membership import StoreMembership
from helixrt.timeouts import derive

SECRET, RUN = "of the emulated ranks", "starting"
LIMIT_S, BEAT_S = 240.0, 60.0  # many processes share few cores, so none is lost for being slow
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


def start(ranks: int) -> Start:
    """Start so many ranks at one moment, as forks of a process of their own. Raises Fatal with what a rank raised first."""
    command = [sys.executable, "-m", "helixrt.replica.orphan", "helixrt.bench._starting_ranks", str(ranks)]
    # For each connection to its store torch looks up the other end's name: with many at a time, some wait for a name server.
    names = {"RES_OPTIONS": "timeout:1 attempts:1"}
    environment = {**names, **os.environ, PARENT_VARIABLE: str(os.getpid()), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * LIMIT_S)
    if done.returncode != 0:
        raise Fatal(f"{ranks} ranks did not start: {(done.stderr.strip() or str(done.returncode)).splitlines()[-1]}")
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str]) -> None:
    """Of the process whose forks the ranks are: print the `Start` of so many as JSON."""
    ranks = int(arguments[0])
    torch.set_num_threads(1)
    told, tell = os.pipe()
    orders = [_forked(replica, ranks, told, tell) for replica in range(ranks)]  # before this process has threads
    os.close(tell)
    server, address = host_store()
    counted = CountedRunStore(TcpRunStore(address))
    RunLog(counted).restore(Log([genesis(RUN, ranks)]))
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(told, encoding="utf-8") as results:
        launcher = ExternalLauncher(counted, MeshConfig(ranks, 1), Patience(LIMIT_S, LIMIT_S, 0.0))
        specs = _specs(ranks, address, folder, time.time())
        serving = threading.Thread(target=_serve, args=(launcher, specs, over), name="server", daemon=True)
        serving.start()
        begin_s = time.monotonic()
        for order in orders:
            os.write(order, address.encode())
            os.close(order)
        found = [json.loads(line) for line in results]  # until the last rank has ended
        over.set()
        serving.join(LIMIT_S)
    del server
    if failed := [each["failed"] for each in found if "failed" in each]:
        raise Fatal(failed[0])
    assert len(found) == ranks, f"{ranks - len(found)} ranks ended without a word"
    print(json.dumps(asdict(_united(found, begin_s, counted.requests))))


def _united(found: Sequence[Mapping[str, Any]], begin_s: float, by_server: int) -> Start:
    return Start(
        len(found),
        max(each["quorum_s"] for each in found) - begin_s,
        max(each["connected_s"] for each in found) - begin_s,
        min(each["members"] for each in found),
        sum(each["asked"] for each in found),
        max(each["asked"] for each in found),
        sum(each["quorum_asked"] for each in found),
        sum(each["requests"] for each in found),
        by_server,
    )


def _forked(replica: int, ranks: int, told: int, tell: int) -> int:
    """A fork that is this replica's rank, and begins when the address of the store is written to the descriptor returned."""
    reading, order = os.pipe()
    parent = os.getpid()
    if os.fork():
        os.close(reading)
        return order
    try:
        die_with_parent(parent)
        os.close(told)
        os.close(order)
        address = os.read(reading, 1000).decode()
        store = CountedRunStore(TcpRunStore(address, LIMIT_S, LIMIT_S))
        signal.alarm(int(LIMIT_S))  # ends it
        quorum_s, connected_s, members = _begin(replica, store, ranks, address)
        word: dict[str, Any] = {"quorum_s": quorum_s, "connected_s": connected_s, "members": members}
        word |= {"asked": store.things(False), "quorum_asked": store.things(True), "requests": store.requests}
    except BaseException as error:
        word = {"failed": f"rank of replica {replica}: {error!r}"[:1000]}
    os.write(tell, (json.dumps(word) + "\n").encode())  # at once: it is less than a pipe's buffer
    os._exit(0)


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


def _begin(replica: int, store: CountedRunStore, ranks: int, address: str) -> tuple[float, float, int]:
    """What a process that joins a run does, in its order: when it had its first quorum and was connected, and how many members
    the quorum had."""
    place = Place(address, replica, SECRET)
    incarnation = claim(Claim(store, place, f"emulated:{replica}"), place, LIMIT_S)
    spec = admitted(store, place, incarnation)
    agree_on_settings(store, SessionChoices())
    agree_on_plan(store, 1_000, 1)
    state = State({f"parameter/layer{layer}.weight": torch.zeros(4) for layer in range(8)}, {"scheduler/step": 0})
    engine: Any = SimpleNamespace(state=lambda: state, registered=SimpleNamespace(optimizers={}))
    LayoutAgreement(store, 0, engine).initial()
    life, timeouts = f"{replica}/{incarnation}", derive(LIMIT_S, BEAT_S)
    store.put_if_absent(address_key(life, 0), f"http://10.0.0.{replica}:1")
    digested = GenesisDigest(store, life, 0, 1, digest(state).state, timeouts.start_s)
    log = RunLog(store).read()
    Holders(store, replica, incarnation).end_predecessors()
    machine = StepMachine(replica, incarnation, 1, log, log.genesis if digested.holds() else "", 1_000)
    membership = StoreMembership(replica, incarnation, store, timeouts, spec.run_epoch_s)
    try:
        membership.announce()
        await_the_others(store, replica, ranks, timeouts.start_s)
        exchange = _first_exchange(store, machine, membership, digested)
        quorum_s = time.monotonic()
        host, port = split_address(address)
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        met: Any = CountedClient(dist.PrefixStore(f"exchange/{exchange.generation}", client), store)
        number = exchange.members.index(replica)
        size, limit = len(exchange.members), Deadline(LIMIT_S)
        meet(met, number, size, b"x" * ADDRESS_BYTES, exchange.generation, limit, lambda: False)
        all_connected(met, number, size, limit, lambda: False)
        return quorum_s, time.monotonic(), len(exchange.members)
    finally:
        membership.close()


def _first_exchange(
    store: CountedRunStore, machine: StepMachine, membership: StoreMembership, digested: GenesisDigest
) -> p.Exchange:
    """Join until the machine has a quorum with which to exchange."""
    log, holders = RunLog(store), Holders(store, machine.replica, machine.incarnation)
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


if __name__ == "__main__":
    main(sys.argv[1:])
