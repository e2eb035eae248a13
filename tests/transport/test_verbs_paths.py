"""Hopping over real verbs: several paths over one NIC, one queue pair and flow label each; and paths over several NICs.

The lab's cable treats what comes from each UDP source port by itself (`nic_paths`), and the source port follows from the
flow label: so a path can be made slow without any other, and the kernel counts what went on each.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import pytest

from helixrt.lab.nics import NicPair
from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Unloaded
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.record import FlightRecord, Kind
from helixrt.transport.contract import Endpoint
from helixrt.transport.verbs.connection import VerbsConnection
from helixrt.transport.verbs.devices import VerbsRail
from helixrt.transport.verbs.endpoint import VerbsEndpoint, VerbsOptions
from helixrt.transport.verbs.queue_pair import Patience, Sizes
from tests.transport.conformance import TrafficConformance
from tests.transport.nic_paths import NicPaths
from tests.transport.worlds import SECRET, Message, World

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(400)]

MESSAGE = 256 << 10
PATHS = 3
FAST_MBIT, SLOW_MBIT = 40.0, 4.0
LATENCY_S = 0.03  # what an emulated machine takes to handle a message, on a path without a queue
PATIENCE = Patience(timeout=19, retries=2)  # 2 s: a slow path answers late, and its NIC must not take it for dead
LIMIT_S = 200.0


def hopping(policy: PolicyName = PolicyName.HOPPER, rate_mbit: float = FAST_MBIT) -> LinkOptions:
    unloaded = Unloaded(rate_mbit * 1e6 / 8, LATENCY_S if rate_mbit <= FAST_MBIT else 0.0)
    options = HoppingOptions(unloaded=unloaded, policy=policy, message_bytes=MESSAGE, depth_bytes=2 * MESSAGE)
    return LinkOptions(hopping=options, rest_s=0.02, longest_rest_s=0.1, retry_s=0.05)


def rails(end: str, nics: int, labels: int) -> list[VerbsRail]:
    return [
        VerbsRail(device=NicPair(number).rdma(end), flow_label=label)
        for label in range(1, labels + 1)
        for number in range(1, nics + 1)
    ]


def options(**changes: Any) -> VerbsOptions:
    return VerbsOptions(**({"period_s": 5.0, "patience": PATIENCE, "tcp_fallback": False, "restore_s": 10.0} | changes))


class Ends:
    """Two endpoints joined by paths, all of them up, and their flight records."""

    def __init__(self, nics: int, labels: int, **changes: Any) -> None:
        self.records = [FlightRecord(f"rank {rank}") for rank in (0, 1)]
        ends = iter(zip("ab", self.records, strict=True))

        def make(secret: bytes, heartbeat_s: float | None) -> Endpoint:
            end, record = next(ends)
            return VerbsEndpoint(SECRET, rails(end, nics, labels), options=options(record=record, **changes))

        self.world = World(make, 2)
        self.world.connect()
        self.world.run(lambda: all(rail.usable for rank in (0, 1) for rail in self.link(rank).rails))

    def link(self, rank: int) -> Link:
        link: Link = self.world.endpoints[rank]._peers[1 - rank].link  # type: ignore[attr-defined]
        return link

    def path(self) -> int:
        """That rank 0 uses."""
        policy = self.link(0).policy
        assert policy is not None
        return policy.path

    def connections(self, rank: int) -> list[VerbsConnection]:
        found = self.world.endpoints[rank]._peers[1 - rank].rails  # type: ignore[attr-defined]
        assert all(isinstance(one, VerbsConnection) for one in found)
        return list(found)

    def history(self, kind: Kind) -> list[dict[str, Any]]:
        """What rank 0's flight record has of it."""
        return [dict(event.detail) for event in self.records[0].events() if event.kind is kind]

    def flow(self, op: int, count: int, under_way: int = 4) -> Iterator[int]:
        """Messages of rank 0 to rank 1, each checked; gives how many have come, whenever that is another number."""
        world, messages = self.world, [Message(0, 1, op, index, MESSAGE) for index in range(count)]
        contents = [message.content() for message in messages]
        inboxes = [world.receive(message) for message in messages]
        before, begun, come = len(world.outcomes[1]), 0, 0
        while come < count:
            while begun < min(count, come + under_way):
                world.send(messages[begun], contents[begun])
                begun += 1
            world.run(lambda seen=come: len(world.outcomes[1]) - before > seen, LIMIT_S)  # type: ignore[misc]
            come = len(world.outcomes[1]) - before
            yield come
        world.run(lambda: world.sent(messages) and world.received(messages), LIMIT_S)
        world.settle(0.2)
        assert len(world.outcomes[1]) - before == count, "each once"
        for inbox, content in zip(inboxes, contents, strict=True):
            inbox.check(content)

    def close(self) -> None:
        self.world.close()


@pytest.fixture
def paths(nic_pairs: list[NicPair]) -> Iterator[NicPaths]:
    ports = [rail.udp_port for rail in rails("a", 1, PATHS)]
    made = NicPaths(nic_pairs[0], "a", [port for port in ports if port is not None], FAST_MBIT)
    yield made
    made.close()


@pytest.fixture
def one_nic(paths: NicPaths) -> Iterator[Ends]:
    made = Ends(1, PATHS, link=hopping())
    yield made
    made.close()


@pytest.mark.slow
def test_each_path_is_a_queue_pair_of_its_own_ready_before_it_is_needed(one_nic: Ends, paths: NicPaths) -> None:
    """The flow label of each reaches the wire: what goes over it leaves from its port."""
    for rank in (0, 1):
        pairs = [connection._pair for connection in one_nic.connections(rank)]
        enums = pairs[0].nic.library.enums
        assert len({int(pair.pair.qp_num) for pair in pairs}) == PATHS
        assert len({id(pair.nic) for pair in pairs}) == 1, "one NIC"
        states = [pair.pair.query(enums.QP_STATE)[0].qp_state for pair in pairs]
        assert states == [enums.QPS_RTS] * PATHS
    before = paths.sent_bytes()
    list(one_nic.flow(1, 1))  # looks at three paths first
    asked = one_nic.link(0).options.hopping
    assert asked is not None
    assert all(sent - before[port] >= asked.probe_bytes for port, sent in paths.sent_bytes().items())


def test_a_path_that_becomes_slow_is_left_and_nothing_is_lost(one_nic: Ends, paths: NicPaths) -> None:
    list(one_nic.flow(1, 8))
    used = one_nic.path()
    hops = len(one_nic.history(Kind.HOP))
    paths.set_rate(paths.ports[used], SLOW_MBIT)
    before: dict[int, int] = {}
    for _ in one_nic.flow(2, 60):
        if not before and one_nic.path() != used:
            new, before = one_nic.path(), paths.sent_bytes()
    assert before, f"path {used} was kept; {one_nic.history(Kind.PATH_PROBED)}"
    sent = {port: whole - before[port] for port, whole in paths.sent_bytes().items()}
    told = one_nic.history(Kind.HOP)[hops:]
    assert (told[0]["old"], told[0]["path"], told[0]["reason"]) == (used, new, "congested")
    assert told[0]["rtt_s"] <= 0.8 * told[0]["old_rtt_s"]
    assert {one["path"] for one in one_nic.history(Kind.PATH_PROBED)} >= {new}
    assert sent[paths.ports[new]] > 2 * sent[paths.ports[used]], "the kernel saw the traffic move"


@pytest.mark.slow
def test_a_nic_that_fails_takes_its_paths_with_it_and_the_others_carry_on(nic_pairs: list[NicPair]) -> None:
    ends = Ends(2, 2, link=hopping(rate_mbit=200.0), patience=Patience(timeout=14, retries=2))
    try:
        list(ends.flow(1, 4))
        nic = ends.path() % 2  # labels are the outer turn
        for come in ends.flow(2, 40):
            if come == 10:
                nic_pairs[nic].down("a")
        assert ends.path() % 2 != nic
        assert [one["reason"] for one in ends.history(Kind.HOP) if one["old"] % 2 == nic][-1] == "lost"
        assert {one["rail"] for one in ends.history(Kind.RAIL_LEFT)} == {nic, nic + 2}
        nic_pairs[nic].heal()
        ends.world.run(lambda: all(rail.usable for rail in ends.link(0).rails), LIMIT_S)
        list(ends.flow(3, 10))
    finally:
        ends.close()


# ---------------------------------------------------------------- the shared suite, hopping all the time

_turns = itertools.count()


def restless(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    """Its paths are said to be faster than any, so that every RTT is a congested one."""
    end = "ab"[(next(_turns) + (multiprocessing.parent_process() is not None)) % 2]
    period_s = None if heartbeat_s is None else 5 * heartbeat_s
    link = hopping(PolicyName.FLOWBENDER, 1e6)
    few = Sizes(chunk_bytes=256 << 10, slots=4)  # four ranks have two dozen queue pairs, and one guest has all of their memory
    return VerbsEndpoint(secret, rails(end, 1, 2), options=options(period_s=period_s, link=link, sizes=few))


@pytest.mark.slow
@pytest.mark.grid
class TestVerbsEndpointThatHopsAllTheTime(TrafficConformance):
    make = staticmethod(restless)

    @pytest.fixture(autouse=True)
    def _first_is_a(self) -> None:
        global _turns
        _turns = itertools.count()


@pytest.mark.slow
def test_hops_all_the_time_lose_and_double_nothing(nic_pairs: list[NicPair], seed: int) -> None:
    ends, rng = Ends(1, PATHS, link=hopping(PolicyName.FLOWBENDER, 1e6)), random.Random(seed)
    try:
        for op in range(3):
            sizes = [rng.choice((300, 70_000, 2 * MESSAGE)) for _ in range(20)]
            ends.world.exchange([Message(a, 1 - a, op, i, size) for a in (0, 1) for i, size in enumerate(sizes)], rng)
        assert all(ends.link(rank).policy.switches > 2 for rank in (0, 1))  # type: ignore[union-attr]
    finally:
        ends.close()
