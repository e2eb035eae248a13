"""How a group's ranks find each other: one deadline for all of it, also where the store or a member goes silent."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixrt.collectives import gloo, group_lifecycle
from helixrt.collectives.deadline import Deadline
from helixrt.collectives.ftar import FtarExchange
from helixrt.collectives.rendezvous import StoreClients, StoreSilent, agreed_secret, all_connected, forget_addresses, meet
from helixrt.collectives.torchft_group import ProcessGroupHelix
from helixrt.collectives.work import GroupError
from helixrt.errors import Retryable
from helixrt.replica.store import host_store
from tests.collectives.exchange_conformance import make_exchange
from tests.collectives.queue_endpoint import Hub, QueueEndpoint
from tests.ranks_context import ranks_context
from tests.waiting import until

LIMIT_S, LATE_S, SLACK_S = 60.0, 0.3, 60.0


class Hears(QueueEndpoint):
    """Hears how long `connect` may take, and connects to nobody; it takes a while itself."""

    def __init__(self) -> None:
        super().__init__(Hub(), b"0")
        self.limits: list[float] = []

    def connect(
        self, generation: int, me: int, peers: Any, deadline_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.limits.append(deadline_s)
        time.sleep(LATE_S)


def comes_late(address: str, prefix: str, said: bytes) -> threading.Thread:
    """Rank 1 announces itself a while after rank 0 has: its deadline runs by then."""

    def announce() -> None:
        put: Any = dist.PrefixStore(prefix, client)
        put.wait(["address/0"])
        time.sleep(LATE_S)
        put.set("address/1", struct.pack("<q", 1) + said)

    host, _, port = address.rpartition(":")
    client = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    thread = threading.Thread(target=announce)
    thread.start()
    return thread


def test_to_connect_has_what_the_rendezvous_left_of_the_deadline(store_address: str) -> None:
    endpoint = Hears()
    exchange = FtarExchange(endpoint, LIMIT_S)
    late = comes_late(store_address, "late", b"1")
    exchange.configure(1, (0, 1), 0, f"{store_address}/late")
    late.join()
    assert len(endpoint.limits) == 1 and endpoint.limits[0] <= LIMIT_S - LATE_S
    exchange.close()


def test_gloo_connects_in_what_the_rendezvous_left_of_the_deadline(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def make(device: Any, store: Any, rank: int, size: int, timeout_s: float, name: str) -> Any:
        limits.append(timeout_s)

    monkeypatch.setattr(gloo, "make_group", make)
    monkeypatch.setattr(gloo, "_CONNECT_S", LIMIT_S)
    exchange = gloo.GlooExchange(LIMIT_S)
    late = comes_late(store_address, "late", b"127.0.0.1 1")
    exchange.configure(1, (0, 1), 0, f"{store_address}/late")
    late.join()
    assert len(limits) == 1 and limits[0] <= LIMIT_S - LATE_S
    exchange.close()


def test_a_process_group_has_one_deadline_for_all_its_steps(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, limits = Hears(), list[float]()
    monkeypatch.setenv("HELIXRT_SECRET", "which the other one has as well")

    def all_connected(store: Any, rank: int, size: int, deadline: Any, aborted: Any) -> None:
        limits.append(deadline.left_s if isinstance(deadline, Deadline) else deadline)

    group = ProcessGroupHelix(timedelta(seconds=LIMIT_S))
    monkeypatch.setattr(group, "_endpoint", lambda *_: endpoint)
    monkeypatch.setattr(group_lifecycle, "all_connected", all_connected)
    late = comes_late(store_address, "late", b"1")
    group.configure(f"{store_address}/late", "0", 0, 2)
    late.join()
    assert endpoint.limits[0] <= LIMIT_S - LATE_S and limits[0] <= endpoint.limits[0] - LATE_S
    group.shutdown()


# ---------------------------------------------------------------- a store that does not answer


def serve(pipe: Any) -> None:
    server, address = host_store()
    pipe.send(address)
    pipe.recv()
    del server


@pytest.fixture
def stopped_store() -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a store in another process, and how to stop that process; it lives and answers nothing."""
    context = ranks_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    assert ours.poll(60) and process.pid is not None
    pid = process.pid
    yield ours.recv(), lambda: os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.join()


def ends(call: Callable[[], Any]) -> BaseException | None:
    """What it raised; fails if it goes on."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SLACK_S)
    assert raised, f"it goes on after {SLACK_S} s"
    return raised[0]


@pytest.mark.system
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
@pytest.mark.parametrize("known", [True, False])
def test_a_store_that_is_stopped_ends_configure_at_its_deadline(
    stopped_store: tuple[str, Callable[[], None]], kind: str, known: bool
) -> None:
    """Whether this rank has a connection to it or makes one; and again, which must not wait for the first attempt."""
    address, stop = stopped_store
    exchange = make_exchange(kind, 0.5)
    if known:
        assert isinstance(ends(lambda: exchange.configure(1, (0, 1), 0, f"{address}/1")), Retryable)  # no other member connects
    stop()
    for generation in (2, 3):
        error = ends(lambda g=generation: exchange.configure(g, (0, 1), 0, f"{address}/{g}"))  # type: ignore[misc]
        assert isinstance(error, Retryable) and f"generation {generation} failed" in str(error)
    exchange.close()


@pytest.mark.system
def test_an_abort_ends_the_wait_for_a_store_that_is_stopped(stopped_store: tuple[str, Callable[[], None]]) -> None:
    address, stop = stopped_store
    store = StoreClients().at(address + "/1", LIMIT_S)
    stop()
    asking = "helixrt-rendezvous"  # the thread that asks the store, which it is to begin
    error = ends(lambda: meet(store, 0, 2, b"", 1, Deadline(1000.0), lambda: threading.current_thread().name != asking))
    assert isinstance(error, StoreSilent) and error.cause.what == "aborted"


@pytest.mark.system
def test_a_process_group_does_not_wait_for_a_stopped_store_beyond_its_timeout(
    stopped_store: tuple[str, Callable[[], None]],
) -> None:
    address, stop = stopped_store
    group = ProcessGroupHelix(timedelta(seconds=0.5))
    stop()
    error = ends(lambda: group.configure(f"{address}/1", "0", 0, 2))
    assert isinstance(error, GroupError)
    group.shutdown()


# ---------------------------------------------------------------- a name service that does not answer

MEET = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
from helixrt.collectives.ftar import FtarExchange
from helixrt.replica.store import TcpRunStore
from tests.collectives.queue_endpoint import Hub
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server, address, first = sys.argv[1:]
silent.bind((server, 53))
if first == "run":
    TcpRunStore(address).set("a", "b")
hub = Hub()
exchanges = [FtarExchange(hub.endpoint(), 60.0) for _ in range(2)]
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda rank: exchanges[rank].configure(1, (0, 1), rank, address + "/1"), range(2)))
silent.settimeout(0.0)
assert silent.recv(1000), "nobody asked the name service: this test shows nothing"
print("connected")
"""


@pytest.mark.netns  # root, and a mount namespace
@pytest.mark.parametrize("first", ["run", "exchange"])
def test_members_connect_though_the_name_service_does_not_answer(
    store_address: str, tmp_path: Path, first: str
) -> None:
    """torch asks it for the host name of the store's address, and does not need the answer. `first`: who connects first, the
    run's store or the exchange."""
    server = f"127.53.{os.getpid() >> 8 & 255}.{1 + os.getpid() % 250}"  # for this process alone
    (tmp_path / "resolv.conf").write_text(f"nameserver {server}\n")
    mounted = f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec \"$@\""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", MEET, server, store_address, first],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "RES_OPTIONS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "connected\n", done.stderr


# ---------------------------------------------------------------- many ranks


class Asked:
    """A client of a store that notes the keys that it is asked for, and what it puts there."""

    def __init__(self, store: dist.Store, put: list[bytes] | None = None) -> None:
        self.store, self.keys, self.put = store, set[str](), [] if put is None else put

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)

        def noted(keys: Any, *arguments: Any) -> Any:
            self.keys |= set(keys) if isinstance(keys, list) else {keys}
            self.put += arguments
            return call(keys, *arguments)

        return noted


def test_of_many_ranks_one_alone_looks_at_all_the_others(store_address: str) -> None:
    """So a look costs the store as much as there are ranks, and not the square; and all have found the same."""
    size, met = 12, dict[int, Any]()
    clients = [Asked(StoreClients().at(f"{store_address}/many", LIMIT_S)) for _ in range(size)]

    def one(rank: int) -> None:
        deadline, asked = Deadline(LIMIT_S), clients[rank]
        met[rank] = meet(asked, rank, size, bytes([rank]) * rank, 7 + rank, deadline, lambda: False)  # type: ignore[arg-type]
        all_connected(asked, rank, size, deadline, lambda: False)  # type: ignore[arg-type]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for rank in range(size):
        assert met[rank].generation == 7 + size - 1
        assert met[rank].peers == {other: bytes([other]) * other for other in range(size) if other != rank}
    for rank in range(1, size):
        assert clients[rank].keys == {f"address/{rank}", "addresses", f"connected/{rank}", "all-connected"}


def test_the_secret_that_ranks_agree_on_is_not_what_the_store_holds(store_address: str) -> None:
    size, put = 4, list[bytes]()
    stores = [StoreClients().at(f"{store_address}/secret", LIMIT_S) for _ in range(size)]

    def one(rank: int) -> str:
        asked = Asked(stores[rank], put)
        return agreed_secret(asked, rank, size, Deadline(LIMIT_S), lambda: False)  # type: ignore[arg-type]

    agreed = set[str]()
    for _ in range(2):
        with ThreadPoolExecutor(size) as pool:
            told = set(pool.map(one, range(size)))
        assert len(told) == 1
        agreed |= told
        forget_addresses(stores[0], 0)
        assert not stores[0].check(["secrets"])
    assert len(agreed) == 2 and len(put) == 2 * (size + 1), "one of each rank, and what rank 0 makes of them"
    for secret in agreed:
        assert all(bytes.fromhex(secret) not in value and secret.encode() not in value for value in put)
    assert agreed_secret(stores[0], 0, 1, Deadline(LIMIT_S), lambda: False) not in agreed


def test_what_a_group_leaves_in_the_store_does_not_grow_with_its_ranks(store_address: str) -> None:
    def come(prefix: str, rank: int, ranks: int) -> None:
        store = StoreClients().at(f"{store_address}/{prefix}", LIMIT_S)
        meeting = meet(store, rank, ranks, b"address", 1, Deadline(LIMIT_S), lambda: False)
        assert sorted(meeting.peers) == [r for r in range(ranks) if r != rank]
        all_connected(store, rank, ranks, Deadline(LIMIT_S), lambda: False)

    server = StoreClients().at(f"{store_address}/count", LIMIT_S)
    left = []
    for ranks in (2, 9):
        before = server.num_keys()
        with ThreadPoolExecutor(ranks) as pool:
            for done in [pool.submit(come, f"of {ranks}", rank, ranks) for rank in range(ranks)]:
                done.result(LIMIT_S)
        left.append(server.num_keys() - before)
    assert left == [1, 1]


def test_who_is_missing_is_found_by_every_rank(store_address: str) -> None:
    store = StoreClients().at(f"{store_address}/few", LIMIT_S)
    with pytest.raises(Retryable, match=r"members number \[0, 3, 4\] of 6 did not come"):
        threads = [threading.Thread(target=announce, args=(store_address, rank)) for rank in (1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        meet(store, 2, 6, b"", 1, Deadline(2.0), lambda: False)  # in which the store must answer


def announce(address: str, rank: int) -> None:
    put: Any = StoreClients().at(f"{address}/few", LIMIT_S)
    put.set(f"address/{rank}", struct.pack("<q", 1))


def test_groups_that_are_formed_again_and_again_leave_next_to_nothing_in_the_store(store_address: str) -> None:
    """A run of months forms many."""
    hub, sizes = Hub(), []
    exchanges = [FtarExchange(hub.endpoint(), LIMIT_S) for _ in range(3)]
    host, _, port = store_address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    with ThreadPoolExecutor(3) as pool:
        for generation in range(1, 8):
            at = f"{store_address}/exchange/{generation}"
            for each in [pool.submit(e.configure, generation, (0, 1, 2), me, at) for me, e in enumerate(exchanges)]:
                each.result(LIMIT_S)
            sizes.append(store.num_keys())
    assert len(set(sizes)) == 1, sizes
    for exchange in exchanges:
        exchange.close()


@pytest.mark.parametrize("missing", [0, 2])
def test_what_generations_that_did_not_connect_have_left_in_the_store_is_deleted(
    store_address: str, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a later one has connected. In every second one a member is missing, and the others are aborted; in the rest all have
    met, and do not connect."""
    hub = Hub()
    exchanges = [FtarExchange(hub.endpoint(), LIMIT_S) for _ in range(3)]
    host, _, port = store_address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    connect = QueueEndpoint.connect

    def breaks(self: Any, generation: int, *arguments: Any) -> None:
        if 1 < generation < 52:
            raise Retryable("it does not connect")
        connect(self, generation, *arguments)

    monkeypatch.setattr(QueueEndpoint, "connect", breaks)
    with ThreadPoolExecutor(3) as pool:

        def begin(generation: int, members: list[int]) -> list[Any]:
            at = f"{store_address}/exchange/{generation}"
            return [pool.submit(exchanges[me].configure, generation, (0, 1, 2), me, at) for me in members]

        def all_connect(generation: int) -> None:
            for each in begin(generation, [0, 1, 2]):
                each.result(LIMIT_S)

        all_connect(1)
        before = store.num_keys()
        for generation in range(2, 52):
            some = generation % 2 == 0
            members = [me for me in range(3) if not (some and me == missing)]
            calls = begin(generation, members)
            if some:
                store.wait([f"exchange/{generation}/address/{me}" for me in members])
                for me in members:
                    exchanges[me].abort(generation)
            for call in calls:
                with pytest.raises(Retryable):
                    call.result(LIMIT_S)
        assert store.num_keys() >= before + 50
        all_connect(52)
    until(lambda: store.num_keys() <= before)
    for exchange in exchanges:
        exchange.close()


@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_an_abort_that_comes_before_configure_ends_it(store_address: str, kind: str) -> None:
    exchange = make_exchange(kind, 10 * LIMIT_S)
    exchange.abort(5)
    for generation in (4, 5):  # no other member connects
        error = ends(lambda g=generation: exchange.configure(g, (0, 1), 0, f"{store_address}/{g}"))  # type: ignore[misc]
        assert isinstance(error, Retryable) and "was aborted" in str(error)
    exchange.configure(6, (0,), 0, f"{store_address}/6")
    exchange.all_reduce(torch.ones(3), out := torch.zeros(3))
    assert out.tolist() == [1.0] * 3
    exchange.close()
