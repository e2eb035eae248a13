"""Kernels are compiled before a staged operation begins: never under the communicator's lock, and exactly those it launches."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from helixrt.collectives import staged_operation
from helixrt.collectives.handle import CollectiveError
from helixrt.collectives.operations import Collectives, How
from helixrt.collectives.reduction import Op, Reduction
from helixrt.triton_kernels import reduction
from helixrt.triton_kernels.warm_up import Variant, tensors_like, variant_of, warm_up
from tests.collectives.queue_group import DEADLINE_S, SUM, Group
from tests.collectives.test_staging import CHUNK_BYTES, SimulatedCard


class Compiles(SimulatedCard):
    """A card that notes what is compiled, and whether the communicator could go on meanwhile."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._compile = self._note
        self.compiled: list[Variant] = []
        self.user: Collectives | None = None

    def _note(self, variant: Variant, device: torch.device) -> None:
        assert self.user is not None
        lock = self.user.communicator._lock
        assert lock.acquire(timeout=DEADLINE_S), "the communicator's lock is held while a kernel is compiled"
        lock.release()
        self.compiled.append(variant)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The kernels that reductions of staged operations need, as they are launched."""
    needed: list[Variant] = []
    reduce_copy = staged_operation.reduce_copy

    def launch(left: torch.Tensor, right: torch.Tensor, *into: torch.Tensor, op: Op, divisor: int) -> None:
        addresses = [each.data_ptr() for each in (left, right, *into)]
        needed.append(variant_of(addresses, left.numel(), left.dtype, op, divisor))
        reduce_copy(left, right, *into, op=op, divisor=divisor)

    monkeypatch.setattr(staged_operation, "reduce_copy", launch)
    return needed


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_launched_was_compiled_and_what_was_compiled_is_launched(
    size: int, launched: list[Variant], seed: int
) -> None:
    """Whatever the algorithm, the type, the divisor and where the tensors begin."""
    cards = [Compiles(seed + rank) for rank in range(size)]
    group = Group(size, staging=lambda rank: cards[rank])
    for card, calls in zip(cards, group.ranks, strict=True):
        card.user = calls
    rng, how = random.Random(seed), How(DEADLINE_S)
    for length, shift in itertools.product((1, 40, 300, 900, 5000), (0, 1)):
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64, torch.int32])
        divisor = rng.choice([1, size]) if dtype.is_floating_point else 1
        reduction = Reduction(Op.SUM, divisor)

        def run(me: int, length=length, shift=shift, dtype=dtype, reduction=reduction) -> None:  # type: ignore[no-untyped-def]
            def new(count: int) -> torch.Tensor:
                return torch.ones(count + shift).to(dtype)[shift:]

            calls = group.ranks[me]
            calls.all_reduce(new(length), new(length), reduction, how).wait()
            calls.reduce_scatter(new(length * size), new(length), [length] * size, reduction, how).wait()
            calls.reduce(new(length), new(length), size - 1, reduction, how).wait()

        group.on_each(run)
    compiled = {variant for card in cards for variant in card.compiled}
    assert set(launched) <= compiled, f"compiled under the lock: {set(launched) - compiled}"
    assert compiled <= set(launched), f"compiled for nothing: {compiled - set(launched)}"
    assert all(len(card.compiled) == len(set(card.compiled)) for card in cards), "compiled twice"
    group.close()


def test_a_kernel_that_does_not_compile_ends_the_generation() -> None:
    """The peers wait for this rank's part of an operation that it cannot begin."""
    cards = [Compiles(rank) for rank in range(2)]
    group = Group(2, staging=lambda rank: cards[rank])
    for card, calls in zip(cards, group.ranks, strict=True):
        card.user = calls

    def fail(variant: Variant, device: torch.device) -> Any:
        raise RuntimeError("no compiler")

    cards[0]._compile = fail
    theirs = group.ranks[1].all_reduce(torch.ones(50), torch.zeros(50), SUM, How(DEADLINE_S))
    with pytest.raises(RuntimeError, match="no compiler"):
        group.ranks[0].all_reduce(torch.ones(50), torch.zeros(50), SUM, How(DEADLINE_S))
    with pytest.raises(CollectiveError, match="could not begin.*no compiler"):
        theirs.wait(DEADLINE_S / 2)
    group.close()


VARIANTS = [
    Variant(dtype, Op.SUM, False, aligned)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8)
    for count in (3, 4)
    for aligned in itertools.product((True, False), repeat=count)
    if dtype.itemsize < 8 or any(aligned)  # 8 bytes: two that are no multiple of 16 have the same offset
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_launch_that_compiles_is_of_the_same_kind(variant: Variant) -> None:
    given = tensors_like(variant, torch.device("cpu"))
    addresses = [each.data_ptr() for each in given]
    assert variant_of(addresses, given[0].numel(), variant.dtype, variant.op, 1) == variant


def test_nothing_is_compiled_for_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(reduction, "reduce_copy", lambda *tensors, **options: launched.append(tensors))
    warm_up(VARIANTS[0], torch.device("cpu"))
    assert launched == []


assert CHUNK_BYTES % 16 == 0  # else what is summed here would not begin where it does on a card
