"""Staging: no byte is read before it has come, every byte of the result reaches the card once, in any order of copies.

On the host a card is simulated by lanes whose copies happen only when told, in an order that a seed decides; memory
is filled with NaN before, so that what was read too early shows.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

from helixrt.collectives.handle import CollectiveError, Handle
from helixrt.collectives.operations import How
from helixrt.collectives.reduction import Op, Reduction
from helixrt.collectives.staged_operation import traffic
from helixrt.collectives.staging import Staged, Staging
from helixrt.collectives.work import HelixWork
from helixrt.protocol.collective.algorithms import choice
from helixrt.protocol.collective.plan import Copy, Node, Receive, Reduce, Region, Send, Space
from helixrt.transport.device_lanes import Lane, Mark
from tests.collectives.queue_group import DEADLINE_S, SMALL, SUM, Group, tensor
from tests.waiting import until

CHUNK_BYTES = 64


class Later(Mark):
    def __init__(self, world: World, number: int) -> None:
        self._world, self.number = world, number

    def passed(self) -> bool:
        return self._world.has_done(self.number)

    def wait(self) -> None:
        while not self._world.has_done(self.number):
            self._world.step()

    def since_s(self, earlier: Mark) -> float:
        return 1e-6


class World:
    """All lanes' copies that are queued: each lane's are done in order, lanes in any order.

    One is done at every `step`, and with the probability `pace` whenever somebody asks whether one is.
    """

    def __init__(self, seed: int, pace: float = 0.0) -> None:
        self._rng, self._pace, self._lock = random.Random(seed), pace, threading.RLock()
        self._queued: list[list[tuple[int, set[int], Callable[[], object]]]] = []
        self._done: set[int] = set()
        self.copies = 0

    def lane(self, device: torch.device) -> Lane:
        self._queued.append([])
        return WorldLane(self, self._queued[-1])

    @property
    def waiting(self) -> bool:
        """Something is queued."""
        with self._lock:
            return any(self._queued)

    def put(self, lane: list[tuple[int, set[int], Callable[[], object]]], after: set[int], work: Callable[[], object]) -> Mark:
        with self._lock:
            self.copies += 1
            lane.append((self.copies, set(after), work))
            return Later(self, self.copies)

    def has_done(self, number: int) -> bool:
        with self._lock:
            if self._rng.random() < self._pace:
                self.step()
            return number in self._done

    def step(self) -> bool:
        """Do one copy, if any may be done."""
        with self._lock:
            may = [lane for lane in self._queued if lane and lane[0][1] <= self._done]
            if not may:
                assert not any(self._queued), "copies wait for each other"
                return False
            number, _, work = self._rng.choice(may).pop(0)
            work()
            self._done.add(number)
            return True


class WorldLane(Lane):
    def __init__(self, world: World, queued: list[tuple[int, set[int], Callable[[], object]]]) -> None:
        self._world, self._queued, self._after = world, queued, set[int]()

    def follow_caller(self, tensor: torch.Tensor) -> None:
        pass  # the caller's work is done at once

    def mark_caller(self) -> Mark:
        return self._world.put(self._queued, set(), lambda: None)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, Later)
        self._after.add(mark.number)

    def run(self, work: Callable[[], object]) -> Mark:
        return self._world.put(self._queued, self._after, work)

    def lead_caller(self, mark: Mark, made: torch.Tensor | None = None) -> None:
        mark.wait()

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full((tensor.numel(),), float("nan") if tensor.is_floating_point() else 77, dtype=tensor.dtype)

    def hold(self, host: torch.Tensor) -> None:
        pass  # the world refers to what its work uses

    def device_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 77)


class SimulatedCard(Staging):
    """Every tensor is on the card that the world plays."""

    def __init__(self, seed: int, pace: float = 0.3) -> None:
        self.world = World(seed, pace)
        super().__init__(CHUNK_BYTES, self.world.lane)

    def serves(self, tensor: torch.Tensor) -> bool:
        return True


def staged_on(world: World, source: torch.Tensor, out: torch.Tensor) -> Staged:
    lanes = (world.lane(source.device), world.lane(source.device), world.lane(source.device))
    return Staged(source, out, lanes, CHUNK_BYTES)


def double(staged: Staged, world: World, seed: int) -> None:
    """The call that is staged here: out = 2 * source, by pieces of any size, each as soon as its source has come."""
    rng, size = random.Random(seed), staged.source.numel()
    cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(6))})
    pieces = list(zip(cuts, cuts[1:], strict=False))
    bytes_each = staged.source.element_size()
    while pieces:
        ready = [piece for piece in pieces if staged.ready(piece[0] * bytes_each, piece[1] * bytes_each)]
        for begin, end in ready:
            staged.out[begin:end] = 2 * staged.source[begin:end]
            if rng.random() < 0.6:
                staged.landed(begin * bytes_each, end * bytes_each)
            pieces.remove((begin, end))
        world.step()
    staged.finish()
    staged.join()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_order_of_copies_gives_the_result(in_place: bool, dtype: torch.dtype, seed: int) -> None:
    for attempt in range(seed, seed + 50):
        world = World(attempt)
        source = torch.randn(1 + attempt % 97, dtype=torch.float64).to(dtype)
        wanted, before = 2 * source, source.clone()
        out = source if in_place else torch.full_like(source, float("nan"))
        double(staged_on(world, source, out), world, attempt)
        assert torch.equal(out, wanted), attempt
        assert in_place or torch.equal(source, before)


def test_every_byte_of_the_result_moves_once() -> None:
    world = World(0)
    source, out = torch.randn(40), torch.zeros(40)
    staged = staged_on(world, source, out)
    assert world.copies == 3, "chunks of 16 elements"
    staged.wait()
    staged.out.copy_(staged.source)
    for begin, end in ((8, 16), (80, 96), (8, 16), (0, 100), (12, 12)):
        staged.landed(begin, end)
    moved = world.copies - 3
    assert moved == 1 + 1 + 0 + 3 + 0, "what is between the spans, and nothing twice"
    staged.finish()
    assert world.copies - 3 == moved + 1
    staged.finish()
    staged.join()
    assert world.copies - 3 == moved + 1 and torch.equal(out, source)


def test_ready_speaks_of_the_chunks_that_hold_the_bytes() -> None:
    world = World(0)
    staged = staged_on(world, torch.arange(40.0), torch.empty(40))
    assert not staged.ready(0, 4) and staged.ready(4, 4)
    assert world.step()
    assert staged.ready(0, 64) and not staged.ready(0, 65) and not staged.ready(60, 68) and not staged.ready(128, 160)
    while world.step():
        pass
    assert staged.ready(0, 160)


def test_only_what_is_read_and_written_moves() -> None:
    world = World(0)
    source, out = torch.arange(40.0), torch.zeros(40)
    lanes = (world.lane(source.device), world.lane(source.device), world.lane(source.device))
    staged = Staged(source, out, lanes, CHUNK_BYTES, reads=[(8, 16), (64, 144)], writes=[(0, 4)])
    assert world.copies == 1 + 2, "20 elements from element 16 on are two chunks"
    assert staged.ready(0, 8) and staged.ready(16, 64) and staged.ready(144, 160)
    assert not staged.ready(0, 12) and not staged.ready(140, 160) and not staged.ready(4, 100)
    staged.wait()
    assert torch.equal(staged.source[2:4], source[2:4]) and torch.equal(staged.source[16:36], source[16:36])
    staged.out.fill_(7.0)
    staged.finish(then=lambda: out[-1:].fill_(5.0))
    staged.join()
    assert out[0] == 7 and out[-1] == 5 and not out[1:-1].any()


def test_host_tensors_are_not_staged() -> None:
    assert not Staging().serves(torch.zeros(1)) and Staging().serves(torch.zeros(1, device="meta"))


def test_nothing_is_staged_for_an_empty_tensor() -> None:
    world = World(0)
    staged = staged_on(world, torch.empty(0), torch.empty(0))
    assert staged.ready(0, 0)
    staged.wait()
    staged.finish()
    staged.join()
    assert world.copies == 0


def test_tensors_that_cannot_be_staged_are_refused() -> None:
    staging = Staging()
    with pytest.raises(ValueError, match="on one device, got cpu and meta"):
        staging.stage(torch.zeros(2), torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="must be contiguous"):
        staging.stage(torch.zeros(4)[::2], torch.zeros(2))


# ---------------------------------------------------------------- collectives on a card that is simulated


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 130, 5000])
def test_what_a_plan_moves(size: int, length: int) -> None:
    """Each byte of the result goes back once, with the node that writes it last; of the source, what is sent comes."""
    element, everything = 4, [(0, 4 * length)] if length else []
    plans = {
        (name, rank): plan
        for rank in range(size)
        for name, plan in {
            "all-reduce": choice.all_reduce(rank, size, 4 * length, element, SMALL),
            "reduce-scatter": choice.reduce_scatter(rank, [4 * length] * size, element, SMALL),
            "all-gather": choice.all_gather(rank, [4 * length] * size, element, SMALL),
            "broadcast": choice.broadcast(rank, size, 0, 4 * length, element, SMALL, in_place=True),
            "reduce": choice.reduce(rank, size, 0, 4 * length, element, SMALL),
        }.items()
    }
    for (name, rank), plan in plans.items():
        size_bytes = 1 + max((r.offset + r.length for node in plan.nodes for r in regions(node)), default=0)
        last_writer, read = torch.full((size_bytes,), -1), torch.zeros(size_bytes, dtype=torch.bool)
        for number, node in enumerate(plan.nodes):
            for region in node.into if isinstance(node, Reduce) else [node.into] if isinstance(node, Copy) else []:
                if region.space is Space.OUT:
                    last_writer[region.offset : region.offset + region.length] = number
            if isinstance(node, Receive) and node.region.space is Space.OUT:
                last_writer[node.region.offset : node.region.offset + node.region.length] = number
            taken = node.region if isinstance(node, Send) else node.source if isinstance(node, Copy) else None
            if taken is not None and taken.space is Space.SOURCE:
                read[taken.offset : taken.offset + taken.length] = True
        moves = traffic(plan)
        told, told_read = torch.full((size_bytes,), -1), torch.zeros(size_bytes, dtype=torch.bool)
        for number, spans in moves.finals.items():
            for begin, end in spans:
                assert bool((told[begin:end] == -1).all()), "twice"
                told[begin:end] = number
        for begin, end in moves.reads:
            told_read[begin:end] = True
        assert torch.equal(told, last_writer) and torch.equal(told_read, read), (name, rank)
        assert sum(end - begin for begin, end in moves.writes) == int((last_writer >= 0).sum())
    if size > 1:
        assert traffic(plans["broadcast", 0]).writes == [] and traffic(plans["broadcast", 1]).reads == []
        assert traffic(plans["reduce", 1]).writes == [] and traffic(plans["reduce", 0]).reads == []
        ring = sum(end - begin for begin, end in traffic(plans["all-reduce", 0]).reads)
        assert length < 5000 or ring < everything[0][1] / size + 1024, "a ring's first step sends one part"


def regions(node: Node) -> list[Region]:
    if isinstance(node, Send | Receive):
        return [node.region]
    return [node.source, node.into] if isinstance(node, Copy) else [node.left, node.right, *node.into]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_of_all_kinds_on_a_card_of_any_pace(size: int, seed: int) -> None:
    """All in flight together. Small integers, so that sums are exact; host memory is NaN until bytes come."""
    group = Group(size, staging=lambda rank: SimulatedCard(seed + rank))

    def of(rank: int, length: int) -> torch.Tensor:
        return tensor(rank, length).mul(4).round()

    def run(me: int) -> None:
        calls, how, root = group.ranks[me], How(DEADLINE_S), size - 1
        checks: list[tuple[Handle, torch.Tensor, torch.Tensor]] = []
        for n in (0, 1, 40, 300, 2500):
            total = sum((of(r, n) for r in range(1, size)), of(0, n))
            whole = torch.cat([of(r, n) for r in range(size)])
            mean = Reduction(Op.SUM, size) if size in (1, 2) else SUM
            out = torch.full((n,), torch.nan)
            checks.append((calls.all_reduce(of(me, n), out, mean, how), out, total / mean.divisor))
            same = of(me, n)
            checks.append((calls.all_reduce(same, same, SUM, how), same, total))
            gathered = torch.full((size * n,), torch.nan)
            checks.append((calls.all_gather(of(me, n), gathered, [n] * size, how), gathered, whole))
            gathered = torch.full((size * n,), torch.nan)
            mine = gathered[me * n : me * n + n].copy_(of(me, n))  # from its place in the result
            checks.append((calls.all_gather(mine, gathered, [n] * size, how), gathered, whole))
            out = torch.full((n,), torch.nan)
            checks.append((calls.reduce_scatter(whole.clone(), out, [n] * size, SUM, how), out, size * of(me, n)))
            told = of(me, n)
            checks.append((calls.broadcast(told, root, how), told, of(root, n)))
            summed = of(me, n)
            wanted = total if me == root else of(me, n)
            checks.append((calls.reduce(summed, summed, root, SUM, how), summed, wanted))
            swapped = torch.full((size * n,), torch.nan)
            wanted = of(me, n).repeat(size)
            checks.append((calls.all_to_all(whole.clone(), swapped, [n] * size, [n] * size, how), swapped, wanted))
            if size > 1:
                given, got = of(me, n), torch.full((n,), torch.nan)
                checks.append((calls.send(given, (me + 1) % size, n, how), given, of(me, n)))
                checks.append((calls.receive(got, (me - 1) % size, n, how), got, of((me - 1) % size, n)))
        random.Random(seed).shuffle(checks)
        for handle, result, wanted in checks:
            assert handle.wait(DEADLINE_S)
            assert torch.equal(result, wanted)
        last = torch.full((700,), float(me))
        work = HelixWork([calls.all_reduce(last, last, SUM, how)], [last], DEADLINE_S)
        assert torch.equal(work.get_future().wait()[0], torch.full((700,), size * (size - 1) / 2))
        calls.barrier(how).wait()

    try:
        group.on_each(run)
    finally:
        group.close()


def test_pauses_between_two_looks_at_the_gpu_are_short_while_bytes_come_and_grow_while_none_do() -> None:
    """A megabyte is copied to the GPU and back in a fraction of a millisecond, which is less than the longest pause."""
    cards = [SimulatedCard(0, pace=0.0), SimulatedCard(1, pace=0.0)]
    group = Group(2, staging=cards.__getitem__)
    communicator = group.ranks[0].communicator
    execution = communicator._execution
    assert execution is not None

    def pauses(now: float, count: int) -> tuple[list[float], float]:
        """The pauses before `count` deadlines of the execution, from `now` on, and the time of the last deadline."""
        found = []
        for _ in range(count):
            execution.turn(now)
            found.append(execution.next_deadline() - now)
            now += found[-1]
        return found, now

    try:
        group.ranks[0].all_reduce(torch.ones(5000), torch.ones(5000), SUM, How(DEADLINE_S))
        with communicator._lock:
            (first,), now = pauses(time.monotonic() + 1.0, 1)
            assert first == pytest.approx(5e-4)
            while first > 5e-5:  # until the first message has come; the next one has not
                assert cards[0].world.step()
                (first,), now = pauses(now, 1)
            silent, now = pauses(now, 60)
            assert silent == sorted(silent) and silent[0] < 5e-5 and silent[-1] == pytest.approx(5e-4)
            assert sum(silent[:20]) > 5e-4  # a pause grows with the time that has passed
    finally:
        group.close()


def test_a_lost_peer_ends_what_waits_for_the_card() -> None:
    """Nothing of the source ever comes: the operations hold all their messages back."""
    group = Group(3, staging=lambda rank: SimulatedCard(0, pace=0.0))
    try:
        handles = {
            rank: [group.ranks[rank].all_reduce(torch.ones(n), torch.ones(n), SUM, How(DEADLINE_S)) for n in (9, 5000)]
            for rank in (0, 1)
        }
        group.endpoints[2].die()
        for each in handles.values():
            for handle in each:
                with pytest.raises(CollectiveError, match="the connection was reset"):
                    handle.wait(DEADLINE_S / 2)
    finally:
        group.close()


def test_what_a_failed_call_had_queued_comes_before_what_the_caller_does_next() -> None:
    """Else a late sum would write over the tensors of the caller's next attempt."""
    cards = [SimulatedCard(0, pace=0.0), SimulatedCard(1)]
    world = cards[0].world
    group = Group(2, staging=lambda rank: cards[rank])
    try:
        out = torch.zeros(9)
        handle = group.ranks[0].all_reduce(torch.ones(9), out, SUM, How(DEADLINE_S))
        assert world.step() and not world.waiting, "the source has come"
        group.ranks[1].all_reduce(torch.ones(9), torch.zeros(9), SUM, How(DEADLINE_S))
        until(lambda: world.waiting, "the sum is queued")
        group.endpoints[1].die()
        with pytest.raises(CollectiveError, match="the connection was reset"):
            handle.wait(DEADLINE_S / 2)
        out.fill_(7.0)
        while world.step():
            pass
        assert torch.equal(out, torch.full((9,), 7.0))
    finally:
        group.close()


# ---------------------------------------------------------------- on a real card


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_a_call_on_a_card(in_place: bool, seed: int) -> None:
    """Behind work that the current stream has queued, and before what it queues next; no device-wide wait."""
    staging = Staging(1 << 16)
    for attempt in range(20):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            source = torch.zeros(100_001 + attempt, device="cuda")
            torch.cuda._sleep(5_000_000)  # a staging that does not follow the stream would read zeros
            source += torch.arange(source.numel(), device="cuda")
            out = source if in_place else torch.full_like(source, float("nan"))
            staged = staging.stage(source, out)
            assert staged.source.is_pinned() and staged.out.is_pinned()
            staged.wait()
            assert staged.ready(0, 4 * source.numel())
            torch.mul(staged.source, 2, out=staged.out)
            if attempt % 2:
                staged.landed(4 * 1000, 4 * 50_000)
            staged.finish()
            staged.join()
            result = out + 1
        stream.synchronize()
        assert torch.equal(result.cpu(), 2 * torch.arange(source.numel(), dtype=torch.float32) + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_collectives_on_a_card(size: int) -> None:
    """Behind what the caller's stream has queued and before what it queues next; strided tensors and futures too."""
    group = Group(size)

    def run(me: int) -> None:
        calls, how = group.ranks[me], How(DEADLINE_S)
        for attempt in range(5):
            n = 100_001 + attempt
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                value = torch.zeros(n, device="cuda")
                torch.cuda._sleep(5_000_000)  # a staging that does not follow the stream would read zeros
                value += me + 1
                out = torch.full((n,), torch.nan, device="cuda")
                calls.all_reduce(value, out, SUM, how).wait()
                result = out + 1
                calls.all_reduce(value, value, SUM, how).wait()
                gathered = torch.full((size * n,), torch.nan, device="cuda")
                future = HelixWork([calls.all_gather(value, gathered, [n] * size, how)], [gathered], DEADLINE_S).get_future()
                doubled = 2 * future.wait()[0]
            stream.synchronize()
            total = size * (size + 1) / 2
            assert torch.equal(result.cpu(), torch.full((n,), total + 1))
            assert torch.equal(value.cpu(), torch.full((n,), total))
            assert torch.equal(doubled.cpu(), torch.full((size * n,), 2 * total))

    try:
        group.on_each(run)
    finally:
        group.close()
