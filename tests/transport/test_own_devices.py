"""What of this host keeps RDMA ports from working: the decision, and as the kernel's files and interfaces say it."""

from __future__ import annotations

import ipaddress
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helixrt.errors import Cause
from helixrt.protocol.link import frames
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.transport.contract import Lost, Outcome, PeerAborted
from helixrt.transport.tcp.interfaces import of_all
from helixrt.transport.tcp.peer import CONTROL
from helixrt.transport.tcp.rails import TcpRail
from helixrt.transport.verbs.devices import Gid, Port
from helixrt.transport.verbs.own_devices import OwnPort, State, trouble
from helixrt.transport.verbs.peer import VerbsPeer

GONE, HERE = TcpRail("192.0.2.7"), TcpRail("127.0.0.1")  # addresses of the management network


def test_only_what_is_wrong_on_this_host_counts() -> None:
    truth = (False, True)
    for exists, ethernet, off, interface in itertools.product(truth, truth, truth, ("", "eth0 is down")):
        said = trouble("mlx5_0", 1, State(exists, ethernet, off, interface))
        counts = not exists or (bool(interface) if ethernet else off)  # a pulled cable switches an Ethernet port "off", too
        assert bool(said) is counts and (not said or said.startswith("RDMA port mlx5_0/1"))
        assert ("eth0 is down" in said) is (exists and ethernet and bool(interface))


def test_all_must_be_in_trouble_and_each_is_named_once() -> None:
    assert of_all([]) == of_all([""]) == of_all(["a is down", ""]) == ""
    assert of_all(["a is down", "b is down", "a is down"]) == "a is down, b is down"


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """What it shows of a host with one RDMA port, which is down."""
    folder = tmp_path / "mlx5_0" / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "state").write_text("1: DOWN\n")
    (folder / "phys_state").write_text("2: Polling\n")
    return tmp_path


def test_an_infiniband_port_is_in_trouble_when_it_is_switched_off_or_gone(kernel: Path) -> None:
    port = OwnPort("mlx5_0", 1, False, "", kernel)
    assert port.trouble() == "", "it looks for the other end of its cable"
    (kernel / "mlx5_0/ports/1/phys_state").write_text("3: Disabled\n")
    assert port.trouble() == "RDMA port mlx5_0/1 is switched off"
    assert OwnPort("mlx5_0", 2, False, "", kernel).trouble() == "RDMA port mlx5_0/2 does not exist any more"


def test_a_port_of_ethernet_is_judged_by_its_interface(kernel: Path) -> None:
    assert OwnPort("mlx5_0", 1, True, "lo", kernel).trouble() == "", "whatever the port says"
    said = OwnPort("mlx5_0", 1, True, "rail77", kernel).trouble()
    assert said == "RDMA port mlx5_0/1: network interface rail77 does not exist any more"


def port_of(address: str, interface: str) -> OwnPort:
    gid = Gid(0, ipaddress.IPv6Address(address), "RoCE v2", interface)
    return OwnPort.of(Port("mlx5_0", 1, True, True, 0, (gid,)), gid)


def test_of_an_interface_that_is_not_in_this_namespace_nothing_is_known() -> None:
    assert port_of("::ffff:127.0.0.1", "lo").interface == "lo"
    for elsewhere in (port_of("::ffff:192.0.2.7", "lo"), port_of("::ffff:10.0.0.1", "rail77"), port_of("::1", "")):
        assert elsewhere.interface == ""


# ---------------------------------------------------------------- a peer that is lost


class Hears:
    """A `Host` that notes how a peer ends."""

    now = 1.0

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def touched(self, peer: Any) -> None:
        pass


@dataclass
class RailOf:
    """As much of a connection as a frame that comes on it needs."""

    number: int


def end_by(kernel: Path, ports: list[str], management: list[TcpRail], tells: bool) -> Cause:
    """Why a peer has ended that was lost, or `tells` that it lost this rank, on a host whose ports use network interfaces of
    these names."""
    rails, host = len(ports) + len(management), Hears()
    own = tuple(OwnPort("mlx5_0", 1, True, name, kernel) for name in ports)
    link = Link(1, 1, rails, LinkOptions(striped=False))
    ways = tuple([HERE] * len(ports) + management)
    peer = VerbsPeer(host, 1, link, [("", 0)] * rails, ways, own, ("",) * len(ports))  # type: ignore[arg-type]
    if tells:
        word = Frame(Kind.ABORT, 1, body=frames.cause_body(Cause("no sign of life", "rank 1")))
        peer.frame_came(RailOf(CONTROL), word)  # type: ignore[arg-type]
    else:
        peer.lose(Cause("no sign of life", "rank 1"))
    (end,) = host.outcomes
    assert isinstance(end, PeerAborted if tells else Lost)
    return end.cause


@pytest.mark.parametrize("tells", [False, True], ids=["it fell silent", "it tells"])
@pytest.mark.parametrize(
    ("ports", "management", "own"),
    [
        (["rail77", "rail78"], [], True),
        (["rail77", "lo"], [], False),
        (["rail77", "rail78"], [HERE], False),
        (["rail77", "rail78"], [GONE], True),
        (["lo", "lo"], [GONE], False),
    ],
    ids=["all ports", "one of two ports", "TCP is left", "all ports and TCP", "TCP alone"],
)
def test_a_link_ends_by_own_trouble_only_if_no_rail_of_this_host_works(
    kernel: Path, ports: list[str], management: list[TcpRail], own: bool, tells: bool
) -> None:
    cause = end_by(kernel, ports, management, tells)
    assert cause.own_device is own and cause.what.startswith("no sign of life")
    named = re.findall(r"network interface (\w+) does not exist", cause.what)
    assert named == ([name for name in ports if name != "lo"] if own else [])
    assert ("192.0.2.7" in cause.what) is (own and GONE in management)
