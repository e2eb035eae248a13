"""The parts of the verbs driver that need no RDMA: what goes over the wire, who is to blame, pyverbs' two
generations, and what the kernel shows of its ports."""

from __future__ import annotations

import ipaddress
import logging
import os
import random
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helixrt.errors import ConfigError, MissingExtra
from helixrt.protocol.link.frames import FrameError
from helixrt.protocol.link.messages import Failure
from helixrt.protocol.verbs.flow import MAX_SLOTS, Immediate, check_immediate, forward
from helixrt.transport.tcp import rails as tcp_rails
from helixrt.transport.tcp.watch import READ, Watch
from helixrt.transport.verbs import address as verbs_address
from helixrt.transport.verbs import library as verbs_library
from helixrt.transport.verbs.devices import Port, VerbsRail, best_gid, find_port, rails_here, survey
from helixrt.transport.verbs.endpoint import VerbsEndpoint
from helixrt.transport.verbs.failure import first_cause, port_failed
from helixrt.transport.verbs.library import Enums
from helixrt.transport.verbs.queue_pair import Patience, Sizes
from helixrt.transport.verbs.setup import LONGEST_REST_S, SLOW_S, Background, Exchange, Rests
from helixrt.transport.verbs.wire import (
    ATTRIBUTES_BYTES,
    Attributes,
    parse_attributes,
)

# ---------------------------------------------------------------- what goes over the wire


def test_an_immediate_fits_32_bits_and_only_its_own_is_taken(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        one = Immediate(rng.randrange(1 << 40), rng.randrange(MAX_SLOTS), rng.randrange(1 << 40))
        assert 0 <= one.pack() < 1 << 32
        check_immediate(one.pack(), one)
        for other in (one._replace(generation=one.generation + 1), one._replace(sequence=one.sequence + 1)):
            with pytest.raises(FrameError, match=f"slot {one.slot}"):
                check_immediate(other.pack(), one)
        with pytest.raises(FrameError):
            check_immediate(one._replace(slot=one.slot ^ 1).pack(), one)


def test_counters_of_32_bits_go_on_for_ever(seed: int) -> None:
    rng, counter = random.Random(seed), (1 << 32) - 500
    for _ in range(200):
        ahead = counter + rng.randrange(100)
        assert forward(counter, ahead & 0xFFFFFFFF) == ahead
        counter = ahead
    with pytest.raises(FrameError):
        forward(counter, (counter - 1) & 0xFFFFFFFF)


def attributes(**changes: object) -> Attributes:
    fields: dict[str, object] = {
        "number": 17, "packet": 0xABCDEF, "gid": bytes(range(16)), "lid": 0, "mtu": 5, "ring_address": 0x7F0000001000,
        "ring_key": 0x1234, "slots": 16, "receives": 128, "chunk_bytes": 256 << 10,
    }  # fmt: skip
    return Attributes(**(fields | changes))  # type: ignore[arg-type]


def test_attributes_come_back_as_they_were() -> None:
    one = attributes()
    assert len(one.pack()) == ATTRIBUTES_BYTES and parse_attributes(one.pack()) == one


@pytest.mark.parametrize(
    "changes",
    [{"mtu": 0}, {"mtu": 6}, {"number": 1 << 24}, {"packet": 1 << 24}, {"slots": 0}, {"slots": MAX_SLOTS + 1},
     {"receives": 31}, {"chunk_bytes": 100}, {"chunk_bytes": (1 << 30) + 1}],
)  # fmt: skip
def test_attributes_of_no_queue_pair_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(FrameError):
        parse_attributes(attributes(**changes).pack())


def test_garbage_is_no_attributes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        with pytest.raises(FrameError):
            parse_attributes(rng.randbytes(ATTRIBUTES_BYTES))


def tcp_address() -> bytes:
    with tcp_rails.listen(tcp_rails.TcpRail(), tcp_rails.SocketTuning()) as listener:
        return tcp_rails.pack_address([listener])


def test_an_address_says_rails_and_where_to_meet() -> None:
    raw = verbs_address.pack([(True, "10.0.0.1"), (False, "fe80::1")], True, tcp_address())
    said = verbs_address.parse(raw)
    assert said.rails == ((True, "10.0.0.1"), (False, "fe80::1")) and said.fallback and said.meeting[0] == "127.0.0.1"
    other = verbs_address.parse(verbs_address.pack([(True, "10.0.0.2"), (True, "10.0.1.2")], False, tcp_address()))
    assert said.agrees(other) == other.agrees(said) == 1  # RoCE to RoCE; the second is InfiniBand here
    assert said.agrees(said) == 2


@pytest.mark.parametrize(
    "said",
    [b"", b"[]", b"{}", b'{"verbs":1}', b'{"verbs":1,"rails":[],"fallback":true,"tcp":{"tcp":1,"rails":[["127.0.0.1",5]]}}',
     b'{"verbs":1,"rails":[[true,"x"]],"fallback":true,"tcp":{"tcp":1,"rails":[["127.0.0.1",5]]}}',
     b'{"verbs":1,"rails":[[true,"1.2.3.4"]],"fallback":true,"tcp":{"tcp":1,"rails":[]}}', b"[" * 5000],
    ids=lambda said: f"{len(said)} bytes",
)  # fmt: skip
def test_an_address_that_is_none_is_refused(said: bytes) -> None:
    with pytest.raises(ValueError):
        verbs_address.parse(said)


def test_settings_that_cannot_work_are_refused_in_one_line() -> None:
    for make in (
        lambda: Sizes(chunk_bytes=100),
        lambda: Sizes(slots=0),
        lambda: Sizes(receives=65),
        lambda: Sizes(signal_every=100),
        lambda: Patience(timeout=0),
        lambda: Patience(retries=7),
    ):
        with pytest.raises(ConfigError, match="must be") as error:
            make()
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------- what is waited for


def test_of_what_is_ready_at_once_the_urgent_comes_first() -> None:
    watch, heard = Watch(), []
    pairs = [socket.socketpair() for _ in range(8)]
    for number, (ours, theirs) in enumerate(pairs):
        watch.add(ours, READ, lambda mask, number=number: heard.append(number), urgent=number in (3, 6))  # type: ignore[misc]
        theirs.send(b"x")
    assert watch.dispatch()
    assert set(heard[:2]) == {3, 6} and sorted(heard) == list(range(8))
    watch.remove(pairs[3][0])  # its number may be another's from now on
    heard.clear()
    watch.add(pairs[3][0], READ, lambda mask: heard.append(-3))
    assert watch.dispatch()
    assert heard[0] == 6 and -3 in heard
    watch.close()
    for pair in pairs:
        for each in pair:
            each.close()


# ---------------------------------------------------------------- pyverbs, old and new


def fake_enums(grouped: bool) -> types.ModuleType:
    """As older pyverbs has them, all in the module; or only in their enums."""
    module = types.ModuleType("pyverbs.libibverbs_enums" if grouped else "pyverbs.enums")
    names = {f"IBV_{name}": number for number, name in enumerate(verbs_library._NAMES)}
    names |= {f"IBV_WC_{name}": number for number, name in enumerate(verbs_library._STATUSES)}
    home: object = module
    if grouped:
        home = type("ibv_all", (), {})
        module.ibv_all = home  # type: ignore[attr-defined]
    for name, number in names.items():
        setattr(home, name, number)
    return module


@pytest.mark.parametrize("grouped", [False, True])
def test_enums_of_both_generations_give_the_same_numbers(grouped: bool) -> None:
    enums = Enums(fake_enums(grouped))
    assert enums.QPS_RTS == verbs_library._NAMES.index("QPS_RTS")
    assert enums.statuses[verbs_library._STATUSES.index("RETRY_EXC_ERR")] == "RETRY_EXC_ERR"
    with pytest.raises(AttributeError):
        _ = enums.QPS_NOT_THERE


def test_a_pyverbs_without_the_names_in_use_is_not_used() -> None:
    module = fake_enums(False)
    del module.IBV_QPS_RTR
    with pytest.raises(ImportError, match="IBV_QPS_RTR"):
        Enums(module)


@pytest.fixture
def no_pyverbs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No package of that name is installed; the system's folder is an empty one."""
    for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(verbs_library.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(verbs_library, "SYSTEM_PACKAGES", tmp_path)
    verbs_library.library.cache_clear()
    return tmp_path


def test_without_pyverbs_the_extra_is_named(no_pyverbs: Path) -> None:
    with pytest.raises(MissingExtra, match="rdma"):
        verbs_library.library()


def test_the_system_package_is_loaded_alone(no_pyverbs: Path) -> None:
    folder = no_pyverbs / "pyverbs"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "device.py").write_text("HERE = 1")
    (no_pyverbs / "something_else.py").write_text("")
    with pytest.raises(ImportError, match="this Python"):  # made for another one
        verbs_library._adopt_system_package(folder)
    (folder / f"qp{next(s for s in verbs_library.importlib.machinery.EXTENSION_SUFFIXES if 'cpython' in s)}").touch()
    verbs_library._adopt_system_package(folder)
    try:
        assert verbs_library.importlib.import_module("pyverbs.device").HERE == 1
        with pytest.raises(ModuleNotFoundError):
            __import__("something_else")
    finally:
        for name in ("pyverbs", "pyverbs.device"):
            sys.modules.pop(name, None)


# ---------------------------------------------------------------- who is to blame


def status(name: str) -> int:
    return verbs_library._STATUSES.index(name)


@pytest.mark.parametrize(
    "names, failure",
    [
        ("LOC_QP_OP_ERR WR_FLUSH_ERR WR_FLUSH_ERR", Failure.DEVICE),
        ("WR_FLUSH_ERR RETRY_EXC_ERR", Failure.PATH),
        ("LOC_PROT_ERR", Failure.DEVICE),
        ("WR_FLUSH_ERR WR_FLUSH_ERR", Failure.CASCADE),
        ("REM_ACCESS_ERR RETRY_EXC_ERR", Failure.PROGRAM),
        ("WR_FLUSH_ERR REM_INV_REQ_ERR", Failure.PATH),
        ("LOC_LEN_ERR", Failure.PROGRAM),
        ("RNR_RETRY_EXC_ERR LOC_QP_OP_ERR", Failure.PATH),
    ],
)
def test_the_first_completion_that_is_no_consequence_decides(names: str, failure: Failure) -> None:
    found, reason = first_cause([status(name) for name in names.split()], Enums(fake_enums(False)))
    assert found is failure
    assert next((n for n in names.split() if n != "WR_FLUSH_ERR"), "WR_FLUSH_ERR") in reason


def test_every_status_has_a_class_and_an_unknown_one_is_the_devices() -> None:
    enums = Enums(fake_enums(False))
    for name in verbs_library._STATUSES[1:]:
        assert isinstance(first_cause([status(name)], enums)[0], Failure)
    assert first_cause([9999], enums) == (Failure.DEVICE, "work completion status 9999")


def test_events_of_a_port_that_fails() -> None:
    enums = Enums(fake_enums(True))
    assert port_failed(enums.EVENT_PORT_ACTIVE, enums) is None
    assert "PORT_ERR" in (port_failed(enums.EVENT_PORT_ERR, enums) or "")
    assert "DEVICE_FATAL" in (port_failed(enums.EVENT_DEVICE_FATAL, enums) or "")


# ---------------------------------------------------------------- a set-up thread that does not end


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    """A job of it goes on until the test is over."""
    monkeypatch.setattr("helixrt.transport.verbs.setup._JOIN_S", 0.05)
    goes_on, begun, watch = threading.Event(), threading.Event(), Watch()

    def stay() -> None:
        begun.set()
        goes_on.wait(120)

    background = Background(watch)
    background.submit(stay, lambda result, error: None)
    assert begun.wait(60)
    yield background
    goes_on.set()
    background._thread.join(60)
    assert not background._thread.is_alive()  # what it writes to was still there
    os.close(background._wakes)
    watch.close()


def in_time(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for the thread that does not end"


def test_to_stop_a_set_up_that_hangs_takes_no_longer_than_a_deadline(
    stuck: Background, caplog: pytest.LogCaptureFixture
) -> None:
    in_time(stuck.stop)
    assert "the set-up of verbs did not end within 0.05 s" in caplog.text


class Closes:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    clear = close


def test_an_endpoint_keeps_what_a_set_up_that_hangs_may_use(stuck: Background) -> None:
    """To close a NIC under pyverbs in another thread would end the process."""
    ports, nic, pair, region, registrations = (Closes() for _ in range(5))
    endpoint = types.SimpleNamespace(
        _ports=ports,
        _background=stuck,
        _spare={"place": [pair]},
        _registrations={"place": registrations},
        _exposed=[(region, b"")],
        _nics={"place": nic},
    )
    kept = sys.getrefcount(endpoint)
    in_time(lambda: VerbsEndpoint._give_up(endpoint))  # type: ignore[arg-type]
    assert ports.closed and not any(each.closed for each in (nic, pair, region, registrations))
    assert sys.getrefcount(endpoint) == kept + 1  # nor are they collected


# ---------------------------------------------------------------- ports of the kernel


def make_port(
    root: Path, name: str, number: int, state: str, gids: list[tuple[str, str, str]], layer: str = "Ethernet"
) -> None:
    port = root / name / "ports" / str(number)
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    for file, text in (("state", state), ("link_layer", layer), ("lid", "0x1f")):
        (port / file).write_text(text + "\n")
    for index, (address, kind, interface) in enumerate(gids):
        (port / "gids" / str(index)).write_text(address + "\n")
        (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")
        (port / "gid_attrs/ndevs" / str(index)).write_text(interface + "\n")


ROCE = [
    ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1", "eth1"),
    ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", "eth1"),
    ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "eth1"),
    ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "eth1"),
    ("0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2", ""),
]


def test_ports_are_surveyed_and_the_best_gid_is_chosen(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_1", 1, "4: ACTIVE", ROCE)
    make_port(tmp_path, "mlx5_0", 1, "1: DOWN", ROCE[:2])
    make_port(tmp_path, "mlx5_0", 2, "4: ACTIVE", [("fe80::1", "IB/RoCE v1", "")], "InfiniBand")
    ports = survey(tmp_path)
    assert [(p.device, p.number, p.active, p.ethernet) for p in ports] == [
        ("mlx5_0", 1, False, True), ("mlx5_0", 2, True, False), ("mlx5_1", 1, True, True)
    ]  # fmt: skip
    assert [len(p.gids) for p in ports] == [2, 1, 4]  # the empty one is none
    best = [best_gid(p) for p in ports]
    assert [gid.index if gid else None for gid in best] == [1, 0, 3]
    assert best[2] is not None and best[2].address.ipv4_mapped == ipaddress.IPv4Address("10.0.0.1")
    assert ports[1].lid == 0x1F
    assert rails_here(tmp_path) == [VerbsRail(device="mlx5_0", port=2), VerbsRail(device="mlx5_1")]
    assert "10.0.0.1" in str(ports[2]) and "down" in str(ports[0])
    port, gid = find_port(VerbsRail(device="mlx5_1", gid_index=1), tmp_path)
    assert isinstance(port, Port) and gid.address.is_link_local
    for rail in (VerbsRail(device="mlx5_2"), VerbsRail(device="mlx5_1", gid_index=9)):
        with pytest.raises(ConfigError, match="mlx5_"):
            find_port(rail, tmp_path)
    assert survey(tmp_path / "nothing") == []


# ---------------------------------------------------------------- set-up in the background


class FakePair:
    """A queue pair that records its life."""

    def __init__(self, number: int, fails: bool = False) -> None:
        self.number, self.fails = number, fails
        self.theirs: Attributes | None = None

    def connect(self, theirs: Attributes) -> None:
        if self.fails:
            raise OSError(110, "Connection timed out")
        self.theirs = theirs


class TwoEnds:
    """Exchanges between two ends in one thread, over connected sockets, each end with its background thread."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.backgrounds = [Background(self.watch), Background(self.watch)]
        self.heard: dict[str, object] = {}
        self.retired: list[FakePair] = []

    def begin(self, name: str, end: int, sock: socket.socket, arm: Callable[[], object], expires_s: float = 60.0) -> Exchange:
        sock.setblocking(False)
        return Exchange(
            self.watch, self.backgrounds[end], sock, end == 0, time.monotonic() + expires_s,
            arm, FakePair.connect, self.retired.append, lambda pair, theirs: self.heard.__setitem__(name, (pair, theirs)),  # type: ignore[arg-type]
            lambda failure, reason: self.heard.__setitem__(name, (failure, reason)),
        )  # fmt: skip

    def run(self, count: int) -> None:
        until = time.monotonic() + 60
        while len(self.heard) < count:
            assert time.monotonic() < until, self.heard
            self.watch.dispatch(0.02)
            self.watch.run_timers(time.monotonic())

    def close(self) -> None:
        for background in self.backgrounds:
            background.stop()
        self.watch.close()


@pytest.fixture
def ends() -> object:
    two = TwoEnds()
    yield two
    two.close()


def armed(number: int, fails: bool = False) -> Callable[[], object]:
    return lambda: (FakePair(number, fails), attributes(number=number))


def test_rails_set_up_in_opposite_orders_do_not_wait_for_each_other(ends: TwoEnds) -> None:
    """SHIFT's appendix B: server A sets up 1 then 2, server B 2 then 1, each with one thread."""
    pairs = [socket.socketpair() for _ in range(6)]
    for rail in range(6):
        ends.begin(f"a{rail}", 0, pairs[rail][0], armed(100 + rail))
    for rail in reversed(range(6)):
        ends.begin(f"b{rail}", 1, pairs[rail][1], armed(200 + rail))
    ends.run(12)
    for rail in range(6):
        for name, ours, theirs in ((f"a{rail}", 100 + rail, 200 + rail), (f"b{rail}", 200 + rail, 100 + rail)):
            pair, said = ends.heard[name]  # type: ignore[misc]
            assert (pair.number, said.number, pair.theirs) == (ours, theirs, said)
    assert not ends.retired


def test_an_end_that_cannot_connect_tells_both(ends: TwoEnds) -> None:
    here, there = socket.socketpair()
    ends.begin("a", 0, here, armed(1))
    ends.begin("b", 1, there, armed(2, fails=True))
    ends.run(2)
    assert ends.heard["b"][0] is Failure.PATH and "timed out" in ends.heard["b"][1]  # type: ignore[index]
    assert ends.heard["a"][0] is Failure.PATH  # type: ignore[index]
    assert sorted(pair.number for pair in ends.retired) == [1, 2]


def test_a_device_that_makes_no_queue_pair_is_to_blame(ends: TwoEnds) -> None:
    def broken() -> object:
        raise OSError(19, "No such device")

    here, there = socket.socketpair()
    ends.begin("a", 0, here, broken)
    ends.begin("b", 1, there, armed(2))
    ends.run(2)
    assert ends.heard["a"][0] is Failure.DEVICE and ends.heard["b"][0] is Failure.PATH  # type: ignore[index]


def test_a_silent_end_and_garbage_end_the_set_up(ends: TwoEnds) -> None:
    here, _there = socket.socketpair()
    ends.begin("silent", 0, here, armed(1), expires_s=0.05)
    ends.run(1)
    assert ends.heard["silent"][0] is Failure.PATH  # type: ignore[index]
    here, there = socket.socketpair()
    ends.begin("garbage", 1, here, armed(2))
    there.send(b"x" * ATTRIBUTES_BYTES)
    ends.run(2)
    assert ends.heard["garbage"][0] is Failure.PROGRAM  # type: ignore[index]
    there.close()


def test_a_rail_whose_connecting_stands_everything_still_rests_longer_each_time() -> None:
    rests, rail, now = Rests(), (3, 1), 100.0
    assert rests.failed(rail, SLOW_S / 2, now) == now and rests.until(rail) <= now
    waits = []
    for _ in range(8):
        again = rests.failed(rail, 1.0, now)
        assert rests.until(rail) == again and rests.until((3, 0)) <= now
        waits.append(again - now)
        now = again
    assert waits[:4] == [1, 2, 4, 8] and waits[-1] == LONGEST_REST_S
    rests.succeeded(rail)
    assert rests.failed(rail, 1.0, now) == now + 1


def test_a_cancelled_set_up_gives_its_queue_pair_back(ends: TwoEnds) -> None:
    here, there = socket.socketpair()
    ends.begin("a", 0, here, armed(1)).cancel()
    ends.begin("b", 1, there, armed(2))
    ends.run(1)  # the other end hears of it
    until = time.monotonic() + 60
    while len(ends.retired) < 2 and time.monotonic() < until:
        ends.watch.dispatch(0.02)
    assert sorted(pair.number for pair in ends.retired) == [1, 2] and "a" not in ends.heard


def test_loading_pyverbs_leaves_the_logging_of_the_program_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").write_text("import logging\nlogging.basicConfig(level=logging.DEBUG, force=True)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with pytest.raises(MissingExtra):  # it has nothing else
        verbs_library.library.__wrapped__()
    assert (root.handlers, root.level) == (handlers, level)
    monkeypatch.delitem(sys.modules, "pyverbs")


# ---------------------------------------------------------------- queue pairs that are used again


class _Spare:
    def __init__(self, reached: str) -> None:
        self.reached, self.closed = reached, False

    def arm(self) -> str:
        return "attributes"

    def close(self) -> None:
        self.closed = True


def test_a_queue_pair_is_used_again_for_the_address_it_reached_before_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from helixrt.transport.verbs import endpoint as verbs_endpoint

    monkeypatch.setattr(verbs_endpoint, "QueuePair", lambda nic, sizes, patience: _Spare(""))
    to_b, to_c, unused = _Spare("10.0.0.2"), _Spare("10.0.0.3"), _Spare("")
    spare = [to_b, to_c]
    endpoint = types.SimpleNamespace(
        _open=lambda rail: None, _spare={"place": spare}, _places=["place"], verbs_options=verbs_endpoint.VerbsOptions()
    )
    assert verbs_endpoint.VerbsEndpoint._arm(endpoint, 0, "10.0.0.3") == (to_c, "attributes") and spare == [to_b]
    made, _ = verbs_endpoint.VerbsEndpoint._arm(endpoint, 0, "10.0.0.4")
    assert made not in (to_b, to_c) and to_b.closed and not spare, "one is made, and no more are kept than were in use"
    spare.append(unused)
    assert verbs_endpoint.VerbsEndpoint._arm(endpoint, 0, "10.0.0.5")[0] is unused
