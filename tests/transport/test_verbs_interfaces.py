"""The network interfaces behind RoCE ports: what messages of the kernel say, and that a failure is told, once."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from helixrt.lab.namespaces import call
from helixrt.lab.net import Network
from helixrt.transport.tcp.watch import READ, Watch
from helixrt.transport.verbs import interfaces as module
from helixrt.transport.verbs import port_watch
from helixrt.transport.verbs.interfaces import Change, Followed, Interfaces, change
from helixrt.transport.verbs.port_watch import Place, PortWatch

UP, RUNNING, LOWER_UP = 0x1, 0x40, 0x10000
NEW, GONE, ROUTE = 16, 17, 24
LOOPBACK = ipaddress.IPv6Address("::ffff:127.0.0.1")

# ---------------------------------------------------------------- what a message says


def message(kind: int, index: int, flags: int, family: int = socket.AF_UNSPEC) -> bytes:
    """As in rtnetlink(7), with an attribute behind."""
    body = struct.pack("=BxHiII", family, 1, index, flags, 0xFFFFFFFF) + struct.pack("=HH8s", 12, 3, b"eth0\0")
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


@pytest.mark.parametrize(
    "said, meant",
    [
        (message(NEW, 7, UP | RUNNING | LOWER_UP), Change(7, True)),
        (message(NEW, 7, UP), Change(7, False)),  # its carrier is gone
        (message(NEW, 7, 0), Change(7, False)),
        (message(NEW, 7, RUNNING), Change(7, False)),
        (message(GONE, 7, UP | RUNNING), Change(7, False)),
        (message(GONE, 7, UP | RUNNING, socket.AF_BRIDGE), None),  # it left a bridge
        (message(ROUTE, 7, 0), None),
        (message(NEW, 7, UP | RUNNING)[:32], Change(7, True)),
        (message(NEW, 7, UP | RUNNING)[:31], None),
        (b"", None),
    ],
)
def test_a_message_says_of_an_interface_whether_it_works(said: bytes, meant: Change | None) -> None:
    assert change(said) == meant


def test_every_failure_is_told_once_and_of_followed_interfaces_only(seed: int) -> None:
    rng, followed = random.Random(seed), Followed()
    works = {index: rng.random() < 0.5 for index in range(1, 6)}
    for index in (1, 2, 3):
        followed.add(f"eth{index}", index, works[index])
    told, meant = [], []
    for _ in range(500):
        index, now = rng.randrange(1, 6), rng.random() < 0.5
        if works[index] and not now and index <= 3:
            meant.append(f"eth{index}")
        works[index] = now
        told.append(followed.heard(Change(index, now)))
    assert [name for name in told if name] == meant and meant


def test_an_interface_that_was_made_anew_takes_the_place_of_the_old_one() -> None:
    followed = Followed()
    followed.add("eth0", 4, True)
    followed.add("eth0", 9, True)
    assert (9, "eth0") in followed and (4, "eth0") not in followed
    assert followed.works("eth0") and not followed.works("eth1")
    assert followed.heard(Change(4, False)) is None and followed.heard(Change(9, False)) == "eth0"
    assert not followed.works("eth0")


def test_what_is_not_of_this_namespace_is_not_followed() -> None:
    interfaces = Interfaces()
    try:
        interfaces.follow("lo", LOOPBACK)
        with pytest.raises(OSError, match="no interface with this name"):
            interfaces.follow("no-such-nic", LOOPBACK)
        with pytest.raises(OSError, match="Cannot assign requested address"):
            interfaces.follow("lo", ipaddress.IPv6Address("::ffff:203.0.113.9"))
        assert interfaces.failed() == []
    finally:
        interfaces.close()


class Overrun:
    """A socket that lost messages, once."""

    def __init__(self) -> None:
        self._lost = True

    def recvfrom(self, size: int) -> tuple[bytes, tuple[int, int]]:
        if not self._lost:
            raise BlockingIOError
        self._lost = False
        raise OSError(errno.ENOBUFS, "No buffer space available")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("works", [True, False])
def test_where_messages_were_lost_the_interfaces_are_looked_at(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    interfaces = Interfaces()
    interfaces.follow("lo", LOOPBACK)
    interfaces._kernel.close()
    interfaces._kernel = Overrun()  # type: ignore[assignment]
    monkeypatch.setattr(module, "_looks", lambda name: works)
    assert interfaces.failed() == ([] if works else ["lo"])
    assert interfaces.failed() == []


# ---------------------------------------------------------------- what is urgent


def test_what_is_calmed_while_it_is_ready_comes_after_the_others() -> None:
    watch, heard = Watch(), []
    pairs = [socket.socketpair() for _ in range(3)]
    handlers = [
        lambda mask: (heard.append(0), watch.calm(pairs[1][0]), watch.calm(pairs[0][0])),
        lambda mask: (heard.append(1), watch.calm(pairs[0][0]), watch.calm(pairs[1][0])),
        lambda mask: heard.append(2),
    ]
    for (ours, theirs), handler, urgent in zip(pairs, handlers, (True, True, False), strict=True):
        watch.add(ours, READ, handler, urgent)  # type: ignore[arg-type]
        theirs.send(b"x")
    assert watch.dispatch()
    assert len(heard) == 3 and heard[1] == 2
    watch.close()
    for pair in pairs:
        for each in pair:
            each.close()


def test_what_is_urgent_can_be_looked_for_alone() -> None:
    watch, heard = Watch(), []
    pairs = [socket.socketpair() for _ in range(4)]
    for number, (ours, theirs) in enumerate(pairs):
        watch.add(ours, READ, lambda mask, number=number: heard.append(number), urgent=number in (1, 2))  # type: ignore[misc]
        theirs.send(b"x")

    def looked() -> list[int]:
        heard.clear()
        watch.look_first()
        return sorted(heard)

    assert looked() == [1, 2]
    watch.calm(pairs[1][0])
    assert looked() == [2]
    watch.hurry(pairs[0][0], READ)
    watch.hurry(pairs[0][0], READ)
    watch.remove(pairs[2][0])
    assert looked() == [0]
    heard.clear()
    assert watch.dispatch()
    assert heard[0] == 0 and sorted(heard) == [0, 1, 3]
    watch.close()
    for pair in pairs:
        for each in pair:
            each.close()


# ---------------------------------------------------------------- the first of two ways


class FakeEnums:
    EVENT_PORT_ERR, EVENT_PORT_ACTIVE, EVENT_DEVICE_FATAL, OTHER = range(4)


class FakeNic:
    """A port whose events the test makes."""

    def __init__(self, interface: str = "eth0", ethernet: bool = True) -> None:
        self.events = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
        self.library = SimpleNamespace(enums=FakeEnums)
        self.port, self.gid = SimpleNamespace(ethernet=ethernet), SimpleNamespace(interface=interface, address=LOOPBACK)
        self.active = True
        self._kinds: list[int] = []

    def __del__(self) -> None:
        os.close(self.events)

    def happens(self, kind: int) -> None:
        self._kinds.append(kind)
        os.eventfd_write(self.events, 1)

    def event(self) -> int:
        os.eventfd_read(self.events)
        return self._kinds.pop(0)

    def is_active(self) -> bool:
        return self.active


class FakeInterfaces:
    """Tells what the test says."""

    made: list[FakeInterfaces] = []

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.followed: list[str] = []
        self.back = False
        self.made.append(self)

    def fileno(self) -> int:
        return self._ours.fileno()

    def follow(self, name: str, address: ipaddress.IPv6Address) -> None:
        self.followed.append(name)

    def fails(self, name: str) -> None:
        self._theirs.send(name.encode())

    def failed(self) -> list[str]:
        return [self._ours.recv(100).decode()]

    def works(self, name: str) -> bool:
        return self.back

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Ports:
    """A watch of ports, and what it has told."""

    def __init__(self) -> None:
        self.watch, self.told = Watch(), []  # type: tuple[Watch, list[Any]]
        self.ports = PortWatch(self.watch, lambda place, reason: self.told.append((place, reason)), self.told.append)

    def look(self) -> list[Any]:
        """What is told now."""
        self.told.clear()
        while self.watch.dispatch():
            pass
        return list(self.told)


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ports]:
    FakeInterfaces.made.clear()
    monkeypatch.setattr(port_watch, "Interfaces", FakeInterfaces)
    one = Ports()
    yield one
    one.ports.close()
    one.watch.close()


PLACE: Place = ("mlx5_0", 1, None)
DOWN = (PLACE, "its network interface eth0 is down")


def test_a_port_fails_when_its_interface_does_and_is_active_when_verbs_say_so(ports: Ports) -> None:
    nic = FakeNic()
    ports.ports.add(PLACE, nic)  # type: ignore[arg-type]
    ports.ports.add(("mlx5_1", 1, None), FakeNic("eth1"))  # type: ignore[arg-type]
    (kernel,) = FakeInterfaces.made
    assert kernel.followed == ["eth0", "eth1"] and ports.look() == []
    kernel.fails("eth0")
    assert ports.look() == [DOWN]
    nic.happens(FakeEnums.OTHER)
    assert ports.look() == []
    kernel.back = True  # it was down for a moment
    nic.happens(FakeEnums.EVENT_PORT_ERR)  # of the same failure
    assert ports.look() == []
    nic.happens(FakeEnums.EVENT_PORT_ACTIVE)
    assert ports.look() == [PLACE]
    nic.happens(FakeEnums.EVENT_PORT_ERR)  # another one
    assert ports.look() == [(PLACE, "asynchronous event PORT_ERR")]


@pytest.mark.parametrize(
    "back, active, kind",
    [
        (False, True, FakeEnums.EVENT_PORT_ERR),
        (True, False, FakeEnums.EVENT_PORT_ERR),
        (True, True, FakeEnums.EVENT_DEVICE_FATAL),
    ],
)
def test_an_event_of_a_port_that_is_not_back_counts(ports: Ports, back: bool, active: bool, kind: int) -> None:
    nic = FakeNic()
    ports.ports.add(PLACE, nic)  # type: ignore[arg-type]
    FakeInterfaces.made[0].fails("eth0")
    assert ports.look() == [DOWN]
    FakeInterfaces.made[0].back, nic.active = back, active
    nic.happens(kind)
    ((place, reason),) = ports.look()
    assert place == PLACE and reason.startswith("asynchronous event")


def test_the_event_of_a_failure_that_was_told_is_in_no_hurry_until_it_has_come(ports: Ports) -> None:
    nic = FakeNic()
    ports.ports.add(PLACE, nic)  # type: ignore[arg-type]
    FakeInterfaces.made[0].fails("eth0")
    nic.happens(FakeEnums.EVENT_PORT_ERR)
    ports.watch.look_first()
    ports.watch.look_first()
    assert ports.told == [DOWN]
    assert len(ports.look()) == 1
    ports.told.clear()
    nic.happens(FakeEnums.EVENT_PORT_ERR)
    ports.watch.look_first()
    assert len(ports.told) == 1


def test_a_port_without_a_network_interface_is_told_of_by_verbs(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    infiniband = FakeNic(ethernet=False)
    ports.ports.add(PLACE, infiniband)  # type: ignore[arg-type]
    assert not FakeInterfaces.made
    infiniband.happens(FakeEnums.EVENT_PORT_ERR)
    assert ports.look() == [(PLACE, "asynchronous event PORT_ERR")]

    def refused(self: object, *args: object) -> None:
        raise PermissionError(errno.EPERM, "no such socket here")

    monkeypatch.setattr(FakeInterfaces, "__init__", refused)
    alone, place = FakeNic(), ("mlx5_1", 1, None)
    ports.ports.add(place, alone)  # type: ignore[arg-type]
    alone.happens(FakeEnums.EVENT_PORT_ACTIVE)
    assert ports.look() == [place]


def test_when_the_messages_end_verbs_go_on_telling(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    nic = FakeNic()
    ports.ports.add(PLACE, nic)  # type: ignore[arg-type]

    def broken(self: FakeInterfaces) -> list[str]:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(FakeInterfaces, "failed", broken)
    FakeInterfaces.made[0].fails("eth0")
    assert ports.look() == []
    nic.happens(FakeEnums.EVENT_PORT_ERR)
    assert ports.look() == [(PLACE, "asynchronous event PORT_ERR")]
    ports.ports.add(PLACE, nic)  # type: ignore[arg-type]  # in service again: followed again
    assert FakeInterfaces.made[1].followed == ["eth0"]


# ---------------------------------------------------------------- the kernel

FOLLOWER = """
import ipaddress, select, sys
from helixrt.transport.verbs.interfaces import Interfaces
interfaces = Interfaces()
interfaces.follow(sys.argv[1], ipaddress.IPv6Address("::ffff:" + sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    names = []
    while select.select([interfaces], [], [], 0)[0]:  # what is there: nothing is waited for
        names += interfaces.failed()
    print(*names, flush=True)
"""


class Follower:
    def __init__(self, net: Network) -> None:
        program = [sys.executable, "-c", FOLLOWER, net.device(0), net.address(0)]
        self._process = net.run(0, program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._hear() == "ready"

    def _hear(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 60)
        assert ready
        return str(self._process.stdout.readline()).strip()

    def told(self) -> list[str]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._hear().split()


@pytest.mark.netns
def test_an_interface_that_was_taken_down_has_been_told_of_when_the_call_returns() -> None:
    with Network(hosts=2, rails=2) as net:
        follower, device = Follower(net), net.device(0)
        assert follower.told() == []
        net.cut(0, 1)  # another interface
        assert follower.told() == []
        for _ in range(3):
            net.cut(0, 0)
            assert follower.told() == [device]
            assert follower.told() == []
            net.restore(0, 0)
            wait_until_it_runs(net, device)
            assert follower.told() == []
        call(["ip", "-n", net.namespace(0), "link", "set", device, "mtu", "1400"])
        assert follower.told() == []
        call(["ip", "-n", net.namespace(0), "link", "delete", device])
        assert follower.told() == [device]


def wait_until_it_runs(net: Network, device: str) -> None:
    """The kernel says that it has a carrier a moment later."""
    monitor = ["ip", "-n", net.namespace(0), "link", "show", device]
    for _ in range(200):
        if "state UP" in call(monitor):
            return
    raise AssertionError(f"{device} does not run")
