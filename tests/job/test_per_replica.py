"""State per replica: it belongs to a position of the stream, through repeats, restarts and steps back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.errors import Departed, MisuseError
from helixrt.job.checkpoint import is_due
from helixrt.job.loader_states import LoaderStates
from helixrt.job.per_replica import SAVED, PerReplicaState
from helixrt.replica.store import MemoryRunStore
from tests.job.session_world import LocalHost, batches, ready, session_with, summed, tiny, worked


class Count:
    """Counts the batches that it has seen."""

    def __init__(self) -> None:
        self.seen = torch.zeros((), dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def made(
    count: Count, store: MemoryRunStore, folder: Path | None, said: list[str], every: int = 10, checkpoints: int = 0
) -> PerReplicaState:
    states = LoaderStates(store, "0/0/per_replica", said.append, folder)
    saved = LoaderStates(store, "0/0/per_replica/saved", said.append, folder, keep=SAVED)
    return PerReplicaState({"count": count}, states, saved, every, lambda step: is_due(step, checkpoints, 1000), said.append)


@pytest.mark.parametrize("case", range(30))
def test_the_state_is_a_function_of_the_position(case: int) -> None:
    """Steps are dropped and begun again, and the newest ones are superseded, at random; in one process the state is exact."""
    chance = random.Random(case)
    accumulate = chance.choice((1, 2, 4))
    count, said = Count(), list[str]()
    own = made(count, MemoryRunStore(), None, said, every=chance.choice((1, 3, 10)))
    position = 0
    for step in range(1, 60):
        own.begin(position, step)
        assert int(count.seen) == position
        count.seen += accumulate  # in place, too
        draw = chance.random()
        if draw < 0.6:
            position += accumulate
        elif draw < 0.7:
            position = max(0, position - accumulate)  # another base was agreed, one step back
    assert said == []


@pytest.mark.parametrize("kept", ["store", "folder"])
def test_a_replica_that_starts_again_takes_the_newest_state_at_or_before_its_position(kept: str, tmp_path: Path) -> None:
    store, folder = MemoryRunStore(), tmp_path if kept == "folder" else None
    count = Count()
    own = made(count, store, folder, [], every=10)
    for step in range(1, 38):
        own.begin(step - 1, step)
        count.seen += 1
    own.flush()
    said: list[str] = []
    again = Count()
    made(again, store if kept == "store" else MemoryRunStore(), folder, said).begin(37, 38)
    assert int(again.seen) == 30 and said == ["per-replica state: that of batch 30 is taken, for batch 37"]
    said.clear()
    other = Count()
    made(other, MemoryRunStore(), None, said).begin(37, 38)
    assert int(other.seen) == 0 and said == ["per-replica state: there is none at or before batch 37, so it begins anew"]


def test_the_state_of_a_checkpoint_is_kept_exactly(tmp_path: Path) -> None:
    count = Count()
    own = made(count, MemoryRunStore(), tmp_path, [], every=1000, checkpoints=5)
    for step in range(1, 14):  # checkpoints of steps 5 and 10; two batches a step
        own.begin(2 * (step - 1), step)
        count.seen += 2
    own.flush()
    for position in (20, 10):  # a process that begins at 10 gives up what comes later
        again = Count()
        made(again, MemoryRunStore(), tmp_path, []).begin(position, position // 2 + 1)
        assert int(again.seen) == position


@pytest.mark.parametrize("kept", ["store", "folder"])
def test_the_state_of_a_checkpoint_outlives_many_published_after_it(kept: str, tmp_path: Path) -> None:
    """A run that goes on from its newest checkpoint, or an older one, may have published many states since."""
    count, store, folder = Count(), MemoryRunStore(), tmp_path if kept == "folder" else None
    own = made(count, store, folder, [], every=2, checkpoints=20)
    for step in range(1, 100):
        own.begin(step - 1, step)
        count.seen += 1
    own.flush()
    for position in (80, 60, 40):
        again, said = Count(), list[str]()
        made(again, store if kept == "store" else MemoryRunStore(), folder, said).begin(position, position + 1)
        assert int(again.seen) == position and said == [
            f"per-replica state: that of batch {position} is taken, for batch {position}"
        ]


@pytest.mark.parametrize("begun", [False, True])
def test_a_replica_that_leaves_publishes_its_newest_state(begun: bool) -> None:
    """With its next step begun: that with which it began, as the leader has it, since the next batch was ordered before the
    replica heard that it is to leave."""
    host = LocalHost()
    session = session_with(host)
    model, count = tiny(), Count()
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], per_replica={"count": count})

    def leave() -> None:
        raise Departed("SIGTERM")

    with pytest.raises(Departed):
        for step in session.steps(batches(), until=9, accumulate=2):
            assert host.worker is not None
            if step.number == 6:
                host.worker.outcome = lambda order: None  # type: ignore[method-assign, assignment]
            for x, y in step:
                count.seen += 1
                step.backward(summed(model, x, y))
            if step.number == 5 + begun:
                host.worker.next_work = leave  # type: ignore[method-assign, assignment]
            step.commit()
    assert int(count.seen) == (12 if begun else 10)
    again, said = Count(), list[str]()
    made(again, host.store, None, said).begin(10, 6)
    assert int(again.seen) == 10 and said == ["per-replica state: that of batch 10 is taken, for batch 10"]


def test_a_step_back_gives_up_the_states_after_it(tmp_path: Path) -> None:
    """A resumed run goes on from an older checkpoint: states of the abandoned steps must not come back."""
    count = Count()
    own = made(count, MemoryRunStore(), tmp_path, [], every=2)
    for step in range(1, 10):
        own.begin(step - 1, step)
        count.seen += 1
    own.flush()
    later, said = Count(), list[str]()
    resumed = made(later, MemoryRunStore(), tmp_path, said, every=2)
    resumed.begin(4, 5)
    assert int(later.seen) == 4
    later.seen += 100
    resumed.begin(5, 6)
    resumed.begin(6, 7)
    resumed.flush()
    newest = Count()
    made(newest, MemoryRunStore(), tmp_path, said).begin(8, 9)
    assert int(newest.seen) == 104


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    class Odd(Count):
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

    for thing, message in (
        (Odd(), "per_replica 'odd' has a state that torch.load"),
        (object(), "per_replica 'odd' is a object"),
    ):
        session = session_with(LocalHost())
        model = tiny()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        session.register(model=model, optimizers=optimizers, per_replica={"odd": thing})
        with pytest.raises(MisuseError, match=message):
            next(iter(session.steps(batches(), until=1)))


def test_in_the_loop_dropped_steps_leave_no_trace() -> None:
    host = LocalHost(dropped={2, 3, 5})
    session = session_with(host)
    model, count = tiny(), Count()
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], per_replica={"count": count})
    for step in session.steps(batches(), until=5, accumulate=2):
        for x, y in step:
            count.seen += 1
            step.backward(summed(model, x, y))
        step.commit()
    assert int(count.seen) == 10


# ---------------------------------------------------------------- session.stop


def test_stop_ends_the_loop_after_an_agreed_step() -> None:
    host = LocalHost()
    session, model = ready(host)
    seen = []
    for step in worked(session, model, until=50):
        seen.append(step.commit().step)
        if seen[-1] == 3:
            session.stop("enough")
    assert seen == [1, 2, 3, 4] and host.worker is not None and host.worker.head.last == "enough"
    assert not session.left_early


def test_stop_outside_the_loop_and_without_a_reason_is_refused() -> None:
    session = session_with(LocalHost())
    with pytest.raises(MisuseError, match="outside the loop"):
        session.stop("enough")
    model = tiny()
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    next(iter(session.steps(batches(), until=1)))
    for reason in ("", "x" * 201, None):
        with pytest.raises(MisuseError, match="takes a reason of 1 to 200 characters"):
            session.stop(reason)  # type: ignore[arg-type]
