"""One endpoint over several transports: which one a pair takes, and that mixtures keep the contract."""

from __future__ import annotations

import itertools
import json
import logging
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from helixrt.errors import Cause, ConfigError, Retryable
from helixrt.transport.auto import AutoEndpoint
from helixrt.transport.choice import Choice, choose, pack_addresses, unpack_addresses
from helixrt.transport.contract import Endpoint, Outcome, PeerAborted
from helixrt.transport.monitor import client as monitor
from helixrt.transport.shared_memory import address as shared_memory
from helixrt.transport.shared_memory.endpoint import SharedMemoryEndpoint
from helixrt.transport.verbs import address as verbs_address
from helixrt.transport.verbs import endpoint as verbs
from tests.transport.conformance import MIB, EndpointConformance, PauseConformance, StopConformance
from tests.transport.worlds import LIMIT_S, SECRET, Message, Process, World

_turn = itertools.count()


def mixed(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    """Every third endpoint has no shared memory: its links are TCP, the others' are not."""
    return AutoEndpoint(secret, transport=("auto", "auto", "tcp")[next(_turn) % 3], heartbeat_s=heartbeat_s)


@pytest.mark.slow
@pytest.mark.grid
class TestMixedTransports(EndpointConformance):
    make = staticmethod(mixed)


def over_tcp(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return AutoEndpoint(secret, transport="tcp", heartbeat_s=heartbeat_s)


class TestTcpWithMonitors(StopConformance):
    """TCP alone does not show that a peer's process is stopped."""

    make = staticmethod(over_tcp)


def unwatched(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return AutoEndpoint(secret, transport="tcp", heartbeat_s=heartbeat_s, watch_processes=False)


class TestTcpThatLeavesStoppedProcessesToOthers(PauseConformance):
    make = staticmethod(unwatched)


def unwatched_memory(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return AutoEndpoint(secret, transport="shared_memory", heartbeat_s=heartbeat_s, watch_processes=False)


class TestSharedMemoryThatLeavesStoppedProcessesToOthers(PauseConformance):
    make = staticmethod(unwatched_memory)


def world_of(*transports: str, heartbeat_s: float | None = None) -> World:
    left = iter(transports)
    return World(
        lambda secret, heartbeat: AutoEndpoint(secret, transport=next(left), heartbeat_s=heartbeat),
        len(transports),
        heartbeat_s,
    )


def choices(world: World, rank: int) -> Mapping[int, Choice]:
    endpoint = world.endpoints[rank]
    assert isinstance(endpoint, AutoEndpoint)
    return endpoint.choices


# ---------------------------------------------------------------- the choice

_HERE = json.dumps({"host": "a" * 32, "name": "1" * 32}).encode()
_SAME = json.dumps({"host": "a" * 32, "name": "2" * 32}).encode()
_ELSEWHERE = json.dumps({"host": "b" * 32, "name": "2" * 32}).encode()


@pytest.mark.parametrize(
    "mine, theirs, answers, transport",
    [
        ({"shared_memory": _HERE, "tcp": b"1"}, {"shared_memory": _SAME, "tcp": b"2"}, True, "shared_memory"),
        ({"shared_memory": _HERE, "tcp": b"1"}, {"shared_memory": _SAME, "tcp": b"2"}, False, "tcp"),  # a clone's name
        ({"shared_memory": _HERE, "tcp": b"1"}, {"shared_memory": _ELSEWHERE, "tcp": b"2"}, True, "tcp"),
        ({"shared_memory": _HERE, "tcp": b"1"}, {"tcp": b"2"}, True, "tcp"),
        ({"tcp": b"1"}, {"shared_memory": _SAME, "tcp": b"2"}, True, "tcp"),
        ({"shared_memory": _HERE}, {"shared_memory": _SAME, "tcp": b"2"}, True, "shared_memory"),
        ({"shared_memory": _HERE}, {"shared_memory": _ELSEWHERE, "tcp": b"2"}, True, None),
        ({"shared_memory": _HERE}, {"tcp": b"2"}, True, None),
        ({"tcp": b"1"}, {"shared_memory": _SAME}, True, None),
    ],
)
def test_both_ends_choose_alike(mine: dict[str, bytes], theirs: dict[str, bytes], answers: bool, transport: str | None) -> None:
    asked: list[str] = []

    def ask(name: str) -> bool:
        asked.append(name)
        return answers

    forth, back = choose(mine, theirs, ask), choose(theirs, mine, ask)
    assert (forth and forth.transport) == (back and back.transport) == transport
    assert asked in ([], ["2" * 32, "1" * 32])  # each asks for the other's socket


def test_verbs_are_chosen_where_both_have_ports_of_one_kind() -> None:
    tcp = b'{"tcp":1,"rails":[["10.1.0.1",9000]]}'
    roce = verbs_address.pack([(True, "10.0.0.1"), (True, "10.0.1.1")], True, tcp)
    other = verbs_address.pack([(True, "10.0.0.2")], True, tcp)
    infiniband = verbs_address.pack([(False, "fe80::1")], True, tcp)
    mine = {"verbs": roce, "tcp": b""}
    for theirs in ({"verbs": other, "tcp": b""}, {"verbs": other}):
        choice = choose(mine, theirs)
        assert choice is not None and choice.transport == "verbs"
        assert "1 RDMA rail," in choice.why and "10.0.0.1 to 10.0.0.2" in choice.why
    kinds = {"verbs": infiniband, "tcp": b""}
    assert choose(mine, kinds) == Choice("tcp", "its RDMA ports are of another kind")
    assert choose(mine, {"tcp": b""}) == Choice("tcp", "it has no RDMA")
    assert choose({"tcp": b""}, mine) == Choice("tcp", "this rank has no RDMA")
    assert choose({"verbs": roce}, {"verbs": infiniband}) is None
    with pytest.raises(ValueError):
        choose(mine, {"verbs": b"{}", "tcp": b""})


def test_who_insists_on_verbs_where_there_are_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "rails_here", lambda: [])
    with pytest.raises(ConfigError, match="^transport=verbs: "):
        AutoEndpoint(SECRET, transport="verbs")


def test_addresses_survive_and_garbage_does_not() -> None:
    addresses = {"shared_memory": b"", "tcp": bytes(range(256)) * 10}
    packed = pack_addresses(addresses)
    assert unpack_addresses(packed) == addresses
    for garbage in (b"", b"\0", packed[:-1], packed + packed, b"\xff" * 50, b"\x01\x00\x00\xff"):
        with pytest.raises(ValueError):
            unpack_addresses(garbage)


@pytest.mark.parametrize("value", ["", "TCP", "infiniband", "shm"])
def test_a_transport_that_is_none_is_told_in_one_line(value: str) -> None:
    with pytest.raises(ConfigError, match=f"^transport={value}: must be one of auto, tcp, shared_memory, verbs, native$"):
        AutoEndpoint(SECRET, transport=value)


# ---------------------------------------------------------------- worlds


def test_a_mixture_exchanges_and_says_what_it_chose(caplog: pytest.LogCaptureFixture, seed: int) -> None:
    caplog.set_level(logging.INFO, "helixrt.transport")
    world = world_of("auto", "auto", "tcp", "auto")
    assert all(len(address) <= 4096 for address in world.addresses)
    world.connect()
    assert {peer: choice.transport for peer, choice in choices(world, 0).items()} == {
        1: "shared_memory",
        2: "tcp",
        3: "shared_memory",
    }
    assert {choice.transport for choice in choices(world, 2).values()} == {"tcp"}
    assert "rank 0 reaches rank 1, 3 by shared_memory: on this host" in caplog.text
    assert "rank 0 reaches rank 2 by tcp: it offers no shared memory" in caplog.text
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    world.exchange(
        [Message(a, b, 0, i, size) for a, b in pairs for i, size in enumerate((10, 100_000, MIB))], random.Random(seed)
    )
    world.endpoints[0].abort(Cause("enough"))
    world.driven = {1, 2, 3}
    world.run(lambda: all(world.ended(rank) for rank in (1, 2, 3)))
    for rank in (1, 2, 3):
        assert world.ended(rank) == [PeerAborted(0, Cause("enough"))]
    world.close()


def test_shared_memory_alone() -> None:
    world = world_of("shared_memory", "shared_memory")
    world.connect()
    world.exchange([Message(0, 1, 0, 0, MIB), Message(1, 0, 0, 0, 5)], random.Random(1))
    assert choices(world, 0)[1].transport == "shared_memory"
    world.close()


def test_who_insists_on_what_does_not_reach_a_peer_is_told() -> None:
    world = world_of("shared_memory", "tcp")
    with pytest.raises(ConfigError, match="^transport=shared_memory: does not reach rank 1, which offers tcp$"):
        world.endpoints[0].connect(1, 0, {1: world.addresses[1]}, 1.0)
    elsewhere = json.loads(unpack_addresses(world.addresses[0])["shared_memory"])
    assert elsewhere["host"] == shared_memory.host_identity()
    elsewhere["host"] = "0" * 32
    with pytest.raises(ConfigError, match="rank 1, which is on another host; use auto or tcp$"):
        world.endpoints[0].connect(1, 0, {1: pack_addresses({"shared_memory": json.dumps(elsewhere).encode()})}, 1.0)
    world.close()


def test_a_socket_that_does_not_answer_is_no_shared_host() -> None:
    """Two machines from one snapshot have one name; only the socket tells them apart."""
    world = world_of("auto", "auto")
    parts = unpack_addresses(world.addresses[1])
    gone = SharedMemoryEndpoint(SECRET)
    parts["shared_memory"] = gone.address()
    gone.close()
    world.addresses[1] = pack_addresses(parts)
    with pytest.raises(Retryable):
        world.endpoints[0].connect(1, 0, {1: world.addresses[1]}, 0.2)
    assert choices(world, 0)[1].transport == "tcp"
    world.close()


def with_its_monitor(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    endpoint = AutoEndpoint(secret, transport="tcp", heartbeat_s=heartbeat_s)
    assert endpoint._watched is not None
    endpoint._watched._monitor.start()
    return endpoint


@pytest.mark.system
@pytest.mark.skipif(monitor.unsupported() is not None, reason=str(monitor.unsupported()))
def test_the_cause_names_a_peer_that_its_monitor_reports_while_others_connect() -> None:
    other = Process(with_its_monitor, 1, 10, 0.5)
    one = over_tcp(SECRET, 0.5)
    try:
        address = other.hear()
        other.signal(signal.SIGSTOP)
        with pytest.raises(Retryable, match="rank 1 does not come: its process has been stopped") as raised:
            one.connect(1, 0, {1: address}, LIMIT_S)
        assert raised.value.cause.peers == (1,)
    finally:
        other.end()
        one.close()


def test_links_that_are_made_stay_alive_while_others_connect() -> None:
    """The third rank, by TCP, is late by several heartbeats, but at its door it answers."""
    world = world_of("auto", "auto", "tcp", heartbeat_s=0.2)
    world.driven = {2}

    def come_late() -> None:
        world.settle(0.8)
        world.endpoints[2].connect(1, 2, {0: world.addresses[0], 1: world.addresses[1]}, LIMIT_S)

    late = threading.Thread(target=come_late)
    late.start()
    early = [
        threading.Thread(target=world.endpoints[me].connect, args=(1, me, dict(others), LIMIT_S))
        for me, others in (
            (0, {1: world.addresses[1], 2: world.addresses[2]}),
            (1, {0: world.addresses[0], 2: world.addresses[2]}),
        )
    ]
    for thread in early:
        thread.start()
    for thread in (*early, late):
        thread.join()
    world.driven = {0, 1, 2}
    begin = time.monotonic()
    world.run(lambda: time.monotonic() > begin + 0.3)
    assert world.outcomes == [[], [], []]
    world.exchange([Message(a, b, 0, 0, 1000) for a in range(3) for b in range(3) if a != b], random.Random(2))
    world.close()


def test_a_link_that_cannot_be_kept_alive_ends_the_connecting_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third rank does not come. Else the peers by shared memory would hear nothing, and nobody would be told."""
    world = world_of("auto", "auto", "tcp")
    calls: list[str] = []

    def fail(now: float) -> Sequence[Outcome]:
        calls.append(threading.current_thread().name)
        raise OSError("no such device")

    broken = world.endpoints[0]._endpoints["shared_memory"]  # type: ignore[attr-defined]
    connect = broken.connect

    def connect_and_break(*arguments: Any) -> None:
        connect(*arguments)
        monkeypatch.setattr(broken, "progress", fail)

    monkeypatch.setattr(broken, "connect", connect_and_break)
    raised: dict[int, BaseException] = {}

    def connect_to_all(me: int) -> None:
        try:
            world.endpoints[me].connect(1, me, {r: world.addresses[r] for r in range(3) if r != me}, LIMIT_S)
        except BaseException as error:
            raised[me] = error

    threads = [threading.Thread(target=connect_to_all, args=(me,), daemon=True) for me in (0, 1)]
    for thread in threads:
        thread.start()
    threads[0].join(LIMIT_S / 2)
    assert isinstance(raised.get(0), OSError) and "no such device" in str(raised[0])
    assert calls == ["helixrt-keep-alive"]
    monkeypatch.undo()
    world.endpoints[1].abort(Cause("enough"))
    world.close()
    threads[1].join(LIMIT_S)


@pytest.mark.parametrize("higher", [True, False])
def test_a_peer_that_ended_between_two_generations_is_gone_although_it_was_linked_before(higher: bool) -> None:
    """Nobody asks after its socket again before the call; the call, or a look soon after, finds nobody."""
    world = world_of("auto", "auto")
    world.connect()
    me, other = (0, 1) if higher else (1, 0)
    world.endpoints[other].close()
    with pytest.raises(Retryable, match=f"rank {other} is gone"):
        world.endpoints[me].connect(2, me, {other: world.addresses[other]}, LIMIT_S)
    world.endpoints[me].close()


def test_whoever_is_linked_is_not_asked_again_and_a_stranger_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question costs the one who is asked a connection, too."""
    asked: list[str] = []
    listens = shared_memory.listens

    def ask(name: str) -> bool:
        asked.append(name)
        return listens(name)

    monkeypatch.setattr(shared_memory, "listens", ask)
    world = world_of("auto", "auto", "auto")
    world.connect()
    assert len(asked) == 6
    world.connect(2)
    assert len(asked) == 6
    world.endpoints[2].close()
    world.endpoints[2] = AutoEndpoint(SECRET)
    world.addresses[2] = world.endpoints[2].address()
    world.connect(3)
    assert len(asked) == 10, "both others ask after the new one, which asks after both"
    assert {c.transport for e in world.endpoints for c in e.choices.values()} == {"shared_memory"}
    world.close()


def test_who_insists_on_shared_memory_is_told_that_a_peer_ended_and_not_that_it_is_on_another_host() -> None:
    """It ended after it had published its address, before anybody connected: a failure of the peer, no wrong setting."""
    one, other = (AutoEndpoint(SECRET, transport="shared_memory") for _ in range(2))
    address = other.address()
    other.close()
    with pytest.raises(Retryable, match="rank 1 is gone") as raised:
        one.connect(1, 0, {1: address}, LIMIT_S)
    assert raised.value.cause.peers == (1,)
    one.close()
