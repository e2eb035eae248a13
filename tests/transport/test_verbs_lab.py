"""A link over real verbs whose NICs fail at the worst moments: nothing lost, nothing doubled, order kept, data equal.

Both ends are in this process, on the two ends of two NIC pairs; a failure strikes right when the sender's machine
enters a given state (SHIFT section 4.3), not some time around it.
"""

from __future__ import annotations

import errno
import itertools
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from helixrt.errors import Retryable
from helixrt.lab.nics import NicPair
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.messages import Failure
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.rails import Rail, SendState
from helixrt.transport.contract import Endpoint, PeerAborted, Received, Sent
from helixrt.transport.verbs.devices import VerbsRail
from helixrt.transport.verbs.endpoint import VerbsEndpoint, VerbsOptions
from helixrt.transport.verbs.interfaces import Interfaces
from helixrt.transport.verbs.queue_pair import Patience, Sizes
from tests.transport.worlds import SECRET, Inbox, Message, World

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(400)]

EAGER_BYTES = LinkOptions().eager_bytes
MESSAGES, UNDER_WAY, PHASE = 500, 6, 100
CHUNKS = Sizes(chunk_bytes=256 << 10)
SIZES = (100, 5_000, 70_000, 300_000)  # with the frame, copied, in one chunk, in two chunks
WEIGHTS = (4, 3, 2, 1)
LINK = LinkOptions(striped=False, rest_s=0.02, longest_rest_s=0.1, retry_s=0.05)
PERIOD_S, LIMIT_S = 4.0, 200.0  # long: the guest is slow, and may share its cores with others
PATIENCE = Patience(timeout=14, retries=2)  # 0.2 s: on a busy machine, less would fail what works
PAIR, BACKUP = 0, 1  # rails


def make(end: str, tcp_fallback: bool, period_s: float) -> Endpoint:
    rails = [VerbsRail(device=NicPair(number).rdma(end)) for number in (1, 2)]
    options = VerbsOptions(
        period_s=period_s, link=LINK, sizes=CHUNKS, patience=PATIENCE, tcp_fallback=tcp_fallback, restore_s=10.0
    )
    return VerbsEndpoint(SECRET, rails, options=options)


def open_world(tcp_fallback: bool = True, period_s: float = PERIOD_S) -> World:
    ends = iter("ab")
    world = World(lambda secret, heartbeat_s: make(next(ends), tcp_fallback, period_s), 2)
    world.connect()
    world.run(lambda: all(rail.usable for rank in (0, 1) for rail in link_of(world, rank).rails))
    return world


@pytest.fixture
def world(nic_pairs: list[NicPair]) -> Iterator[World]:
    made = open_world()
    yield made
    made.close()


def link_of(world: World, rank: int) -> Link:
    link: Link = world.endpoints[rank]._peers[1 - rank].link  # type: ignore[attr-defined]
    return link


class Watched(Rail):
    """A rail of a link that tells of its send states as it enters them, however soon it leaves them."""

    __slots__ = ()
    told: ClassVar[Callable[[SendState], None]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "send":
            type(self).told(value)


def watch(rail: Rail, told: Callable[[SendState], None]) -> None:
    rail.__class__ = type("WatchedHere", (Watched,), {"__slots__": (), "told": staticmethod(told)})


# ---------------------------------------------------------------- what strikes


def spoil_next_request(world: World, rail: int) -> None:
    """The next request on this rail names memory that is not registered: the completion is the sender's own device's error."""
    connection = world.endpoints[0]._peers[1].rails[rail]  # type: ignore[attr-defined]
    if connection is None or connection.closed:
        return
    pair = connection._pair
    post = pair.post

    def spoiled(requests: list[Any]) -> None:
        for request in requests:
            request.key ^= 0x55
        pair.post = post
        post(requests)

    pair.post = spoiled


def cut(how: str, world: World, pairs: list[NicPair], rail: int) -> None:
    match how:
        case "local down":
            pairs[rail].down("a")
        case "remote down":
            pairs[rail].down("b")
        case "blackhole":
            pairs[rail].blackhole()
        case "wrong request":
            spoil_next_request(world, rail)


HOW = ("local down", "remote down", "blackhole", "wrong request")


# ---------------------------------------------------------------- a stream


@dataclass
class Stream:
    """Numbered messages from rank 0 to rank 1, a few under way at a time."""

    world: World
    rng: random.Random
    count: int = MESSAGES
    begun: int = 0
    allowed: int = MESSAGES  # may be begun; then it waits
    messages: list[Message] = field(init=False)
    contents: list[bytes] = field(init=False)
    inboxes: list[Inbox] = field(init=False)

    def __post_init__(self) -> None:
        self.messages = [Message(0, 1, 1, index, self.rng.choices(SIZES, WEIGHTS)[0]) for index in range(self.count)]
        self.contents = [message.content() for message in self.messages]
        self.inboxes = [self.world.receive(message) for message in self.messages]

    @property
    def came(self) -> int:
        return len(self.world.outcomes[1])

    def go_on(self) -> bool:
        """Begin what may go; whether all came and went."""
        while self.begun < min(self.count, self.allowed, self.came + UNDER_WAY):
            self.world.endpoints[0].send(1, 1, self.begun, memoryview(self.contents[self.begun]))
            self.begun += 1
        return self.came >= self.count and len(self.world.outcomes[0]) >= self.count

    def until(self, done: Callable[[], bool]) -> None:
        """Let it flow until `done`. Fails when it ends before: it was to be long enough for what is tested."""
        self.world.run(lambda: self.go_on() or done(), LIMIT_S)
        assert done(), f"the stream was over before; rails: {link_of(self.world, 0).rails}"

    def check(self) -> None:
        """Each once, whole, those of a kind in their order, and nothing beside them written."""
        order = [outcome.index for outcome in self.world.outcomes[1] if isinstance(outcome, Received)]
        assert len(self.world.outcomes[1]) == len(order) and sorted(order) == list(range(self.count))
        for long in (False, True):  # long ones wait for a credit, and let short ones pass
            alike = [index for index in order if (self.messages[index].size > EAGER_BYTES) is long]
            assert alike == sorted(alike)
        assert sorted(self.world.outcomes[0], key=repr) == sorted((Sent(1, 1, i) for i in range(self.count)), key=repr)
        for content, inbox in zip(self.contents, self.inboxes, strict=True):
            inbox.check(content)


@pytest.mark.parametrize(
    ("how", "second"),
    [
        ("local down", PAIR),
        ("blackhole", BACKUP),
        *(
            pytest.param(how, second, marks=pytest.mark.slow)
            for how, second in itertools.product(HOW, (PAIR, BACKUP))
            if (how, second) not in (("local down", PAIR), ("blackhole", BACKUP))
        ),
    ],
)
def test_500_messages_survive_a_failure_in_every_state(
    world: World, nic_pairs: list[NicPair], how: str, second: int, seed: int
) -> None:
    """The default NIC fails in mid-stream; then, in each state of the way back, it fails again, or the backup does."""
    stream, link = Stream(world, random.Random(seed)), link_of(world, 0)
    default = link.rails[PAIR]
    aims = [SendState.FALLBACK, SendState.WAIT_SIGNALED, SendState.WAIT_DRAINED]
    struck: list[SendState] = []

    def strike(state: SendState) -> None:
        if aims and state is aims[0]:
            struck.append(aims.pop(0))
            cut(how, world, nic_pairs, BACKUP if state is SendState.FALLBACK else second)

    stream.until(lambda: stream.came >= 20)
    stream.allowed = PHASE
    watch(default, strike)
    for turn in range(len(aims)):
        if len(struck) == turn and default.send is SendState.DEFAULT:
            cut(how, world, nic_pairs, PAIR)
        stream.until(lambda turn=turn: len(struck) > turn)
        came = stream.came
        stream.allowed = came + PHASE
        stream.until(lambda came=came: stream.came >= came + 20)  # over what is left: the backup, or TCP
        for pair in nic_pairs:
            pair.heal()
        stream.until(lambda turn=turn: default.send is SendState.DEFAULT or len(struck) > turn + 1)
    stream.until(lambda: default.usable)
    stream.allowed = MESSAGES
    world.run(stream.go_on, LIMIT_S)
    stream.check()
    assert struck == [SendState.FALLBACK, SendState.WAIT_SIGNALED, SendState.WAIT_DRAINED]
    assert link.failovers >= 1 and link.failbacks >= 1 and not world.ended(0) and not world.ended(1)


def test_a_busy_backup_carries_on(world: World, nic_pairs: list[NicPair]) -> None:
    """Another program writes over the backup's cable as fast as it can while the stream moves there and back."""
    pair = nic_pairs[BACKUP]

    def argv(end: str) -> list[str]:
        index = str(pair.gid_index(end))
        return ["ib_write_bw", "-F", "-d", pair.rdma(end), "-x", index, "-s", "65536", "-D", "15", "-p", "18600"]

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    programs = [subprocess.Popen(argv("b"), **quiet)]
    try:
        world.settle(1.5)
        programs.append(subprocess.Popen([*argv("a"), "127.0.0.1"], **quiet))
        stream, link = Stream(world, random.Random(7), 200), link_of(world, 0)
        stream.until(lambda: stream.came >= 40)
        nic_pairs[PAIR].blackhole()
        stream.until(lambda: stream.came >= 120)
        assert not link.rails[PAIR].usable and link.rails[BACKUP].usable
        nic_pairs[PAIR].heal()
        world.run(lambda: stream.go_on() and link.rails[PAIR].usable, LIMIT_S)
        stream.check()
    finally:
        for program in programs:
            program.kill()
            program.wait()


# ---------------------------------------------------------------- what a failure is taken for

CLASSES = {
    "local down": ({Failure.DEVICE}, r"interface a1 is down|PORT_ERR|LOC_QP_OP_ERR"),
    # This cable tells its other end.
    "remote down": ({Failure.PATH, Failure.DEVICE}, r"RETRY_EXC_ERR|interface [ab]1 is down|PORT_ERR"),
    "blackhole": ({Failure.PATH}, r"RETRY_EXC_ERR"),
    "wrong request": ({Failure.DEVICE}, r"LOC_PROT_ERR|LOC_QP_OP_ERR"),
}


@pytest.mark.parametrize("how", HOW)
def test_failures_are_classed_by_their_cause(world: World, nic_pairs: list[NicPair], how: str) -> None:
    assert_classed(world, nic_pairs, how, *CLASSES[how])


def test_where_interfaces_tell_nothing_the_event_of_the_port_does(
    nic_pairs: list[NicPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Interfaces) -> None:
        raise PermissionError(errno.EPERM, "no messages about links here")

    monkeypatch.setattr(Interfaces, "__init__", refused)
    world = open_world()
    try:
        assert_classed(world, nic_pairs, "local down", {Failure.DEVICE}, "PORT_ERR|LOC_QP_OP_ERR")
    finally:
        world.close()


def assert_classed(world: World, pairs: list[NicPair], how: str, failures: set[Failure], reason: str) -> None:
    stream, rails = Stream(world, random.Random(3), 120), [link_of(world, rank).rails[PAIR] for rank in (0, 1)]
    stream.until(lambda: stream.came >= 20)
    cut(how, world, pairs, PAIR)
    first: dict[int, tuple[Failure | None, str]] = {}

    def both_failed() -> bool:
        for rank, rail in enumerate(rails):
            if not rail.usable:
                first.setdefault(rank, (rail.failure, rail.reason))  # before an attempt to restore it says another
        return len(first) == 2

    stream.until(both_failed)
    assert first[0][0] in failures, first
    assert any(re.search(reason, said) for _, said in first.values()), first  # whoever saw it first tells the other
    world.run(stream.go_on, LIMIT_S)
    stream.check()


# ---------------------------------------------------------------- reads and atomic operations


def test_reads_go_on_over_the_backup_with_equal_data(world: World, nic_pairs: list[NicPair]) -> None:
    reader, owner = world.endpoints
    assert isinstance(reader, VerbsEndpoint) and isinstance(owner, VerbsEndpoint)
    exposed = bytearray(random.Random(5).randbytes(1 << 20))
    window = owner.expose(memoryview(exposed))
    pieces = [bytearray(64 << 10) for _ in range(16)]
    asked = [reader.read(1, window, index << 16, memoryview(piece)) for index, piece in enumerate(pieces)]
    world.run(lambda: asked[1].done)
    nic_pairs[PAIR].blackhole()
    asked += [reader.read(1, window, index << 16, memoryview(piece)) for index, piece in enumerate(pieces)]
    world.run(lambda: all(each.done for each in asked))
    for each in asked:
        each.result()
    assert b"".join(pieces) == exposed and link_of(world, 0).failovers == 1


@pytest.mark.parametrize("operation", ["fetch and add", "compare and swap"])
def test_an_atomic_operation_in_flight_raises_and_is_never_repeated(
    world: World, nic_pairs: list[NicPair], operation: str
) -> None:
    asker, owner = world.endpoints
    assert isinstance(asker, VerbsEndpoint) and isinstance(owner, VerbsEndpoint)
    exposed = bytearray(64)
    window = owner.expose(memoryview(exposed))

    def ask(turn: int) -> Any:
        if operation == "fetch and add":
            return asker.fetch_add(1, window, 8, 1)
        return asker.compare_swap(1, window, 8, turn, turn + 1)

    for turn in range(3):
        one = ask(turn)
        world.run(lambda one=one: one.done)
        assert one.result() == turn
    nic_pairs[PAIR].blackhole("b")  # it is done over there, and the answer is lost
    lost = ask(3)
    world.run(lambda: lost.done)
    with pytest.raises(Retryable, match="may have taken effect"):
        lost.result()
    after = ask(4)
    world.run(lambda: after.done)
    assert after.result() == 4, "once: it was done, and not again over the backup"
    assert int.from_bytes(exposed[8:16], "little") == 5


# ---------------------------------------------------------------- no rail left


def test_a_rank_whose_own_ports_are_all_down_says_so_and_its_peer_does_not(nic_pairs: list[NicPair]) -> None:
    """One of two is no failure. The peer's ports have no carrier then, which no restart of the peer would help."""
    world = open_world(tcp_fallback=False, period_s=2.0)
    try:
        stream = Stream(world, random.Random(1), 60)
        stream.until(lambda: stream.came >= 20)
        nic_pairs[PAIR].down("b")
        stream.until(lambda: stream.came >= 40)
        assert not world.ended(0) and not world.ended(1)
        nic_pairs[BACKUP].down("b")
        world.run(lambda: stream.go_on() or bool(world.ended(0)) and bool(world.ended(1)), LIMIT_S)
        (peer,), (own,) = world.ended(0), world.ended(1)
        down = [f"RDMA port rxe_b{number}/1: network interface b{number} is down" for number in (1, 2)]
        assert own.cause.own_device and own.cause.what.endswith(f"; here, {', '.join(down)}"), own
        assert not peer.cause.own_device, peer
        assert "here," not in peer.cause.what or isinstance(peer, PeerAborted), peer  # what the other has told, it may quote
    finally:
        world.close()
