"""What scenarios of engines share that run on several ranks: records, sums, equal states, errors, answers."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from helixrt.engines.inner_group import lost_rank
from helixrt.errors import Retryable
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import State


def record(step: int, contributors: Sequence[int] = (0,), *, applied: bool = True) -> CommitRecord:
    return CommitRecord(step, step, "parent", tuple((replica, 0) for replica in contributors), applied=applied)


def summed(engines: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.stack(list(parts)).sum(0) for parts in zip(*(engine.buckets for engine in engines), strict=True)]


def same_state(one: State, other: State) -> None:
    """Asserts equal names, scalars and tensors."""
    assert list(one.tensors) == list(other.tensors)
    differ = {n: (one.scalars.get(n), other.scalars.get(n)) for n in {*one.scalars, *other.scalars}}
    assert dict(one.scalars) == dict(other.scalars), {n: pair for n, pair in differ.items() if pair[0] != pair[1]}
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def raises(kind: type[BaseException], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=match):
        call()


@contextmanager
def lost() -> Iterator[None]:
    """Another rank ends within the block, and a collective says so."""
    try:
        yield
    except Retryable as error:
        assert "a rank of this replica is lost" in str(error)
    except RuntimeError as error:
        assert lost_rank(error), traceback.format_exc()
    else:
        raise AssertionError("no collective failed")


def answer(rank: int, scenarios: Sequence[Callable[[Any], object]], place: Callable[[], Any], results: Any) -> None:
    """Run scenarios in turn; for each (rank, name, what went wrong or ""). Ends the process."""
    for scenario in scenarios:
        wrong = ""
        try:
            scenario(place())
        except BaseException:
            wrong = traceback.format_exc()
        results.put((rank, scenario.__name__, wrong))
        if wrong:
            break
    results.close()
    results.join_thread()
    os._exit(0)
