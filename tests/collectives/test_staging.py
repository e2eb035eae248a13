"""Staging: no byte is read before it has come, every byte of the result reaches the card once, in any order of copies.

On the host a card is played by lanes whose copies happen only when told, in an order that a seed decides; memory
is filled with NaN before, so that what was read too early shows.
"""

from __future__ import annotations

import random

import pytest
import torch

from helixrt.collectives.staging import Lane, Mark, Staged, Staging

CHUNK_BYTES = 64


class Later(Mark):
    def __init__(self, world: World, number: int) -> None:
        self._world, self.number = world, number

    def passed(self) -> bool:
        return self.number in self._world.done

    def wait(self) -> None:
        while not self.passed():
            self._world.step()


class World:
    """All lanes' copies that are queued: each lane's are done in order, lanes in any order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._queued: list[list[tuple[int, set[int], torch.Tensor, torch.Tensor]]] = []
        self.done: set[int] = set()
        self.copies = 0

    def lane(self, device: torch.device) -> Lane:
        self._queued.append([])
        return WorldLane(self, self._queued[-1])

    def step(self) -> bool:
        """Do one copy, if any may be done."""
        may = [lane for lane in self._queued if lane and lane[0][1] <= self.done]
        if not may:
            assert not any(self._queued), "copies wait for each other"
            return False
        number, _, into, source = self._rng.choice(may).pop(0)
        into.copy_(source)
        self.done.add(number)
        return True


class WorldLane(Lane):
    def __init__(self, world: World, queued: list[tuple[int, set[int], torch.Tensor, torch.Tensor]]) -> None:
        self._world, self._queued, self._after = world, queued, set[int]()

    def follow_caller(self, tensor: torch.Tensor) -> None:
        pass  # the caller's work is done at once

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, Later)
        self._after.add(mark.number)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Mark:
        self._world.copies += 1
        self._queued.append((self._world.copies, set(self._after), into, source))
        return Later(self._world, self._world.copies)

    def lead_caller(self, mark: Mark) -> None:
        mark.wait()

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full((tensor.numel(),), float("nan"), dtype=tensor.dtype)


def staged_on(world: World, source: torch.Tensor, out: torch.Tensor) -> Staged:
    lanes = (world.lane(source.device), world.lane(source.device))
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


@pytest.mark.parametrize("in_place", [False, True])
def test_host_tensors_are_staged_as_themselves(in_place: bool) -> None:
    source = torch.randn(3, 4)
    out = source if in_place else torch.zeros(3, 4)
    staged = Staging(CHUNK_BYTES).stage(source, out)
    assert staged.source.data_ptr() == source.data_ptr() and staged.out.data_ptr() == out.data_ptr()
    assert (staged.source is staged.out) == in_place
    assert staged.ready(0, 48)
    staged.wait()
    staged.out.copy_(2 * staged.source)
    wanted = out.clone()
    staged.landed(0, 16)
    staged.finish()
    staged.join()
    assert torch.equal(out, wanted)


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
