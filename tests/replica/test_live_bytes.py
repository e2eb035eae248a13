"""Where a rank's gradient sets and copies are, and how much: two gradient-sized sets on the device, all else in host memory.

The `meta` device stands in for an accelerator: its tensors are told from those in host memory. They have no values, so where
values count, host memory is taken for an accelerator's.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.replica import live_bytes, reduced_sets
from helixrt.replica.live_bytes import KEPT, LOCAL, SERVED, SUMS, bytes_of
from helixrt.replica.reduced_sets import ReducedSets
from tests.replica.stand_ins import Gated

ELEMENTS = 1000
SET = 4 * 2 * ELEMENTS


def records(count: int) -> list[CommitRecord]:
    chain = [genesis("run", 2)]
    for step in range(1, count + 1):
        chain.append(CommitRecord(step, step, chain[-1].hash, ((0, 0),), {0: step}, "run"))
    return chain[1:]


def live_on(device: str) -> int:
    """Bytes of all tensors of this device and about this size that the process holds, by the garbage collector."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == device and t.numel() == ELEMENTS]
    return sum(bytes_of(found).values())


@pytest.fixture
def sets() -> ReducedSets:
    return ReducedSets(Gated())


def local(device: str) -> list[torch.Tensor]:
    return [torch.zeros(ELEMENTS, device=device) for _ in range(2)]


def count(sets: ReducedSets, buckets: list[torch.Tensor]) -> dict[str, dict[str, int]]:
    return {kind: bytes_of(tensors) for kind, tensors in {LOCAL: buckets, **sets.live()}.items()}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_two_sets_on_the_device_however_many_steps(device: str, sets: ReducedSets) -> None:
    before = live_on("meta")
    buckets = local(device)
    for record in records(6):
        sums = sets.borrow(buckets)
        assert {tensor.device.type for tensor in sums} == {device}
        sets.exchanged(record.generation, sums)
        sets.keep(record)
        following = sets.borrow(buckets) if device == "meta" else None  # the next exchange begins before this update
        taken = sets.take(record.hash)
        assert taken is sums and (following is None or following is sums)
        sets.serve(record, taken)
    found = count(sets, buckets)
    if device == "meta":
        assert found[LOCAL] == {"meta": SET} and found[SUMS] == {"meta": SET, "cpu": 2 * SET}, "a spare and the next copy"
        assert live_on("meta") - before == 2 * SET, "what the count says is all that there is"
    assert found[SERVED] == {"cpu": 2 * SET} and found[KEPT] == {}


def test_a_replica_that_does_not_contribute_keeps_its_sets_in_host_memory(sets: ReducedSets) -> None:
    """Its exchange may end before the update of the step before: the set on the device is not touched."""
    buckets = local("meta")
    first, *behind = records(5)
    sums = sets.borrow(buckets)
    sets.exchanged(first.generation, sums)
    sets.keep(first)
    for record in behind:
        other = sets.borrow(buckets, contribute=False)
        assert {tensor.device.type for tensor in other} == {"cpu"} and other is not sums
        sets.exchanged(record.generation, other)
        sets.keep(record)
    found = count(sets, buckets)
    assert found[SUMS] == {"meta": SET} and found[KEPT] == {"cpu": 5 * SET}, "four, and the copy of the one on the device"
    assert sets.take(first.hash) is sums
    sets.serve(first, sums)
    for record in behind:
        sets.serve(record, sets.take(record.hash))
    found = count(sets, buckets)
    assert found[SUMS]["meta"] == SET and found[SERVED] == {"cpu": 2 * SET}


def test_an_exchange_that_was_not_committed_gives_its_set_back(sets: ReducedSets) -> None:
    buckets = local("meta")
    sums = sets.borrow(buckets)
    sets.exchanged(1, sums)
    assert {tensor.device.type for tensor in sets.borrow(buckets, contribute=False)} == {"cpu"}
    assert sets.borrow(buckets) is sums


def test_what_is_served_is_the_copy_that_was_queued_with_each_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The set on the device is written again by the next exchange, and no copy is made where the update waits for it."""
    monkeypatch.setattr(reduced_sets, "_elsewhere", lambda tensor: True)
    offers = Gated()
    sets, buckets = ReducedSets(offers), local("cpu")  # type: ignore[arg-type]
    addresses = set()
    for number, record in enumerate(records(6), 1):
        sums = sets.borrow(buckets)
        if number == 3:  # an exchange that was broken is made again
            sums[1].fill_(-1)
            sets.summed(1, sums)
            assert sets.borrow(buckets) is sums
        for index in (1, 0):
            sums[index].fill_(10 * number + index)
            sets.summed(index, sums)
        sets.exchanged(record.generation, sums)
        sets.keep(record)
        following = sets.borrow(buckets)
        assert following is sums
        following[1].fill_(-2)
        sets.summed(1, following)
        sets.serve(record, sets.take(record.hash))
        (served,) = [tensors for name, tensors in offers.offered.items() if name.endswith(record.hash)]
        assert [float(tensor.mean()) for tensor in served.values()] == [10.0 * number, 10.0 * number + 1]
        addresses |= {tensor.data_ptr() for tensor in served.values()}
    assert len(addresses) <= 2 * 4, "sets are used again"
    assert not addresses & {tensor.data_ptr() for tensor in sums}


@pytest.mark.gpu
def test_the_copy_of_a_set_on_a_gpu_is_pinned_also_after_this_replica_was_behind() -> None:
    """While it is behind, each set is used once, and pinning it would take longer than the sum. The sets are free later."""
    offers, buckets = Gated(), local("cuda")
    sets = ReducedSets(offers)  # type: ignore[arg-type]
    *behind, one, other = records(6)
    for record in behind:
        sums = sets.borrow(buckets, contribute=False)
        assert not any(tensor.is_pinned() for tensor in sums)
        sets.exchanged(record.generation, sums)
        sets.keep(record)
    for record in behind:
        sets.serve(record, sets.take(record.hash))
    for record in (one, other):
        sums = sets.borrow(buckets)
        for index in (1, 0):
            sets.summed(index, sums)
        sets.exchanged(record.generation, sums)
        sets.keep(record)
        sets.serve(record, sets.take(record.hash))
    assert len(offers.offered) == 2
    assert all(tensor.is_pinned() for tensors in offers.offered.values() for tensor in tensors.values())


def test_memory_that_is_shared_counts_once() -> None:
    base = torch.zeros(100)
    assert bytes_of([base, base[10:], base.view(10, 10), torch.zeros(5)]) == {"cpu": 420}
    meta: Any = torch.zeros(10, device="meta")
    assert bytes_of([meta, meta[2:], torch.zeros(10, device="meta")]) == {"meta": 80}
    copy = live_bytes.host_copy(base)
    base.add_(1)
    assert float(copy.sum()) == 0.0
