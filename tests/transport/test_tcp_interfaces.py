"""What keeps a rail from working on this host: an interface that is down, an address that is gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helixrt.lab.namespaces import call
from helixrt.lab.net import Cut, Network
from helixrt.transport.tcp.interfaces import trouble, trouble_of_all
from helixrt.transport.tcp.rails import TcpRail

ASK = """
import sys
from helixrt.transport.tcp.interfaces import trouble
from helixrt.transport.tcp.rails import TcpRail
print(trouble(TcpRail(*sys.argv[1:])))
"""


def test_rails_that_work_have_no_trouble() -> None:
    for address in ("127.0.0.1", "127.0.0.9"):  # the second is of no interface, and works
        assert trouble(TcpRail(address)) == trouble(TcpRail(address, "lo")) == ""


def test_an_address_or_an_interface_that_this_host_has_not_is_named() -> None:
    assert trouble(TcpRail("192.0.2.7")) == "192.0.2.7 is no address of this host any more"
    assert trouble(TcpRail("127.0.0.1", "rail77")) == "network interface rail77 does not exist any more"


def test_one_rail_that_works_is_enough() -> None:
    bad, good = TcpRail("192.0.2.7"), TcpRail("127.0.0.1")
    assert trouble_of_all((bad, good)) == trouble_of_all(()) == ""
    assert trouble_of_all((bad, bad)) == trouble(bad)


@pytest.mark.netns
def test_an_interface_that_is_down_is_named_and_one_without_a_carrier_is_not() -> None:
    with Network(hosts=2, rails=2) as network:

        def asked(rail: int, *device: str) -> str:
            argv = [sys.executable, "-c", ASK, network.address(1, rail), *device]
            return str(network.run(1, argv, stdout=subprocess.PIPE, text=True).communicate(timeout=60)[0]).strip()

        network.cut(1, 0, Cut.DEVICE)
        assert asked(0) == asked(0, "rail0") == "network interface rail0 is down"
        assert asked(1) == asked(1, "rail1") == ""
        network.restore(1, 0)
        assert asked(0) == ""
        call(["ip", "-n", network._switch, "link", "set", network._port(1, 1), "down"])  # the other end of the cable
        assert asked(1) == ""
        call(["ip", "-n", network.namespace(1), "address", "flush", "dev", "rail0"])
        assert asked(0) == f"{network.address(1)} is no address of this host any more"
