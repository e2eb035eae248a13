"""Sums of buckets over ranks of one replica: in one order, beside the computing thread; a lost rank is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from helixrt.errors import Retryable
from helixrt.pipeline.reductions import BucketSums


def test_buckets_are_handed_on_in_their_order_when_they_hold_the_sum(run_stages: Any) -> None:
    def body(rank: int, group: Any) -> list[tuple[int, float]]:
        buckets = [torch.full((3,), float(10 * rank + index)) for index in range(4)]
        sums = BucketSums(buckets, [group, None, group, group])
        found: list[tuple[int, float]] = []
        threads = set()

        def on_bucket(index: int) -> None:
            threads.add(threading.current_thread())
            found.append((index, buckets[index][0].item()))

        hand_out = sums.begin(on_bucket)
        for index in reversed(range(4)):
            hand_out(index)
        sums.drain()
        assert threads and threading.current_thread() not in threads
        sums.close()
        return found

    first, second = run_stages(2, body)
    assert first == [(3, 16.0), (2, 14.0), (1, 1.0), (0, 10.0)]
    assert second == [(3, 16.0), (2, 14.0), (1, 11.0), (0, 10.0)]


def test_without_groups_nothing_is_waited_for() -> None:
    sums = BucketSums([torch.ones(2)], [None])
    found: list[int] = []
    assert sums.begin(found.append) == found.append
    sums.drain()
    sums.close()


def test_a_lost_rank_is_retryable_where_it_is_waited_for(run_stages: Any) -> None:
    def body(rank: int, group: Any) -> None:
        if rank == 1:
            return  # its end of the group is closed with it
        sums = BucketSums([torch.ones(2)], [group])
        sums.begin(lambda bucket: pytest.fail("there is no sum"))(0)
        with pytest.raises(Retryable, match="a rank of this replica is lost"):
            sums.drain()
        with pytest.raises(Retryable, match="a rank of this replica is lost"):
            sums.begin(lambda bucket: None)
        sums.close()

    run_stages(2, body, 5.0)


def test_what_goes_wrong_behind_a_sum_is_raised_by_the_thread_that_computes(run_stages: Any) -> None:
    def body(rank: int, group: Any) -> None:
        sums = BucketSums([torch.ones(2)], [group])

        def broken(index: int) -> None:
            raise KeyError(index)

        sums.begin(broken)(0)
        with pytest.raises(KeyError):
            sums.drain()
        sums.close()

    run_stages(2, body)
