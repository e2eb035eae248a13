"""One contract, every state transport: over HTTP in this process, and through Ray's object store.

Donors are told by a word what goes wrong on their wire: nothing, one spoilt answer, dying after some
answers, or being slow. The real death of a process is tried at the end.
"""

from __future__ import annotations

import http.client
import math
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from helixrt.errors import Retryable
from helixrt.protocol.catchup import FetchRules
from helixrt.replica.contracts import Shard, StateTransport, layout_of
from helixrt.replica.http_transport import HttpTransport
from helixrt.replica.manifest import LAYOUT_LIMIT_BYTES
from helixrt.replica.serving_pace import Pace

TIMEOUT_S = 60.0
SECRET = "the run's secret"
PATIENT = FetchRules(request_timeout_s=TIMEOUT_S)  # a pause of some seconds fails no request


def make_state(elements: int = 400_000) -> dict[str, torch.Tensor]:
    """Tensors of every kind a state has: one far larger than the rest, tiny, scalar, empty, several dtypes."""
    generator = torch.Generator().manual_seed(7)
    return {
        "large": torch.randn(elements // 100, 100, generator=generator),
        "half": torch.randn(777, generator=generator).bfloat16(),
        "step": torch.tensor(41.0),
        "none": torch.empty(0, 3),
        "ids": torch.randint(0, 1 << 40, (5, 7, 11), generator=generator),
        "mask": torch.rand(333, generator=generator) > 0.5,
        "turned": torch.randn(30, 50, generator=generator).t(),
        **{f"small{i}": torch.randn(i + 1, generator=generator) for i in range(50)},
    }


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


class Faults:
    """What goes wrong on a donor's wire; counts answers. Mixed into both transports."""

    def __init__(self, fault: str) -> None:
        self.fault, self.answers = fault, 0
        self._counting = threading.Lock()

    def next(self) -> str:
        with self._counting:
            self.answers += 1
            number = self.answers
        if self.fault == "spoil_one" and number == 3:
            return "spoil"
        if self.fault == "die" and number > 3:
            return "die"
        if self.fault == "slow":
            time.sleep(0.3)
        return ""


class FaultyHttp(HttpTransport):
    def __init__(self, fault: str) -> None:
        self.faults = Faults(fault)
        super().__init__(SECRET, serve_cpu=math.inf)

    def send(self, connection: socket.socket, parts: Iterable[memoryview]) -> None:
        what = self.faults.next()
        data = bytearray(b"".join(parts))
        if what == "spoil":
            data[len(data) // 2] ^= 1
        if what == "die":
            connection.sendall(memoryview(data)[: len(data) // 2])
            connection.shutdown(socket.SHUT_RDWR)
            return
        super().send(connection, [memoryview(data)])


class Peers(ABC):
    """Donors with a fault each, that offer the same state, and a transport to fetch with."""

    fetcher: StateTransport

    @abstractmethod
    def donor(self, fault: str = "", state: Mapping[str, torch.Tensor] | None = None) -> str:
        """Start a donor that offers `state`, or `make_state()`, as "s"; its address."""

    @abstractmethod
    def again(self) -> None:
        """A test ends; donors without a fault may be given out once more."""

    @abstractmethod
    def close(self) -> None: ...


class HttpPeers(Peers):
    def __init__(self) -> None:
        self.fetcher = HttpTransport(SECRET, rules=PATIENT)
        self._made: list[HttpTransport] = []

    def donor(self, fault: str = "", state: Mapping[str, torch.Tensor] | None = None) -> str:
        transport = FaultyHttp(fault)
        transport.offer("s", make_state() if state is None else state)
        self._made.append(transport)
        return transport.address

    def again(self) -> None:
        while self._made:
            transport = self._made.pop()
            transport.close()
            transport.close()

    def close(self) -> None:
        self.fetcher.close()


class RayPeers(Peers):
    def __init__(self) -> None:
        import ray

        from helixrt.ray_cluster.actors import CONCURRENCY_GROUPS
        from helixrt.ray_cluster.state_transport import RayTransport

        self._ray: Any = ray
        self.fetcher = RayTransport("fetcher", rules=PATIENT)
        self._actors: list[Any] = []
        self._sound: list[str] = []  # actors take seconds to start
        self._given_out = 0

        class Donor:  # defined here so that Ray sends its code, not the name of a test module
            def __init__(self, fault: str, state: dict[str, torch.Tensor]) -> None:
                class Faulty(RayTransport):
                    answers = 0

                    def put(self, data: bytes) -> Any:
                        self.answers += 1
                        if fault == "spoil_one" and self.answers == 3:
                            data = data[:-1] + bytes([data[-1] ^ 1])
                        if fault == "die" and self.answers > 3:
                            os.kill(os.getpid(), signal.SIGKILL)
                        if fault == "slow":
                            time.sleep(0.3)
                        return super().put(data)

                self.transport = Faulty(serve_cpu=math.inf)
                self.transport.offer("s", state)

            def call_transport(self, method: str, *arguments: Any) -> Any:
                return getattr(self.transport, method)(*arguments)

        self._class: Any = ray.remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS, max_restarts=0)(Donor)

    def donor(self, fault: str = "", state: Mapping[str, torch.Tensor] | None = None) -> str:
        sound = not fault and state is None
        if sound and self._given_out < len(self._sound):
            self._given_out += 1
            return self._sound[self._given_out - 1]
        name = f"donor-{time.time_ns()}"
        self._actors.append(self._class.options(name=name).remote(fault, dict(make_state() if state is None else state)))
        self._ray.get(self._actors[-1].__ray_ready__.remote(), timeout=TIMEOUT_S)
        if sound:
            self._sound.append(name)
            self._given_out += 1
        return name

    def again(self) -> None:
        self._given_out = 0

    def close(self) -> None:
        self.fetcher.close()
        for actor in self._actors:
            self._ray.kill(actor)


@pytest.fixture(scope="module", params=["http", pytest.param("ray", marks=pytest.mark.ray)])
def world(request: pytest.FixtureRequest) -> Iterator[Peers]:
    if request.param == "ray":
        request.getfixturevalue("ray_head")
    peers = HttpPeers() if request.param == "http" else RayPeers()
    yield peers
    peers.close()


@pytest.fixture
def peers(world: Peers) -> Iterator[Peers]:
    yield world
    world.again()


def test_three_donors_share_the_bytes(peers: Peers) -> None:
    state = make_state()
    seen: list[tuple[str, bool]] = []
    donors = [peers.donor() for _ in range(3)]
    got, report = peers.fetcher.fetch("s", layout_of(state), donors, TIMEOUT_S, lambda s, d, ok: seen.append((s.name, ok)))
    assert_same(got, state)
    assert sorted(seen) == sorted((name, True) for name in state)
    assert report.nbytes == sum(report.per_donor.values()) == sum(s.nbytes for s in layout_of(state))
    assert set(report.per_donor) == set(donors)
    assert min(report.per_donor.values()) > 0  # how even the shares are when donors are alike: tests/protocol/test_catchup.py
    assert not report.retried


def test_a_shard_spoilt_on_the_wire_is_fetched_again(peers: Peers) -> None:
    state = make_state()
    bad = peers.donor("spoil_one")
    seen: list[tuple[str, bool]] = []
    got, report = peers.fetcher.fetch(
        "s", layout_of(state), [bad, peers.donor()], TIMEOUT_S, lambda s, d, ok: seen.append((d, ok))
    )
    assert_same(got, state)
    assert report.retried == {"checksum": 1}
    assert (bad, False) in seen


def test_one_donor_alone_is_asked_again_for_what_it_spoilt(peers: Peers) -> None:
    state = make_state()
    got, report = peers.fetcher.fetch("s", layout_of(state), [peers.donor("spoil_one")], TIMEOUT_S)
    assert_same(got, state)
    assert report.retried == {"checksum": 1}


def test_a_donor_that_dies_in_mid_fetch_is_replaced(peers: Peers) -> None:
    state = make_state()
    dying = peers.donor("die")
    got, report = peers.fetcher.fetch("s", layout_of(state), [peers.donor(), dying, peers.donor()], TIMEOUT_S)
    assert_same(got, state)
    assert report.retried["donor_lost"] >= 1
    others = [n for donor, n in report.per_donor.items() if donor != dying]
    assert 0 < report.per_donor[dying] < report.nbytes / 4 and min(others) > 0


def test_a_slow_donor_does_not_set_the_pace(peers: Peers) -> None:
    state = make_state()
    slow = peers.donor("slow")
    got, report = peers.fetcher.fetch("s", layout_of(state), [slow, peers.donor()], TIMEOUT_S)
    assert_same(got, state)
    assert report.per_donor[slow] < report.nbytes / 4


def test_when_no_donor_is_left_the_fetch_is_retryable(peers: Peers) -> None:
    layout = layout_of(make_state())
    with pytest.raises(Retryable, match="no donor is left"):
        peers.fetcher.fetch("s", layout, [peers.donor("die")], TIMEOUT_S)
    with pytest.raises(Retryable, match="no donor is left"):
        peers.fetcher.fetch("s", layout, ["127.0.0.1:9"], TIMEOUT_S)
    with pytest.raises(Retryable, match="no donor to fetch"):
        peers.fetcher.fetch("s", layout, [], TIMEOUT_S)


def test_an_unknown_offer_and_another_layout_are_refused(peers: Peers) -> None:
    state = make_state()
    donor = peers.donor()
    with pytest.raises(Retryable, match="no (such )?offer"):
        peers.fetcher.fetch("not there", layout_of(state), [donor], TIMEOUT_S)
    other = [Shard("large", (8,), "float32", 32), *layout_of(state)[1:]]
    with pytest.raises(Retryable, match="another layout"):
        peers.fetcher.fetch("s", other, [donor], TIMEOUT_S)


def test_a_layout_is_that_of_the_offer_whoever_answers_first(peers: Peers) -> None:
    state = make_state()
    donor = peers.donor()
    assert peers.fetcher.layout("s", [donor], TIMEOUT_S) == layout_of(state)
    assert peers.fetcher.layout("s", ["127.0.0.1:9", donor], TIMEOUT_S) == layout_of(state), "the first cannot be reached"
    got, _ = peers.fetcher.fetch("s", peers.fetcher.layout("s", [donor], TIMEOUT_S), [donor], TIMEOUT_S)
    assert_same(got, state)
    with pytest.raises(Retryable, match="nobody gave the layout of x: .*no (such )?offer"):
        peers.fetcher.layout("x", [donor], TIMEOUT_S)
    with pytest.raises(Retryable, match="nobody gave the layout of s: no donors"):
        peers.fetcher.layout("s", [], TIMEOUT_S)


def test_a_fetch_of_which_no_byte_comes_ends(peers: Peers) -> None:
    with pytest.raises(Retryable, match="no bytes came within 0.1 s"):
        peers.fetcher.fetch("s", layout_of(make_state()), [peers.donor("slow")], stall_s=0.1)


@pytest.mark.system
def test_a_fetch_of_which_bytes_come_has_no_deadline(peers: Peers) -> None:
    """Each of 31 answers takes a third of a second, two at a time."""
    state, stall_s = make_state(8_000_000), 4.0
    got, report = peers.fetcher.fetch("s", layout_of(state), [peers.donor("slow", state)], stall_s)
    assert_same(got, state)
    assert report.seconds > stall_s, "it took longer than that in all"


def test_an_offer_that_is_made_again_is_no_other(peers: Peers) -> None:
    state = make_state(1000)
    name = f"again-{id(state)}"
    assert not peers.fetcher.offers(name)
    for _ in range(2):
        peers.fetcher.offer(name, state)
        assert peers.fetcher.offers(name)
    peers.fetcher.withdraw(name)
    assert not peers.fetcher.offers(name)


def test_a_callback_that_fails_is_heard(peers: Peers) -> None:
    def fail(shard: Shard, donor: str, ok: bool) -> None:
        raise ArithmeticError(shard.name)

    state = {"a": torch.ones(10_000)}
    with pytest.raises(ArithmeticError, match="a"):
        peers.fetcher.fetch("s", layout_of(state), [peers.donor(state=state)], TIMEOUT_S, fail)


# What HTTP alone has to prove.


def test_who_does_not_know_the_secret_gets_nothing() -> None:
    state = {"a": torch.ones(1000)}
    donor, stranger = HttpTransport(SECRET), HttpTransport("another secret")
    donor.offer("s", state)
    stranger.offer("s", {"a": torch.zeros(1000)})
    with pytest.raises(Retryable, match="403"):
        stranger.fetch("s", layout_of(state), [donor.address], TIMEOUT_S)
    assert donor.refused == 1
    host, port = donor.address.split(":")
    plain = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    plain.request("GET", "/state/s?begin=0&end=4000")
    answer = plain.getresponse()
    assert (answer.status, answer.read()) == (403, b"")
    plain.close()
    assert donor.refused == 2
    for transport in (donor, stranger):
        transport.close()


class Lying(HttpTransport):
    """Says another length than was agreed."""

    def _answer(self, request: Any) -> None:
        request.send_response_only(200)
        request.send_header("Content-Length", str(1 << 40))
        request.end_headers()


class Forging(HttpTransport):
    """Sends bytes of the right length under a checksum that it made up."""

    def _answer(self, request: Any) -> None:
        size = 4000
        request.send_response_only(200)
        request.send_header("Content-Length", str(size))
        request.send_header("X-Helixrt-Checksum", "0" * 32)
        request.end_headers()
        request.wfile.write(bytes(size))


@pytest.mark.parametrize(("kind", "complaint"), [(Lying, "1099511627776 bytes, not 4000"), (Forging, "spoilt")])
def test_a_donor_that_lies_is_dropped(kind: type[HttpTransport], complaint: str) -> None:
    state = {"a": torch.ones(1000)}
    rules = FetchRules(piece_floor_bytes=4000)
    liar, honest, fetcher = kind(SECRET), HttpTransport(SECRET), HttpTransport(SECRET, rules=rules)
    honest.offer("s", state)
    with pytest.raises(Retryable, match=complaint):
        fetcher.fetch("s", layout_of(state), [liar.address], TIMEOUT_S)
    for transport in (liar, honest, fetcher):
        transport.close()


class LyingOfLayouts(HttpTransport):
    """Gives texts that are no layouts."""

    text = b""

    def layout_json(self, name: str) -> bytes | None:
        return self.text


NO_LAYOUTS = {
    "no JSON": (b"{", "sends no layout"),
    "no list": (b"{}", "a layout is a list"),
    "no entry": (b"[3]", "a name, a shape and a dtype"),
    "unknown dtype": (b'[["a", [1], "os"]]', "unknown dtype 'os'"),
    "negative": (b'[["a", [-1], "float32"]]', "a shape that no tensor has"),
    "too large": (b'[["a", [1152921504606846975, 2], "float32"]]', "a shape that no tensor has"),
    "not whole": (b'[["a", [1.5], "float32"]]', "a shape that no tensor has"),
    "true": (b'[["a", [true], "float32"]]', "a shape that no tensor has"),
    "twice": (b'[["a", [1], "float32"], ["a", [1], "float32"]]', "'a' occurs twice"),
    "long name": (b'[["' + b"a" * 5000 + b'", [1], "float32"]]', "at most 4096"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply|sends no layout"),
}


@pytest.mark.parametrize("name", list(NO_LAYOUTS))
def test_a_layout_that_is_none_is_not_taken(name: str) -> None:
    liar, honest, fetcher = LyingOfLayouts(SECRET), HttpTransport(SECRET), HttpTransport(SECRET)
    liar.text, complaint = NO_LAYOUTS[name]
    honest.offer("s", {"a": torch.ones(3)})
    with pytest.raises(Retryable, match=complaint):
        fetcher.layout("s", [liar.address], TIMEOUT_S)
    assert fetcher.layout("s", [liar.address, honest.address], TIMEOUT_S) == layout_of({"a": torch.ones(3)})
    for transport in (liar, honest, fetcher):
        transport.close()


class Promising(HttpTransport):
    """Announces more bytes than any layout may have."""

    def _answer(self, request: Any) -> None:
        request.send_response_only(200)
        request.send_header("Content-Length", str(LAYOUT_LIMIT_BYTES + 1))
        request.end_headers()


def test_of_a_layout_above_the_limit_nothing_is_read_and_strangers_get_none() -> None:
    donors = Promising(SECRET), Forging(SECRET), HttpTransport("another secret")
    fetcher = HttpTransport(SECRET)
    donors[2].offer("s", {"a": torch.ones(3)})
    complaints = f"sends {LAYOUT_LIMIT_BYTES + 1} bytes; at most", "a wrong checksum", "403"
    for donor, complaint in zip(donors, complaints, strict=True):
        with pytest.raises(Retryable, match=complaint):
            fetcher.layout("s", [donor.address], TIMEOUT_S)
    for transport in (*donors, fetcher):
        transport.close()


def test_an_offer_that_comes_a_moment_later_is_waited_for_and_withdrawn_is_gone() -> None:
    state = {"a": torch.ones(1000)}
    donor = HttpTransport(SECRET)
    later = threading.Timer(0.2, lambda: donor.offer("s", state))
    later.start()
    got, _ = donor.fetch("s", layout_of(state), [donor.address], TIMEOUT_S)
    assert_same(got, state)
    later.join()
    donor.withdraw("s")
    donor.withdraw("s")
    with pytest.raises(Retryable, match="404"):
        donor.fetch("s", layout_of(state), [donor.address], TIMEOUT_S)
    donor.close()


class Stopping(HttpTransport):
    """Withdraws what it serves in the middle of its first answer, and reuses the memory at once."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__(SECRET, serve_cpu=math.inf)
        self.state, self.sent = state, 0
        self.offer("s", state)

    def send(self, connection: socket.socket, parts: Iterable[memoryview]) -> None:
        for part in parts:
            connection.sendall(part)
            self.sent += 1
            if self.sent == 1:
                self.withdraw("s")
                self.state["a"].fill_(-1.0)


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_withdrawn_in_mid_transfer_never_arrives_as_something_else(alone: bool) -> None:
    rules = FetchRules(piece_floor_bytes=1 << 20)
    state = {"a": torch.arange(2_000_000.0)}
    stopping, fetcher = Stopping({"a": state["a"].clone()}), HttpTransport(SECRET, rules=rules)
    steady = HttpTransport(SECRET, serve_cpu=math.inf)
    steady.offer("s", state)
    if alone:
        with pytest.raises(Retryable, match="broke off|no such offer"):
            fetcher.fetch("s", layout_of(state), [stopping.address], TIMEOUT_S)
    else:
        got, report = fetcher.fetch("s", layout_of(state), [stopping.address, steady.address], TIMEOUT_S)
        assert_same(got, state)
        assert "checksum" not in report.retried, "the connection was broken off before other bytes were sent"
    for transport in (stopping, fetcher, steady):
        transport.close()


def test_a_rate_that_is_set_is_kept_to() -> None:
    """By what the donor sleeps: how long it really takes is the machine's matter."""
    now = 0.0
    pace = Pace(math.inf, bytes_per_s=1e6, clock=lambda: now)
    for _ in range(10):
        now += pace.sent(100_000)
    assert now == pytest.approx(1.0), "a megabyte a second"


def test_fetching_leaves_no_thread_and_no_socket() -> None:
    state = make_state(10_000)
    donors = [HttpTransport(SECRET, serve_cpu=math.inf) for _ in range(2)]
    for donor in donors:
        donor.offer("s", state)
    for _ in range(5):
        donors[0].fetch("s", layout_of(state), [d.address for d in donors], TIMEOUT_S)
    assert not [t for t in threading.enumerate() if t.name.startswith("helixrt-fetch")]
    for donor in donors:
        donor.close()


def _donor_process(pipe: Connection) -> None:
    torch.set_num_threads(1)
    transport = FaultyHttp("slow")
    transport.offer("s", make_state())
    pipe.send(transport.address)
    time.sleep(TIMEOUT_S)


@pytest.mark.system
def test_a_donor_killed_in_mid_fetch_is_replaced() -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_donor_process, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(TIMEOUT_S)
    doomed = ours.recv()
    state = make_state()
    survivor = FaultyHttp("")
    survivor.offer("s", state)

    def kill_once(shard: Shard, donor: str, ok: bool) -> None:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)

    got, report = survivor.fetch("s", layout_of(state), [doomed, survivor.address], TIMEOUT_S, kill_once)
    assert_same(got, state)
    assert report.retried["donor_lost"] >= 1
    process.join(TIMEOUT_S)
    survivor.close()
