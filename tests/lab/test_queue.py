"""How long packets may wait at a rated link: changed while the network exists, one direction at a time."""

from __future__ import annotations

import re

import pytest

from helixrt.errors import ConfigError
from helixrt.lab.namespaces import call
from helixrt.lab.net import Direction, Network


def waits_ms(net: Network, host: int) -> float:
    """What the kernel says of the queue of a host's device."""
    said = call(["tc", "-n", net.namespace(host), "qdisc", "show", "dev", net.device()])
    found = re.search(r"lat (\d+(?:\.\d+)?)(us|ms|s)\b", said)
    assert found, said
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]


@pytest.mark.netns
def test_a_queue_can_be_made_shorter_and_the_rate_stays() -> None:
    with Network(hosts=2, rate_mbit=20.0) as net:
        assert waits_ms(net, 0) == pytest.approx(200.0, rel=0.05)
        net.set_queue(0, 0, 40.0, Direction.IN)
        assert waits_ms(net, 0) == pytest.approx(200.0, rel=0.05), "only what it receives"
        net.set_queue(0, 0, 40.0)
        assert waits_ms(net, 0) == pytest.approx(40.0, rel=0.05) and net.rate(0) == 20.0
        net.set_rate(0, 0, 10.0)
        assert waits_ms(net, 0) == pytest.approx(40.0, rel=0.05), "in time, not in bytes"
        with pytest.raises(ConfigError, match="queue_ms"):
            net.set_queue(0, 0, 0.0)
