"""Two hosts joined by two rails: a rail is cut and restored in the middle; everything arrives once, over what is left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helixrt.lab.net import Cut, Network
from tests.transport.told import Told

pytestmark = pytest.mark.netns

RANK = Path(__file__).with_name("rails_rank.py")
MESSAGES, SIZE = 120, 500_000  # 60 MB each way


class Rank(Told):
    def __init__(self, net: Network, host: int) -> None:
        super().__init__(net, host, str(RANK))

    def hear_until(self, key: str, least: int = 0) -> Any:
        while not (said := self.hear()).get(key) or (least and said[key] < least):
            assert "lost" not in said, said
        return said[key]


@pytest.fixture
def net() -> Iterator[Network]:
    with Network(hosts=2, rails=2, rate_mbit=200.0) as made:
        yield made


@pytest.mark.parametrize("at", [Cut.PATH, Cut.DEVICE])
def test_messages_survive_the_loss_of_a_rail_and_its_return(net: Network, at: Cut) -> None:
    ranks = [Rank(net, host) for host in (0, 1)]
    addresses = [rank.hear()["address"] for rank in ranks]
    for me, rank in enumerate(ranks):
        told = {"me": me, "peer": addresses[1 - me], "messages": MESSAGES, "size": SIZE}
        rank.tell(json.dumps(told | {"held": MESSAGES // 4}))  # until the rail is cut, however fast the others go
    ranks[0].hear_until("came", MESSAGES // 4)
    net.cut(1, 1, at)
    for rank in ranks:
        rank.tell("more")
    for rank in ranks:
        counters = rank.hear_until("done")
        assert counters["failovers"] == 1 and counters["failbacks"] == 0, counters
    net.restore(1, 1)
    for rank in ranks:
        while rank.hear_until("done")["failbacks"] < 1:
            pass  # until the rail carries again; the test's time-out ends what never comes
    for rank in ranks:
        with suppress(BrokenPipeError):  # the other one ended, and so did it
            rank.tell("end")
        assert rank.process.wait(60) == 0


DOWN = "here, network interface rail0 is down, network interface rail1 is down"


@pytest.mark.parametrize("at", [Cut.PATH, Cut.DEVICE])
def test_a_rank_whose_own_devices_are_all_down_says_so_and_its_peer_does_not(net: Network, at: Cut) -> None:
    ranks = [Rank(net, host) for host in (0, 1)]
    addresses = [rank.hear()["address"] for rank in ranks]
    for me, rank in enumerate(ranks):
        rank.tell(json.dumps({"me": me, "peer": addresses[1 - me], "messages": 10, "size": 1000}))
    for rank in ranks:
        rank.hear_until("done")
    for rail in (0, 1):
        net.cut(1, rail, at)
    lost = []
    for rank in ranks:
        while "lost" not in (said := rank.hear()):
            pass
        lost.append(said["lost"])
    assert "own_device=False" in lost[0] and "here," not in lost[0], lost
    if at is Cut.DEVICE:
        assert "own_device=True" in lost[1] and DOWN in lost[1], lost
    else:
        assert "own_device=False" in lost[1] and "here," not in lost[1], lost


def test_a_rank_that_cannot_connect_because_its_own_devices_are_down_says_so(net: Network) -> None:
    ranks = [Rank(net, host) for host in (0, 1)]
    addresses = [rank.hear()["address"] for rank in ranks]
    for rail in (0, 1):
        net.cut(1, rail, Cut.DEVICE)
    for me, rank in enumerate(ranks):
        rank.tell(json.dumps({"me": me, "peer": addresses[1 - me], "messages": 10, "size": 1000}))
    said = [rank.process.communicate(timeout=60)[1] for rank in ranks]
    assert "Retryable: generation 1 is not complete" in said[0] and "here," not in said[0]
    assert "Retryable: generation 1 is not complete" in said[1] and DOWN in said[1]
