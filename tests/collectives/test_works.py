"""What torch's callers hold of a collective: its result and its error, by every way they ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from helixrt.collectives.operations import How
from helixrt.collectives.work import GroupError, HelixWork
from helixrt.errors import Cause
from tests.collectives.queue_group import DEADLINE_S, SUM, Group


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group(2)
    yield made
    made.close()


def works(group: Group, rank: int, how: How | None = None) -> tuple[HelixWork, torch.Tensor]:
    """Of two collectives, as a coalesced call has them."""
    values = [torch.full((n,), rank + 1.0) for n in (3, 4000)]
    handles = [group.ranks[rank].all_reduce(value, value, SUM, how or How(DEADLINE_S)) for value in values]
    return HelixWork(handles, values, DEADLINE_S), values[1]


def test_a_work_that_goes_well(group: Group) -> None:
    def run(rank: int) -> None:
        work, value = works(group, rank)
        seen: list[float] = []
        before = work.get_future().then(lambda f: seen.append(float(f.value()[1][0])))
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        before.wait()
        late = work.get_future().then(lambda f: float(f.value()[0].sum()))
        assert seen == [3.0] and late.wait() == 9.0 and torch.equal(value, torch.full((4000,), 3.0))
        assert [len(each) for each in work.result()] == [3, 4000]

    group.on_each(run)


def test_a_work_that_fails_says_so_in_every_way(group: Group) -> None:
    work, _ = works(group, 0)
    future = work.get_future()
    follows = future.then(lambda f: f.value())
    assert not work.is_completed() and not work.is_success()
    with pytest.raises(GroupError, match="timed out after 10 ms of waiting; the operation goes on"):
        work.wait(timedelta(milliseconds=10))
    group.endpoints[1].die()
    with pytest.raises(GroupError, match="Connection closed by peer: the connection was reset"):
        work.wait()
    for each in (future, follows):
        with pytest.raises(RuntimeError, match="GroupError: Connection closed by peer"):
            each.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), GroupError)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):  # asked for after the end
        works(group, 0)[0].get_future().wait()


def test_a_work_that_is_aborted_or_late(group: Group) -> None:
    work, _ = works(group, 0, How(0.05))
    with pytest.raises(GroupError, match="timed out after .* ms: collective 0 did not end in time"):
        work.wait()
    group.configure(2, [0, 1])
    work, _ = works(group, 0)
    group.ranks[0].communicator.abort(Cause("no more"))
    with pytest.raises(GroupError, match="aborted: no more"):
        work.wait()
