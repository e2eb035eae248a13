"""Tensors that are used again and again get huge pages: which, when, how much at a time; and their bytes stay."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from helixrt.collectives import huge_pages
from helixrt.collectives.huge_pages import LEAST_BYTES, PAGE_BYTES, SLICE_BYTES, USES, HugePages
from helixrt.collectives.process_group import HelixGroup

Asked = list[tuple[int, int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """(address, bytes) of each call of the kernel."""
    calls: Asked = []

    def advise(address: int, size: int, advice: int) -> int:
        assert advice == 25
        calls.append((address, size))
        return -1

    monkeypatch.setattr(huge_pages, "_advise", lambda: advise)
    yield calls


def consented() -> HugePages:
    pages = HugePages()
    pages.consent = True
    return pages


def test_a_callers_memory_is_let_be_without_consent_and_the_librarys_own_is_not(asked: Asked) -> None:
    callers, own = (torch.empty(8 << 20, dtype=torch.uint8) for _ in range(2))
    pages = HugePages()
    for _ in range(2 * USES):
        pages.used(callers)
        pages.used(own, own=True)
    assert asked and all(own.data_ptr() <= at < own.data_ptr() + own.numel() for at, _ in asked)


@pytest.mark.parametrize("consent", [False, True])
def test_a_process_group_asks_for_consent(asked: Asked, consent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if consent:
        monkeypatch.setenv("HELIXRT_HUGE_PAGES", "1")
    store = dist.HashStore()
    tensors = [torch.ones(LEAST_BYTES // 2) for _ in range(2)]

    def rank(number: int) -> None:
        group = HelixGroup(store, number, 2, timedelta(seconds=60))
        for _ in range(2 * USES):
            group.allreduce([tensors[number]]).wait()
        group.shutdown()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    assert bool(asked) is consent


def test_memory_that_comes_again_and_again_is_taken_a_slice_at_a_time(asked: Asked) -> None:
    tensor = torch.empty(40 << 20, dtype=torch.uint8)
    pages = consented()
    for _ in range(USES - 1):
        pages.used(tensor)
    assert not asked
    for _ in range(10):
        pages.used(tensor)
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
    assert [size for _, size in asked[:-1]] == [SLICE_BYTES] * (len(asked) - 1) and 3 <= len(asked) <= 4
    assert first <= asked[0][0] < first + PAGE_BYTES and end - PAGE_BYTES < sum(asked[-1]) <= end
    assert all(address % PAGE_BYTES == size % PAGE_BYTES == 0 for address, size in asked)
    assert all(sum(one) == other[0] for one, other in zip(asked, asked[1:], strict=False))


def test_short_tensors_and_those_that_come_and_go_are_let_be(asked: Asked) -> None:
    pages, tensors = consented(), [torch.empty(LEAST_BYTES, dtype=torch.uint8) for _ in range(4)]
    for _ in range(10):
        pages.used(tensors[0][: LEAST_BYTES - 1])
    for tensor in tensors:
        for _ in range(USES - 1):
            pages.used(tensor)
    assert not asked


def test_where_the_system_wants_none_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "_SETTING", setting)
    assert huge_pages._advise() is None
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "missing")
    assert huge_pages._advise() is None
    pages, tensor = consented(), torch.empty(LEAST_BYTES, dtype=torch.uint8)
    for _ in range(2 * USES):
        pages.used(tensor)


def test_the_bytes_stay() -> None:
    tensor = torch.randint(0, 256, (24 << 20,), dtype=torch.uint8)
    before, pages = tensor.clone(), consented()
    for _ in range(USES + 3):
        pages.used(tensor)
    assert torch.equal(tensor, before)
