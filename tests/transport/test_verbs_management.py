"""The network over which queue pairs are set up is lost while a link is on its backup: what is up goes on, and no more.

What SHIFT keeps in a store goes over proved connections here (`verbs.setup`). When they cannot be had, no rail comes back; and
when the last one fails, the two ends cannot agree on anything, so the link ends with an error at both, and for good.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator

import pytest

from helixrt.lab.nics import NicPair
from helixrt.protocol.link.rails import SendState
from helixrt.transport.contract import Received
from tests.transport.test_verbs_lab import BACKUP, LIMIT_S, PAIR, Stream, link_of, open_world

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(400)]

PERIOD_S = 2.0


def tc(words: str) -> None:
    subprocess.run(["tc", *words.split()], check=True, capture_output=True, timeout=60)


@pytest.fixture
def lose_management() -> Iterator[Callable[[bool], None]]:
    """Both ends meet on loopback, where from now on everything is lost without a word, or nothing is any more."""
    lost = False

    def lose(now: bool) -> None:
        nonlocal lost
        if now != lost:
            tc("qdisc replace dev lo root netem limit 100000 loss 100%" if now else "qdisc del dev lo root")
            lost = now

    yield lose
    lose(False)


@pytest.mark.parametrize("tcp_fallback", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_link_whose_exchange_is_lost_during_a_fallback_fails_closed(
    nic_pairs: list[NicPair], lose_management: Callable[[bool], None], tcp_fallback: bool
) -> None:
    world = open_world(tcp_fallback, PERIOD_S)
    try:
        stream, default = Stream(world, random.Random(11), 300), link_of(world, 0).rails[PAIR]
        stream.until(lambda: stream.came >= 20)
        nic_pairs[PAIR].blackhole()
        stream.until(lambda: default.send is SendState.FALLBACK)
        lose_management(True)
        came = stream.came
        stream.until(lambda: stream.came >= came + 40)  # the backup was set up long before
        nic_pairs[BACKUP].blackhole()
        world.run(lambda: stream.go_on() or bool(world.ended(0)) and bool(world.ended(1)), LIMIT_S)
        for rank in (0, 1):
            (ended,) = world.ended(rank)
            assert ended.cause.what
        for pair in nic_pairs:
            pair.heal()
        lose_management(False)
        told = [len(outcomes) for outcomes in world.outcomes]
        world.settle(1.0)
        assert [len(outcomes) for outcomes in world.outcomes] == told, "it is over, whatever works again"
        arrived = [outcome.index for outcome in world.outcomes[1] if isinstance(outcome, Received)]
        assert len(set(arrived)) == len(arrived) < stream.count
        for index in arrived:
            stream.inboxes[index].check(stream.contents[index])
        for inbox in stream.inboxes:
            inbox.check_guards()
    finally:
        world.close()


@pytest.mark.slow
def test_a_rail_comes_back_only_when_its_attributes_can_be_exchanged(
    nic_pairs: list[NicPair], lose_management: Callable[[bool], None]
) -> None:
    world = open_world(False, PERIOD_S)
    try:
        stream, default = Stream(world, random.Random(12), 300), link_of(world, 0).rails[PAIR]
        stream.until(lambda: stream.came >= 20)
        nic_pairs[PAIR].blackhole()
        stream.until(lambda: default.send is SendState.FALLBACK)
        lose_management(True)
        nic_pairs[PAIR].heal()
        came = stream.came
        stream.until(lambda: stream.came >= came + 100)
        assert not default.up, "nothing is set up over what the two ends did not agree on"
        lose_management(False)
        world.run(lambda: stream.go_on() and default.usable, LIMIT_S)
        stream.check()
    finally:
        world.close()
