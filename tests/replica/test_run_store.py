"""One contract, every store: over TCP, in memory, and with a journal."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from helixrt.collectives.rendezvous import STORE_CONNECT_S
from helixrt.errors import ConfigError, Retryable
from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.replica.contracts import RunStore
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import MemoryRunStore, TcpRunStore, host_store, split_address
from tests.replica.served_store import Served

Clients = Callable[[], RunStore]


@contextmanager
def nobody_at(address: str) -> Iterator[None]:
    """A connection there is refused meanwhile: the port that a store has left is not given to another process."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(split_address(address))
        yield


@pytest.fixture(params=["tcp", "memory", "durable"])
def clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """A function that gives another client of one and the same store."""
    if request.param == "memory":
        store = MemoryRunStore()
        yield lambda: store
    elif request.param == "durable":
        with Served(request.getfixturevalue("tmp_path")) as served:
            yield served.client
    else:
        server, address = host_store()
        yield lambda: TcpRunStore(address)
        del server


def test_the_first_value_stays(clients: Clients) -> None:
    one, other = clients(), clients()
    assert one.get("k") is None
    assert one.put_if_absent("k", "first") == "first"
    assert other.put_if_absent("k", "second") == "first"
    assert other.get("k") == one.get("k") == "first"
    other.delete("k")
    other.delete("k")
    assert one.get("k") is None
    assert one.put_if_absent("k", "third ü {}") == "third ü {}"
    assert other.get("k") == "third ü {}"


def test_the_newest_value_that_was_set_stays(clients: Clients) -> None:
    writer, reader = clients(), clients()
    for value in ("one", "two ü", "three"):
        writer.set("k", value)
        assert writer.get("k") == value
    assert reader.wait("k", 10) == reader.get("k") == "three"
    assert reader.put_if_absent("k", "four") == "three", "a key that was set is there"
    writer.delete("k")
    assert writer.get("k") is None
    with pytest.raises(ValueError, match="empty"):
        writer.set("k", "")


def test_one_winner_of_many(clients: Clients) -> None:
    stores = [clients() for _ in range(4)]
    start = threading.Barrier(8)
    got: list[tuple[str, ...]] = []

    def race(number: int) -> None:
        start.wait(60)
        got.append(tuple(stores[number % 4].put_if_absent(f"k{i}", str(number)) for i in range(50)))

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 8 and len(set(got)) == 1


def test_a_wait_sees_a_later_value_and_holds_up_no_other_thread(clients: Clients) -> None:
    store = clients()
    got: list[str] = []
    waiter = threading.Thread(target=lambda: got.append(store.wait("later", 60)))
    waiter.start()
    assert store.get("later") is None  # from this thread, while the other one waits
    store.put_if_absent("later", "now")
    waiter.join(60)
    assert got == ["now"]
    assert store.wait("later", 0) == "now"


def test_a_look_of_others_does_not_end_a_wait(clients: Clients) -> None:
    store, other = clients(), clients()
    got: list[str] = []
    waiter = threading.Thread(target=lambda: got.append(store.wait("later", 60)))
    waiter.start()
    for _ in range(5):
        time.sleep(0.05)
        assert other.get("later") is None and not got
    other.put_if_absent("later", "now")
    waiter.join(60)
    assert got == ["now"]


def test_a_wait_ends(clients: Clients) -> None:
    store = clients()
    with pytest.raises(Retryable, match="'never'.*0.05 s"):
        store.wait("never", 0.05)
    assert store.put_if_absent("after", "sound") == "sound"


def test_a_value_is_never_empty(clients: Clients) -> None:
    with pytest.raises(ValueError, match="empty"):
        clients().put_if_absent("k", "")


def test_the_log_is_what_stands(clients: Clients) -> None:
    one, other = RunLog(clients(), "run/"), RunLog(clients(), "run/")
    zero = genesis("run", 2)
    mine = CommitRecord(1, 5, zero.hash, ((0, 0), (1, 0)), {0: 1, 1: 1}, "run")
    late = CommitRecord(1, 6, zero.hash, ((0, 0),), {0: 1, 1: 0}, "run")
    assert one.read_from(0) == []
    assert one.append(0, zero) == zero
    assert other.append(1, mine) == mine
    assert one.append(1, late) == mine
    assert one.read_from(0) == [zero, mine] and one.read_from(1) == [mine] and one.read_from(2) == []
    assert RunLog(clients(), "another/").read_from(0) == []


def test_a_lost_store_is_retryable() -> None:
    server, address = host_store()
    store = TcpRunStore(address)
    store.put_if_absent("k", "v")
    del server
    store._connect_timeout_s = 0.3
    with nobody_at(address):
        for call in (lambda: store.get("k"), lambda: store.put_if_absent("j", "v"), lambda: store.wait("k", 0.3)):
            with pytest.raises(Retryable, match="cannot be reached"):
                call()


@pytest.mark.system
def test_a_store_that_stays_away_is_said_before_the_limit_for_a_slow_name_service_and_one_that_returns_is_used() -> None:
    server, address = host_store()
    store = TcpRunStore(address)
    store.put_if_absent("k", "v")
    del server
    with nobody_at(address):
        with pytest.raises(Retryable, match="cannot be reached"):
            store.get("k")  # finds that the connection is broken
        begin_s = time.monotonic()
        with pytest.raises(Retryable, match="cannot be reached: no connection to .*refused"):
            store.get("k")
        assert time.monotonic() - begin_s < STORE_CONNECT_S / 2
        back: list[object] = []
        late = threading.Timer(0.5, lambda: back.append(host_store(port=int(address.rpartition(":")[2]))))
        late.start()
        assert store.get("k") is None, "the same call: it tries until somebody listens"
        late.join()


def test_a_port_in_use_is_a_wrong_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port={port}: is in use"):
            host_store(port=port)


def test_the_store_listens_on_loopback_alone() -> None:
    server, address = host_store()
    host, port = address.rsplit(":", 1)
    assert host == "127.0.0.1" and int(port) == server.port
    with socket.socket() as other:  # any other loopback address would reach a socket bound to all
        other.settimeout(60)
        assert other.connect_ex(("127.0.0.2", int(port))) != 0
