"""Buckets: layout by parameter order, in-place gradients, handed out while backward still runs."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helixrt.errors import MisuseError
from helixrt.pipeline.buckets import GradientBuckets, lay_out


def test_layout_follows_parameter_order_for_any_sizes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        tensors = [(str(i), torch.empty(rng.randint(1, 50))) for i in range(rng.randint(1, 20))]
        alone = {name for name, _ in tensors if rng.random() < 0.1}
        limit = rng.randint(1, 400)
        slots, sizes = lay_out(tensors, limit, alone)
        assert [s.name for s in slots] == [n for n, _ in tensors]
        at = [0] * len(sizes)
        for before, slot in zip([None, *slots], slots, strict=False):
            assert before is None or slot.bucket in (before.bucket, before.bucket + 1), f"seed {seed}"
            assert slot.start == at[slot.bucket], f"seed {seed}"
            at[slot.bucket] += slot.shape.numel()
        assert tuple(at) == sizes, f"seed {seed}"
        for bucket in range(len(sizes)):
            members = [s for s in slots if s.bucket == bucket]
            assert len(members) == 1 or not alone & {s.name for s in members}, f"seed {seed}"
            if bucket + 1 < len(sizes) and not alone:
                assert sizes[bucket] * 4 >= limit > (sizes[bucket] - members[-1].shape.numel()) * 4, f"seed {seed}"


def test_the_first_bucket_may_have_a_size_of_its_own(seed: int) -> None:
    for number in range(200):
        chance = random.Random(seed + number)
        tensors = [(f"p{i}", torch.empty(chance.randrange(1, 20))) for i in range(chance.randrange(1, 12))]
        limit, first = chance.randrange(4, 200), chance.randrange(4, 200)
        slots, sizes = lay_out(tensors, limit, first_bytes=first)
        head = next((i for i, slot in enumerate(slots) if slot.bucket == 1), len(slots))
        assert 4 * sizes[0] >= first or head == len(slots)  # it is full, or all there is
        assert 4 * (sizes[0] - tensors[head - 1][1].numel()) < first
        rest, rest_sizes = lay_out(tensors[head:], limit)
        assert sizes[1:] == rest_sizes and [s.start for s in slots[head:]] == [s.start for s in rest]


def test_parameters_of_different_kinds_share_no_bucket(seed: int) -> None:
    """Each kind lies as it would lie alone; buckets are in the order of their first parameters."""
    rng = random.Random(seed)
    for _ in range(200):
        tensors = [(str(i), torch.empty(rng.randint(1, 50))) for i in range(rng.randint(1, 20))]
        kinds, limit = [rng.choice("ab") for _ in tensors], rng.randint(1, 400)
        slots, sizes = lay_out(tensors, limit, kinds=kinds)
        firsts = [next(place for place, slot in enumerate(slots) if slot.bucket == bucket) for bucket in range(len(sizes))]
        assert firsts == sorted(firsts), f"seed {seed}"
        for kind in "ab":
            mine = [slot for slot, own in zip(slots, kinds, strict=True) if own == kind]
            alone, alone_sizes = lay_out([t for t, own in zip(tensors, kinds, strict=True) if own == kind], limit)
            number = {bucket: place for place, bucket in enumerate(sorted({slot.bucket for slot in mine}))}
            assert [(number[s.bucket], s.start) for s in mine] == [(s.bucket, s.start) for s in alone], f"seed {seed}"
            assert [sizes[bucket] for bucket in number] == list(alone_sizes), f"seed {seed}"


def test_buckets_come_in_one_order_during_the_last_backward_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    buckets = GradientBuckets({0: model}, bucket_bytes=1)
    assert len(buckets.flat) == 8
    seen: list[tuple[int, bool]] = []
    running = False
    final: dict[int, torch.Tensor] = {}

    def on_bucket(index: int) -> None:
        seen.append((index, running))
        final[index] = buckets.flat[index].clone()

    for _ in range(2):
        seen.clear()
        buckets.begin(on_bucket)
        model(torch.randn(3, 4)).sum().backward()
        assert not seen
        buckets.last_backward(0)
        running = True
        model(torch.randn(3, 4)).sum().backward()
        running = False
        buckets.finish(0)
        assert seen == [(i, True) for i in reversed(range(8))]
        assert all(torch.equal(final[i], buckets.flat[i]) for i in range(8))
        assert all(p.grad.untyped_storage().data_ptr() == buckets.flat[i].data_ptr() for i, p in enumerate(model.parameters()))


def test_unused_parameters_are_zero_and_do_not_hold_the_others_up() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    buckets = GradientBuckets({0: model}, bucket_bytes=1)
    seen: list[int] = []
    buckets.begin(seen.append)
    buckets.last_backward(0)
    model["used"](torch.ones(1, 2)).sum().backward()
    buckets.finish(0)
    assert seen == [3, 2, 1, 0]
    assert not buckets.flat[3].any() and buckets.flat[1].any()


def test_withheld_gradients_wait_until_they_are_complete() -> None:
    model = nn.Linear(2, 2)
    buckets = GradientBuckets({0: model}, bucket_bytes=1 << 20, withheld=[model.weight])
    assert len(buckets.flat) == 2  # the withheld one has its own
    seen: list[int] = []
    buckets.begin(seen.append)
    buckets.last_backward(0)
    model(torch.ones(1, 2)).sum().backward()
    buckets.finish(0)
    assert seen == [1]
    buckets.complete(model.weight)
    assert seen == [1, 0]


def test_a_gradient_that_grows_after_it_was_final_is_an_error() -> None:
    """Reentrant checkpointing runs a backward for each region, so a shared module's gradient comes in two."""
    model = nn.Linear(2, 2)
    for reentrant, rule in ((True, "the gradient of (weight|bias) was added to after it was final"), (False, "")):
        buckets = GradientBuckets({0: model}, bucket_bytes=1)
        buckets.begin(lambda bucket: None)
        buckets.last_backward(0)
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=reentrant)
        with pytest.raises(MisuseError, match=rule) if rule else nullcontext():
            x.sum().backward()
        buckets.close()


def test_chunks_with_equal_names_have_slots_of_their_own() -> None:
    chunks = {1: nn.Linear(2, 2), 3: nn.Linear(2, 2)}
    buckets = GradientBuckets(chunks, bucket_bytes=1, withheld=[chunks[3].weight])
    assert [name for name, _ in buckets.named] == ["weight", "bias", "chunk3.weight", "chunk3.bias"]
    seen: list[int] = []
    buckets.begin(seen.append)
    for number, chunk in reversed(chunks.items()):
        buckets.last_backward(number)
        chunk(torch.ones(1, 2)).sum().backward()
        buckets.finish(number)
    assert seen == [3]
    buckets.complete(chunks[3].weight)
    assert seen == [3, 2, 1, 0]


def test_an_error_in_on_bucket_comes_through() -> None:
    model = nn.Linear(2, 2)
    buckets = GradientBuckets({0: model}, bucket_bytes=1)

    def broken(index: int) -> None:
        raise KeyError("first cause")

    buckets.begin(broken)
    buckets.last_backward(0)
    with pytest.raises(KeyError, match="first cause"):
        model(torch.ones(1, 2)).sum().backward()


def test_a_parameter_of_two_chunks_is_final_after_both() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    buckets = GradientBuckets({0: first, 3: last}, bucket_bytes=1)
    assert [n for n, _ in buckets.named] == ["weight", "bias", "chunk3.bias"] and len(buckets.flat) == 3
    x = torch.tensor([[1.0, 2.0]])
    both = torch.tensor([[2.0, 4.0], [2.0, 4.0]])
    for order in ((3, 0), (0, 3)):
        seen: list[int] = []
        buckets.begin(seen.append)
        for chunk in order:
            assert seen == ([] if chunk == order[0] else [2] if order[0] == 3 else [])
            buckets.last_backward(chunk)
            (first if chunk == 0 else last)(x).sum().backward()
            buckets.finish(chunk)
        assert seen == [2, 1, 0]
        assert torch.equal(first.weight.grad, both) and first.weight.grad.data_ptr() == buckets.flat[0].data_ptr()
