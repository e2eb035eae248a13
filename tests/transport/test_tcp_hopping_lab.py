"""Two hosts joined by two paths: the one in use becomes ten times slower, and the link hops to the other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helixrt.lab.net import Network
from tests.transport.told import Told

pytestmark = pytest.mark.netns

CHUNK = 256 << 10
FAST_MBIT, SLOW_MBIT = 200.0, 20.0
UNLOADED = {"rate_bytes_per_s": 23e6, "latency_s": 2e-3}


class Host(Told):
    """A program of `helixrt bench hopping`, which needs no torch."""

    def __init__(self, net: Network, number: int) -> None:
        super().__init__(net, number, "-P", "-m", "helixrt.bench._hopping_rank")

    def do(self, what: str, **arguments: Any) -> None:
        self.tell(json.dumps({"do": what, **arguments}))

    def ask(self, what: str, **arguments: Any) -> Any:
        self.do(what, **arguments)
        return self.hear()


@pytest.fixture
def net() -> Iterator[Network]:
    with Network(hosts=2, rails=2, rate_mbit=FAST_MBIT) as made:
        yield made


def flow(sender: Host, receiver: Host, op: int, count: int) -> dict[str, Any]:
    receiver.ask("receive", op=op, chunk=CHUNK, chunks={"0": count})
    receiver.do("arrived", count=count)
    said = sender.ask("send", to=1, op=op, chunk=CHUNK, count=count, at_s=time.monotonic())
    assert receiver.hear() == count
    return said


def test_a_path_that_becomes_slow_is_left_and_the_record_tells(net: Network) -> None:
    hosts = [Host(net, number) for number in range(2)]
    hopping = {"policy": "hopper", "message_bytes": CHUNK, "depth_bytes": 2 * CHUNK, "unloaded": UNLOADED}
    addresses = [host.ask("open", side="helix", rails=2, hopping=hopping) for host in hosts]
    for me, host in enumerate(hosts):
        host.do("connect", side="helix", generation=1, me=me, peers={1 - me: addresses[1 - me]})
    for host in hosts:
        host.hear()
    flow(*hosts, 1, 4)
    carried = flow(*hosts, 2, 8)["bytes"]
    used = carried.index(max(carried))
    net.set_rate(1, used, SLOW_MBIT)
    told = len(hosts[0].ask("history", side="helix"))
    said = flow(*hosts, 3, 40)
    history = hosts[0].ask("history", side="helix")[told:]
    hops = [event["detail"] for event in history if event["kind"] == "hop"]
    assert hops and len(hops) == said["hops"]
    assert (hops[0]["old"], hops[0]["path"], hops[0]["reason"]) == (used, 1 - used, "congested")
    assert hops[0]["rtt_s"] <= 0.8 * 7 * (CHUNK / 23e6 + 2e-3), "the probe that decided it"
    assert {"path_probed", "hop"} == {event["kind"] for event in history}
    assert said["bytes"][used] < said["bytes"][1 - used] / 2, "most went over the other path"
    for host in hosts:
        host.process.communicate(timeout=60)
        assert host.process.returncode == 0
