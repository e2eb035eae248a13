"""Endpoints over real verbs, in the lab's VM: the shared suite, and striped rails that fail (more in `test_verbs_lab`).

Endpoints of a world take the two ends of the NIC pairs in turn, so what goes between neighbouring ranks crosses the cables.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helixrt.errors import Cause
from helixrt.lab.nics import NicPair
from helixrt.transport.contract import Endpoint, Lost
from tests.transport.conformance import MIB, EndpointConformance
from tests.transport.worlds import Inbox, Message, World

pytestmark = pytest.mark.rdma

_turns = itertools.count()


@pytest.fixture(autouse=True)
def _first_is_a() -> None:
    global _turns
    _turns = itertools.count()


def make(secret: bytes, heartbeat_s: float | None, **changes: Any) -> Endpoint:
    """The next end of both pairs; a process of its own is the other end of its parent's first."""
    from helixrt.transport.verbs.devices import VerbsRail
    from helixrt.transport.verbs.endpoint import VerbsEndpoint, VerbsOptions
    from helixrt.transport.verbs.queue_pair import Patience, Sizes

    end = "ab"[(next(_turns) + (multiprocessing.parent_process() is not None)) % 2]
    rails = [VerbsRail(device=NicPair(number).rdma(end)) for number in (1, 2)]
    # An emulated machine, busy with other tests, may answer late, and be slow to set a queue pair up.
    period_s = None if heartbeat_s is None else 5 * heartbeat_s
    options = {"period_s": period_s, "patience": Patience(timeout=14, retries=2), "restore_s": 10.0} | changes
    options.setdefault("sizes", Sizes(chunk_bytes=256 << 10))  # so that messages of the suite take several
    return VerbsEndpoint(secret, rails, options=VerbsOptions(**options))


@pytest.mark.slow
class TestVerbsEndpoint(EndpointConformance):
    make = staticmethod(make)
    long_bytes = 4 * MIB  # 32 MiB take minutes in the emulated machine


# ---------------------------------------------------------------- rails that fail


class Stream:
    """Messages of rank 0 to rank 1, one after the other, a few under way at a time; each is checked when it has come."""

    def __init__(self, world: World, sizes: list[int]) -> None:
        self.world = world
        self.messages = [Message(0, 1, 1, index, size) for index, size in enumerate(sizes)]
        self.contents = [memoryview(message.content()) for message in self.messages]
        self.inboxes = [world.receive(message) for message in self.messages]
        self.begun = 0

    def done(self) -> int:
        return sum(1 for o in self.world.outcomes[1] if not isinstance(o, Lost))

    def go_on(self, under_way: int = 4) -> bool:
        """Begin what may go; whether all has come."""
        while self.begun < len(self.messages) and self.begun < self.done() + under_way:
            self.world.send(self.messages[self.begun], self.contents[self.begun].obj)  # type: ignore[arg-type]
            self.begun += 1
        return self.world.received(self.messages) and self.world.sent(self.messages)

    def check(self) -> None:
        assert not self.world.ended(0) and not self.world.ended(1)
        assert len(self.world.outcomes[1]) == len(self.messages)  # nothing twice
        for message, inbox in zip(self.messages, self.inboxes, strict=True):
            inbox.check(message.content())


def link_of(world: World, rank: int) -> Any:
    return world.endpoints[rank]._peers[1 - rank].link  # type: ignore[attr-defined]


def wait_for_all_rails(world: World) -> None:
    """Backups are set up in the background."""
    world.run(lambda: all(rail.usable for rank in (0, 1) for rail in link_of(world, rank).rails))


@pytest.fixture
def two(nic_pairs: list[NicPair]) -> Iterator[World]:
    world = World(make, 2)
    world.connect()
    wait_for_all_rails(world)
    yield world
    world.close()


HOW: dict[str, Callable[[World, NicPair], object]] = {
    "local down": lambda world, pair: pair.down("a"),
    "remote down": lambda world, pair: pair.down("b"),
    "blackhole": lambda world, pair: pair.blackhole(),
    "answers lost": lambda world, pair: pair.blackhole("b"),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how == "local down" else pytest.mark.slow) for how in HOW])
def test_a_stream_goes_on_over_the_backup_and_comes_back(two: World, nic_pairs: list[NicPair], how: str) -> None:
    rng = random.Random(how)
    stream = Stream(two, [rng.choice([100, 40_000, 300_000, MIB]) for _ in range(40)])
    two.run(lambda: stream.go_on() or stream.done() >= 12)
    HOW[how](two, nic_pairs[0])
    two.run(lambda: stream.go_on() or stream.done() >= 30)
    assert link_of(two, 0).failovers >= 1
    nic_pairs[0].heal()
    two.run(stream.go_on)
    stream.check()
    wait_for_all_rails(two)
    assert link_of(two, 0).failbacks >= 1
    two.exchange([Message(0, 1, 2, 0, MIB), Message(1, 0, 2, 0, MIB)], random.Random(1))


@pytest.mark.parametrize("late", [False, True])
def test_who_asks_for_a_rail_that_the_other_end_sets_up_does_not_take_it_down_later(
    nic_pairs: list[NicPair], late: bool
) -> None:
    """The end that is dialled waits for that, so long; the wait must not outlive the coming of the rail."""
    wait_s = 3.0
    world = World(lambda secret, heartbeat_s: make(secret, heartbeat_s, restore_s=wait_s), 2, 0.5)
    try:
        world.connect()
        wait_for_all_rails(world)
        waits, links = world.endpoints[1], [link_of(world, rank) for rank in (0, 1)]
        peer = waits._peers[0]  # type: ignore[attr-defined]
        nic_pairs[0].down("a")
        world.run(lambda: not any(link.rails[0].usable for link in links))
        nic_pairs[0].heal()
        world.run(lambda: links[1].rails[0].up if late else peer.expects(0))
        waits.restore(peer, 0)  # type: ignore[attr-defined]
        wait_for_all_rails(world)
        failovers = links[1].failovers
        world.settle(wait_s + 0.5)
        assert all(rail.usable for rail in links[1].rails) and links[1].failovers == failovers, links[1].rails
    finally:
        world.close()


@pytest.mark.slow
def test_with_all_nics_down_the_link_goes_on_over_tcp_and_returns(two: World, nic_pairs: list[NicPair]) -> None:
    stream = Stream(two, [300_000] * 30)
    two.run(lambda: stream.go_on() or stream.done() >= 8)
    for pair in nic_pairs[:2]:
        pair.down("a")
    two.run(lambda: stream.go_on() or stream.done() >= 20)
    assert [rail.usable for rail in link_of(two, 0).rails] == [False, False, True]
    for pair in nic_pairs:
        pair.heal()
    two.run(stream.go_on)
    stream.check()
    wait_for_all_rails(two)


@pytest.mark.slow
def test_noise_in_slots_never_reaches_a_message(two: World, nic_pairs: list[NicPair]) -> None:
    """What was half delivered when the rail failed is overwritten: nobody reads it before it is written again."""
    stream = Stream(two, [MIB] * 12)
    two.run(lambda: stream.go_on() or stream.done() >= 4)
    nic_pairs[0].blackhole()
    pair = two.endpoints[1]._peers[0].rails[0]._pair  # type: ignore[attr-defined]
    two.settle(0.02)
    for slot in range(pair.sizes.slots):
        pair.slot(slot)[:] = random.Random(slot).randbytes(pair.sizes.chunk_bytes)
    two.run(stream.go_on)
    stream.check()


# ---------------------------------------------------------------- reads and atomic operations


def test_a_peers_memory_is_read_and_operated_on(two: World) -> None:
    content = bytearray(random.Random(1).randbytes(MIB))
    window = two.endpoints[1].expose(memoryview(content))  # type: ignore[attr-defined]
    reader: Any = two.endpoints[0]
    into = Inbox(300_000)
    read = reader.read(1, window, 4096, into.view)
    two.run(lambda: read.done)
    assert read.result() == 0
    into.check(bytes(content[4096 : 4096 + 300_000]))
    content[:8] = (40).to_bytes(8, "little")
    for expected in (40, 42):
        add = reader.fetch_add(1, window, 0, 2)
        two.run(lambda add=add: add.done)  # type: ignore[misc]
        assert add.result() == expected
    for compared, found in ((7, 44), (44, 44), (44, 99)):
        swap = reader.compare_swap(1, window, 0, compared, 99)
        two.run(lambda swap=swap: swap.done)  # type: ignore[misc]
        assert swap.result() == found
    assert int.from_bytes(content[:8], "little") == 99
    with pytest.raises(ValueError, match="window"):
        reader.read(1, window, MIB - 10, into.view)
    with pytest.raises(ValueError, match="aligned"):
        reader.fetch_add(1, window, 4, 1)


@pytest.mark.slow
def test_an_abort_reaches_the_peer_while_rails_are_down(two: World, nic_pairs: list[NicPair]) -> None:
    for pair in nic_pairs[:2]:
        pair.blackhole()
    two.endpoints[0].abort(Cause("enough"))
    two.driven = {1}
    two.run(lambda: bool(two.ended(1)))
    assert two.ended(1)[0].cause.what == "enough"
