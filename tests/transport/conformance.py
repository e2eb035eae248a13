"""What every endpoint does, whatever carries its bytes: the contract (`helixrt/transport/contract.py`) as tests.

A test module of an implementation subclasses `EndpointConformance`, or `TrafficConformance` for another way of the same
implementation, under a name that starts with Test and sets `make`. What a stranger is, only the implementation knows: that,
it tests itself.
"""

from __future__ import annotations

import random
import re
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from helixrt.errors import Cause, Retryable
from helixrt.transport.contract import Endpoint, Lost, PeerAborted, Received
from tests.transport.worlds import Attempt, Inbox, Make, Message, Process, World

EAGER_BYTES = 64 << 10  # messages up to here may travel before their receiver is ready
MIB = 1 << 20

NewWorld = Callable[..., World]


def size_at_random(rng: random.Random) -> int:
    return rng.choice([0, 1, rng.randrange(64), rng.randrange(8192), EAGER_BYTES, rng.randrange(EAGER_BYTES, 300_000)])


class Endpoints:
    """`make(secret, heartbeat_s)` gives an endpoint; a function of a module, for processes must find it too."""

    make: Make
    ends_together = False  # whether a peer that is lost ends the generation for all

    @pytest.fixture
    def world(self) -> Iterator[NewWorld]:
        worlds: list[World] = []

        def new(ranks: int, heartbeat_s: float | None = None, connected: bool = True) -> World:
            worlds.append(World(type(self).make, ranks, heartbeat_s))
            if connected:
                worlds[-1].connect()
            return worlds[-1]

        yield new
        for each in worlds:
            each.close()

    @pytest.fixture
    def process(self) -> Iterator[Callable[..., Process]]:
        processes: list[Process] = []

        def new(rank: int, size: int, heartbeat_s: float | None = None) -> Process:
            processes.append(Process(type(self).make, rank, size, heartbeat_s))
            return processes[-1]

        yield new
        for each in processes:
            each.end()

    def with_a_process(
        self, world: NewWorld, process: Callable[..., Process], ranks: int, size: int, heartbeat_s: float
    ) -> tuple[World, Process]:
        """Rank 1 is a process, which connects to rank 0; the others, in ours, are still to connect."""
        here = world(ranks, heartbeat_s, connected=False)
        other = process(1, size, heartbeat_s)
        here.addresses[1] = other.hear()
        other.tell(here.addresses[0])
        return here, other

    def a_process_ends(self, world: NewWorld, process: Callable[..., Process], how: str, heartbeat_s: float) -> None:
        """Rank 1 is a process; rank 2, in ours, is not disturbed by its end."""
        size = 16 * MIB
        here, other = self.with_a_process(world, process, 3, size, heartbeat_s)
        addresses = here.addresses
        attempts = [here.attempt(0, 1, 0, {1: addresses[1], 2: addresses[2]}), here.attempt(2, 1, 2, {0: addresses[0]})]
        assert [attempt.finish() for attempt in attempts] == [None, None]
        here.driven = {0, 2}
        there, echoed = Message(0, 1, 0, 0, size), Message(1, 0, 0, 1, size)
        back = here.receive(echoed)
        here.send(there)
        here.run(lambda: here.received([echoed]))
        back.check(there.content())
        if how == "killed under way":
            here.receive(Message(1, 0, 1, 1, size))
            here.send(Message(0, 1, 1, 0, size))
            for _ in range(2):
                here.turn()
        match how:
            case "killed while idle" | "killed under way":
                other.signal(signal.SIGKILL)
            case "stopped":
                other.signal(signal.SIGSTOP)
            case "paused":
                other.signal(signal.SIGSTOP)
                here.settle(4 * heartbeat_s)
                other.signal(signal.SIGCONT)
            case _:
                other.tell(how)
        if how in ("close", "paused"):
            here.settle(0.5)
            assert not here.ended(0)
        else:
            begin = time.monotonic()
            here.run(lambda: bool(here.ended(0)))
            assert time.monotonic() - begin < 30  # not by a time-out of the links
            (lost,) = here.ended(0)
            assert isinstance(lost, Lost) and lost.peer == 1
        self.the_others_go_on(here, here.ended(0), [Message(0, 2, 9, 0, MIB), Message(2, 0, 9, 0, 10)])

    def the_others_go_on(self, world: World, lost: list[Lost | PeerAborted], messages: list[Message]) -> None:
        """`messages` are of driven ranks. Where a peer that is `lost` ends the generation, they hear of it and go on in the next."""
        if lost and self.ends_together:
            world.run(lambda: all(world.ended(rank) for rank in world.driven))
            world.connect(2)
        world.exchange(messages, random.Random(18))


class StopConformance(Endpoints):
    """Of endpoints that notice a stopped process: by themselves, or with monitor processes."""

    @pytest.mark.system
    def test_a_process_that_is_stopped(self, world: NewWorld, process: Callable[..., Process]) -> None:
        self.a_process_ends(world, process, "stopped", heartbeat_s=2.0)


class PauseConformance(Endpoints):
    """Of endpoints for which a stopped process is not a lost one."""

    @pytest.mark.system
    def test_a_process_that_is_stopped_and_goes_on(self, world: NewWorld, process: Callable[..., Process]) -> None:
        self.a_process_ends(world, process, "paused", heartbeat_s=0.5)


class TrafficConformance(Endpoints):
    """Of endpoints that meet as others do, and carry messages in another way: messages, generations and ends."""

    long_bytes = 32 * MIB  # more than any buffer takes

    # ---------------------------------------------------------------- messages

    def test_messages_of_any_size_arrive_whole_in_both_directions(self, world: NewWorld) -> None:
        sizes = (0, 1, 63, 64, 65, 4097, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 1_000_003, 20 * MIB + 7)
        messages = [Message(s, 1 - s, op, 0, size) for op, size in enumerate(sizes) for s in (0, 1)]
        world(2).exchange(messages, random.Random(1))

    def test_messages_are_matched_by_name_in_whatever_order_they_are_posted(self, world: NewWorld, seed: int) -> None:
        rng, two = random.Random(seed), world(2)
        for op in range(3):
            names = [(sender, index) for sender in (0, 1) for index in range(40)]
            two.exchange([Message(s, 1 - s, op, index, size_at_random(rng)) for s, index in names], rng)

    def test_four_ranks_all_to_all(self, world: NewWorld, seed: int) -> None:
        rng, four = random.Random(seed), world(4)
        pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
        messages = [Message(a, b, op, index, size_at_random(rng)) for a, b in pairs for op in (-7, 5) for index in range(4)]
        four.exchange([*messages, *(Message(a, b, 6, 0, 2 * MIB + a) for a, b in pairs)], rng)

    def test_source_memory_is_the_callers_again_after_sent(self, world: NewWorld) -> None:
        two = world(2)
        for op, size in enumerate((100, EAGER_BYTES, 3 * MIB)):
            message = Message(0, 1, op, 0, size)
            source = bytearray(message.content())
            two.send(message, source)
            two.settle(0.05)
            inbox = None if two.sent([message]) else two.receive(message)  # a short one may be sent before
            two.run(lambda m=message: two.sent([m]))
            source[:] = b"\xff" * size
            inbox = inbox or two.receive(message)
            two.run(lambda m=message: two.received([m]))
            inbox.check(message.content())

    def test_a_message_whose_receiver_is_late_holds_up_no_other(self, world: NewWorld) -> None:
        two = world(2)
        late = [Message(0, 1, 1, index, size) for index, size in enumerate((10, EAGER_BYTES, 2 * MIB, 2 * MIB))]
        for message in late:
            two.send(message)
        prompt = [Message(0, 1, 2, index, size) for index, size in enumerate((10, EAGER_BYTES, 2 * MIB))]
        two.exchange([*prompt, *(Message(1, 0, 2, m.index, m.size) for m in prompt)], random.Random(2))
        assert not two.received(late)
        inboxes = [two.receive(message) for message in reversed(late)]
        two.run(lambda: two.received(late) and two.sent(late))
        for message, inbox in zip(reversed(late), inboxes, strict=True):
            inbox.check(message.content())

    def test_memory_is_bounded_when_the_receiver_is_late(self, world: NewWorld) -> None:
        two = world(2)
        two.exchange([Message(0, 1, 0, 0, MIB), Message(0, 1, 0, 1, 1000)], random.Random(3))  # buffers are made
        short = bytes(EAGER_BYTES)
        count = 800  # 50 MiB of short messages
        tracemalloc.start()
        try:
            for index in range(count):
                two.endpoints[0].send(1, 1, index, memoryview(short))
                if index % 50 == 0:
                    two.turn()
            two.settle(0.3)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 24 * MIB, f"{peak / MIB:.1f} MiB for both ends"
        for index in reversed(range(count)):
            two.endpoints[1].receive(0, 1, index, Inbox(EAGER_BYTES).view)
        messages = [Message(0, 1, 1, index, EAGER_BYTES) for index in range(count)]
        two.run(lambda: len(two.outcomes[1]) >= 2 + count)
        assert two.received(messages) and len(two.outcomes[1]) == 2 + count

    def test_an_idle_endpoint_asks_for_nothing(self, world: NewWorld) -> None:
        three = world(3)
        three.exchange([Message(0, 1, 0, 0, 2 * MIB), Message(1, 2, 0, 0, 10)], random.Random(4))
        three.settle(0.2)
        before = three.turns
        three.settle(0.5)
        assert three.turns - before < 50

    # ---------------------------------------------------------------- forget

    @pytest.mark.parametrize("size", [1000, 8 * MIB])
    @pytest.mark.parametrize("turns", [0, 1, 3])
    def test_forget_gives_memory_back_whatever_is_under_way(self, world: NewWorld, size: int, turns: int) -> None:
        """The receiver forgets: not a byte is written later. Other messages are not disturbed."""
        two = world(2)
        message, other = Message(0, 1, 1, 0, size), Message(0, 1, 2, 0, 2 * MIB)
        inbox = two.receive(message)
        two.send(message)
        for _ in range(turns):
            two.turn()
        two.endpoints[1].forget(1)
        inbox.view[:] = b"\x77" * size
        two.exchange([other, Message(1, 0, 2, 0, 100)], random.Random(6))
        two.settle(0.05)
        inbox.check(b"\x77" * size)
        assert not two.ended(0) and not two.ended(1)

    @pytest.mark.parametrize("size", [1000, 8 * MIB])
    @pytest.mark.parametrize("turns", [0, 1, 3])
    def test_forget_gives_the_source_back_and_nothing_wrong_arrives(self, world: NewWorld, size: int, turns: int) -> None:
        """The sender forgets and writes its memory: the message arrives as it was, or never."""
        two = world(2)
        message, other = Message(0, 1, 1, 0, size), Message(0, 1, 2, 0, 2 * MIB)
        inbox, source = two.receive(message), bytearray(message.content())
        two.send(message, source)
        for _ in range(turns):
            two.turn()
        two.endpoints[0].forget(1)
        source[:] = b"\x88" * size
        before = list(two.outcomes[1])
        two.send(other)
        second = two.receive(other)
        two.run(lambda: two.received([other]) and two.sent([other]))
        two.settle(0.05)
        second.check(other.content())
        inbox.check_guards()
        if two.received([message]):
            inbox.check(message.content())
        assert two.outcomes[1].count(Received(0, 1, 0)) <= 1 and len(two.outcomes[1]) <= len(before) + 2
        assert not two.ended(0) and not two.ended(1)

    def test_forgotten_messages_that_wait_for_a_receiver_are_given_up(self, world: NewWorld) -> None:
        two = world(2)
        for size in (1000, 2 * MIB):
            two.send(Message(0, 1, 1, size, size))
        two.settle(0.05)
        for endpoint in two.endpoints:
            endpoint.forget(1)
        two.exchange([Message(0, 1, 2, 0, 2 * MIB), Message(1, 0, 2, 0, 1)], random.Random(7))
        assert not two.ended(0) and not two.ended(1)

    # ---------------------------------------------------------------- generations

    def test_the_next_generation_begins_clean(self, world: NewWorld) -> None:
        """Names are used again, ranks are renumbered, one is gone; nothing of the last generation shows."""
        three = world(3)
        unheard = [three.receive(Message(1, 0, 7, 0, 2 * MIB)), three.receive(Message(1, 0, 7, 1, 10))]
        for size, index in ((2 * MIB, 2), (10, 3)):
            three.send(Message(1, 0, 7, index, size))
        three.settle(0.02)
        three.driven = {0, 1}
        three.connect(2, {0: 1, 1: 0})
        three.outcomes[0].clear(), three.outcomes[1].clear()
        inbox = Inbox(10)
        three.endpoints[0].receive(0, 7, 1, inbox.view)
        three.endpoints[0].receive(0, 7, 3, (fresh := Inbox(30)).view)
        data = memoryview(random.Random(8).randbytes(40))
        three.endpoints[1].send(1, 7, 1, data[:10])
        three.endpoints[1].send(1, 7, 3, data[10:])
        three.run(lambda: len(three.outcomes[0]) >= 2)
        three.settle(0.05)
        assert sorted(map(repr, three.outcomes[0])) == sorted(map(repr, (Received(0, 7, 1), Received(0, 7, 3))))
        inbox.check(bytes(data[:10]))
        fresh.check(bytes(data[10:]))
        for each in unheard:
            each.check(bytes(len(each.view)))

    def test_generation_after_generation_with_traffic_under_way(self, world: NewWorld, seed: int) -> None:
        rng, three = random.Random(seed), world(3, connected=False)
        for generation in range(1, 7):
            ranks = [0, 1, 2] if generation % 3 else [0, 2]
            three.driven = set(ranks)
            three.connect(generation)
            pairs = [(a, b) for a in ranks for b in ranks if a != b]
            three.exchange([Message(a, b, 0, i, size_at_random(rng)) for a, b in pairs for i in range(4)], rng)
            for a, b in pairs:  # left unfinished
                three.send(Message(a, b, 1, 0, MIB), bytes(MIB))
                three.receive(Message(b, a, 1, 0, MIB))
            for _ in range(rng.randrange(4)):
                three.turn()
            for outcomes in three.outcomes:
                outcomes.clear()

    # ---------------------------------------------------------------- ends

    def test_abort_tells_the_reason_even_when_the_link_is_busy(self, world: NewWorld) -> None:
        three = world(3)
        for a, b in ((0, 1), (1, 0), (0, 2), (2, 0)):
            three.send(Message(a, b, 0, 0, 20 * MIB), bytes(20 * MIB))
            three.receive(Message(b, a, 0, 0, 20 * MIB))
        for _ in range(2):
            three.turn()
        three.endpoints[0].abort(Cause("ran out of luck", "replica 3", "/logs/3"))
        three.driven = {1, 2}
        three.run(lambda: bool(three.ended(1)) and bool(three.ended(2)))
        for rank in (1, 2):
            assert three.ended(rank) == [PeerAborted(0, Cause("ran out of luck", "replica 3", "/logs/3"))]
        three.driven = {0, 1, 2}
        for outcomes in three.outcomes:
            outcomes.clear()
        three.connect(2)
        three.exchange([Message(0, 1, 0, 0, 10), Message(2, 0, 0, 0, MIB)], random.Random(14))

    def test_nothing_is_left_behind(self, world: NewWorld) -> None:
        """What a life of several generations leaves, the leak check finds."""
        three = world(3, 0.5)
        for generation in (2, 3):
            three.connect(generation)
            messages = [Message(a, b, 0, 0, 200_000) for a in range(3) for b in range(3) if a != b]
            three.exchange(messages, random.Random(16))
        three.endpoints[0].abort(Cause("over"))
        three.driven = {1, 2}
        three.run(lambda: bool(three.ended(1)) and bool(three.ended(2)))

    # ---------------------------------------------------------------- silence and death

    def test_heartbeats_keep_idle_links_alive(self, world: NewWorld) -> None:
        two = world(2, heartbeat_s=0.2)
        two.settle(0.7)
        assert two.outcomes == [[], []]
        assert two.turns < 150

    def test_a_peer_that_nobody_drives_is_not_lost(self, world: NewWorld) -> None:
        """Its process runs and its kernel answers: it is busy with something else."""
        three = world(3, heartbeat_s=0.2)
        three.driven = {0, 1}
        back = three.receive(Message(0, 2, 0, 0, 8 * MIB))
        three.send(Message(0, 2, 0, 0, 8 * MIB))
        three.settle(1.0)
        assert three.ended(0) == [] and three.ended(1) == []
        three.driven = {0, 1, 2}
        three.run(lambda: three.received([Message(0, 2, 0, 0, 8 * MIB)]))
        back.check(Message(0, 2, 0, 0, 8 * MIB).content())
        three.exchange([Message(0, 1, 1, 0, MIB), Message(2, 0, 1, 0, 10)], random.Random(17))

    @pytest.mark.system
    @pytest.mark.parametrize(("heartbeat_s", "held_s"), [(0.5, 2.5), pytest.param(1.0, 5.0, marks=pytest.mark.slow)])
    def test_a_process_that_holds_its_interpreter_lock_is_not_lost(
        self, world: NewWorld, process: Callable[..., Process], heartbeat_s: float, held_s: float
    ) -> None:
        """In the middle of an exchange, with more bytes under way than any buffer takes."""
        size = self.long_bytes
        here, other = self.with_a_process(world, process, 2, size, heartbeat_s)
        assert here.attempt(0, 1, 0, {1: here.addresses[1]}).finish() is None
        here.driven = {0}
        for op in range(2):
            there, echoed = Message(0, 1, op, 0, size), Message(1, 0, op, 1, size)
            back = here.receive(echoed)
            if op == 0:
                other.tell(held_s)
            here.send(there)
            here.run(lambda echoed=echoed: here.received([echoed]) or bool(here.ended(0)))
            assert here.ended(0) == []
            back.check(there.content())

    @pytest.mark.system
    @pytest.mark.parametrize(
        "how",
        [
            "killed under way",
            pytest.param("killed while idle", marks=pytest.mark.slow),
            pytest.param("exit", marks=pytest.mark.slow),
            pytest.param("close", marks=pytest.mark.slow),
        ],
    )
    def test_a_process_that_ends(self, world: NewWorld, process: Callable[..., Process], how: str) -> None:
        self.a_process_ends(world, process, how, heartbeat_s=30.0)


class EndpointConformance(TrafficConformance):
    """Every endpoint's: messages, and also how they meet, what they refuse and how they close."""

    # ---------------------------------------------------------------- what was not agreed

    @pytest.mark.parametrize("size, posted", [(100, 99), (99, 100), (3 * MIB, 3 * MIB - 1), (0, 1), (1, 0), (10, 2 * MIB)])
    @pytest.mark.parametrize("late", [False, True])
    def test_a_length_that_was_not_agreed_loses_the_link_and_touches_no_memory(
        self, world: NewWorld, size: int, posted: int, late: bool
    ) -> None:
        three = world(3)
        message = Message(0, 1, 0, 0, size)
        if late:
            three.send(message)
            three.settle(0.05)
        inbox = Inbox(posted)
        three.endpoints[1].receive(0, 0, 0, inbox.view)
        if not late:
            three.send(message)
        three.run(lambda: bool(three.ended(0)) and bool(three.ended(1)))
        inbox.check_guards()
        if self.ends_together:  # one of the two may hear it from the third first
            assert len(three.ended(0)) == len(three.ended(1)) == 1
        else:
            assert [o.peer for o in three.ended(0)] == [1] and [o.peer for o in three.ended(1)] == [0]
        # The end that finds it names the message. The other one may learn only that this link is over, when it dials a rail.
        causes = [o.cause.what for rank in (0, 1) for o in three.ended(rank) if isinstance(o, Lost)]
        assert any("(0, 0)" in what for what in causes), causes
        self.the_others_go_on(three, three.ended(0), [Message(0, 2, 1, 0, 1000), Message(2, 1, 1, 0, 2 * MIB)])

    # ---------------------------------------------------------------- generations

    def test_an_older_generation_is_refused_and_counted(self, world: NewWorld) -> None:
        three = world(3)
        three.driven = {0, 1}
        three.connect(generation=5)
        before = [three.endpoints[rank].refused().stale for rank in (0, 1)]
        late = three.attempt(2, 4, 2, {rank: three.addresses[rank] for rank in (0, 1)}, 5.0)
        error = three.until(late)
        assert isinstance(error, Retryable) and error.cause.peers and set(error.cause.peers) <= {0, 1}, error
        assert all(re.search(rf"\b{peer}\b", str(error)) for peer in error.cause.peers), error
        after = [three.endpoints[rank].refused() for rank in (0, 1)]
        assert any(now.stale > then for now, then in zip(after, before, strict=True))
        assert all(now.strangers == 0 for now in after)
        three.exchange([Message(0, 1, 0, 0, MIB), Message(1, 0, 0, 0, MIB)], random.Random(9))
        three.driven = {0, 1, 2}
        three.connect(generation=6)  # the one that was late joins the next
        three.exchange([Message(a, b, 0, 0, 1000) for a in range(3) for b in range(3) if a != b], random.Random(10))

    def test_a_peer_that_is_ahead_waits_for_the_others(self, world: NewWorld) -> None:
        three = world(3)
        others = {me: {peer: three.addresses[peer] for peer in range(3) if peer != me} for me in range(3)}
        early = three.attempt(0, 2, 0, others[0])
        three.driven = {1, 2}
        three.settle(0.3)  # these are still in generation 1
        attempts = [early, *(three.attempt(me, 2, me, others[me]) for me in (1, 2))]
        assert [attempt.finish() for attempt in attempts] == [None, None, None]
        three.driven = {0, 1, 2}
        for outcomes in three.outcomes:
            outcomes.clear()
        three.exchange([Message(a, b, 0, 0, 1000) for a in range(3) for b in range(3) if a != b], random.Random(11))

    def test_connect_names_who_did_not_come(self, world: NewWorld) -> None:
        three = world(3, connected=False)
        attempts = [
            three.attempt(me, 1, me, {peer: three.addresses[peer] for peer in range(3) if peer != me}, 0.5) for me in (0, 1)
        ]
        for attempt in attempts:
            error = attempt.finish()
            assert isinstance(error, Retryable) and re.search(r"\b2\b", str(error)), error
            assert 2 in error.cause.peers
        three.driven = {0, 1}
        three.connect(2)
        three.exchange([Message(0, 1, 0, 0, 10)], random.Random(12))

    @pytest.mark.parametrize("me", [0, 1])  # one of the two dials
    def test_the_cause_names_a_peer_that_never_comes_and_one_that_is_gone(self, world: NewWorld, me: int) -> None:
        two, other = world(2, connected=False), 1 - me
        for generation in (1, 2):
            with pytest.raises(Retryable) as raised:
                two.endpoints[me].connect(generation, me, {other: two.addresses[other]}, 0.5)
            assert raised.value.cause.peers == (other,)
            two.endpoints[other].close()

    def test_the_cause_names_who_did_not_come_also_when_another_has_given_up_before(self, world: NewWorld) -> None:
        three = world(3, connected=False)
        three.driven = {0}
        others = {me: {peer: three.addresses[peer] for peer in range(3) if peer != me} for me in (0, 1)}
        patient, hasty = three.attempt(0, 1, 0, others[0], 4.0), three.attempt(1, 1, 1, others[1], 0.5)
        for attempt in (hasty, patient):
            error = attempt.finish()
            assert isinstance(error, Retryable) and 2 in error.cause.peers, error

    @pytest.mark.parametrize(
        "garbage",
        [b"", b"{}", b"\x00" * 100, b"[1, 2", b"x" * 5000, b'{"rails": [["a", 1]]}'],
        ids=lambda raw: f"{len(raw)} bytes",
    )
    def test_an_address_that_is_none_is_refused(self, world: NewWorld, garbage: bytes) -> None:
        one = world(2, connected=False)
        assert len(one.addresses[0]) <= 4096
        with pytest.raises(Retryable, match=r"\b1\b") as raised:
            one.endpoints[0].connect(1, 0, {1: garbage}, 1.0)
        assert raised.value.cause.peers == (1,)

    def test_who_does_not_know_the_secret_does_not_connect(self, world: NewWorld) -> None:
        two = world(2)
        other: Endpoint = type(self).make(b"another run's", None)
        try:
            peers = {rank: two.addresses[rank] for rank in (0, 1)}
            error = two.until(Attempt(lambda: other.connect(1, 2, peers, 0.5)))
            assert isinstance(error, Retryable) and error.cause.peers and set(error.cause.peers) <= {0, 1}, error
        finally:
            other.close()
        assert not two.ended(0) and not two.ended(1)
        assert sum(two.endpoints[rank].refused().strangers for rank in (0, 1)) > 0
        two.exchange([Message(0, 1, 0, 0, MIB), Message(1, 0, 0, 0, MIB)], random.Random(13))

    # ---------------------------------------------------------------- ends

    def test_an_endless_reason_is_cut(self, world: NewWorld) -> None:
        two = world(2)
        two.endpoints[0].abort(Cause("x" * 100_000))
        two.driven = {1}
        two.run(lambda: bool(two.ended(1)))
        (aborted,) = two.ended(1)
        assert isinstance(aborted, PeerAborted) and aborted.cause.what.startswith("xxx") and len(aborted.cause.what) < 5000

    def test_close_is_no_failure_and_what_was_sent_arrives(self, world: NewWorld) -> None:
        three = world(3)
        messages = [Message(0, 1, 0, index, size) for index, size in enumerate((10, EAGER_BYTES, 1000))]
        big, back = Message(0, 1, 1, 0, 3 * MIB), Message(1, 0, 1, 0, 3 * MIB)
        inboxes = [three.receive(each) for each in (big, back)]
        for message in (*messages, big, back):
            three.send(message)
        three.run(lambda: three.sent([*messages, big, back]) and three.received([big, back]))
        three.endpoints[0].close()
        three.driven = {1, 2}
        inboxes += [three.receive(message) for message in messages]
        three.run(lambda: three.received(messages))
        three.settle(0.1)
        for message, inbox in zip((big, back, *messages), inboxes, strict=True):
            inbox.check(message.content())
        assert not three.ended(1) and not three.ended(2)
        three.exchange([Message(1, 2, 2, 0, MIB)], random.Random(15))
        three.send(Message(1, 0, 3, 0, 10))  # nobody there
        three.run(lambda: bool(three.ended(1)))
        assert [o.peer for o in three.ended(1)] == [0] and (self.ends_together or not three.ended(2))

    def test_close_while_someone_waits_is_a_loss(self, world: NewWorld) -> None:
        two = world(2)
        two.receive(Message(0, 1, 0, 0, 10))
        two.turn()
        two.endpoints[0].close()
        two.driven = {1}
        two.run(lambda: bool(two.ended(1)))
        (lost,) = two.ended(1)
        assert isinstance(lost, Lost) and lost.peer == 0

    def test_close_twice_and_without_connect(self, world: NewWorld) -> None:
        two = world(2, connected=False)
        two.endpoints[0].close()
        two.endpoints[0].close()
