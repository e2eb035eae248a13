"""The collective machine: order, window, several operations at once, and the first error."""

from __future__ import annotations

import random

import pytest

from helixrt.errors import Cause
from helixrt.protocol.collective.algorithms import direct, ring
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.collective.messages import (
    Aborted,
    Action,
    Await,
    Break,
    Compute,
    Computed,
    Done,
    Expired,
    Failed,
    PeerLost,
    Received,
    Sent,
    Skipped,
    Submitted,
    Transmit,
)
from helixrt.protocol.collective.plan import Copy, Plan, Receive, Region, Send, Space

TUNING = Tuning(chunk_bytes=256, chunks=2, least_chunk_bytes=64)
LOST = PeerLost(1, Cause("link to rank 1 is gone", "rank 0"))


def of(kind: type, actions: list[Action]) -> list[Action]:
    return [a for a in actions if isinstance(a, kind)]


def sends(*lengths: int, peer: int = 1) -> Plan:
    """Messages that depend on nothing."""
    return Plan(tuple(Send(peer, i, Region(Space.SOURCE, 0, n)) for i, n in enumerate(lengths)), tuple(() for _ in lengths))


def answer(length: int, peer: int = 1) -> Plan:
    """A message that is sent when one has come."""
    region = Region(Space.OUT, 0, length)
    return Plan((Receive(peer, 0, region), Send(peer, 0, region)), ((), (0,)))


def test_a_plan_is_followed_in_the_order_of_its_dependencies() -> None:
    machine = CollectiveMachine(0, 2, 1 << 20)
    plan = direct.direct_all_reduce(0, 2, 64, 8, TUNING, in_place=True)
    actions = machine.on(Submitted(0, plan))
    assert [type(a) for a in actions] == [Transmit, Await]
    assert machine.on(Received(0, 1, 0)) == []  # SOURCE, where the total goes, has not left yet
    (compute,) = machine.on(Sent(0, 1, 0))
    assert isinstance(compute, Compute) and compute.work.last  # type: ignore[union-attr]
    assert machine.on(Computed(0, compute.node)) == [Done(0)]
    assert machine.idle


def test_the_window_bounds_what_is_not_acknowledged_but_never_stops_a_single_message() -> None:
    machine = CollectiveMachine(0, 2, window_bytes=100)
    first = machine.on(Submitted(0, sends(300, 60, 40, 1, 200)))
    assert [t.index for t in first] == [0]  # type: ignore[union-attr]
    assert [t.index for t in machine.on(Sent(0, 1, 0))] == [1, 2]  # type: ignore[union-attr]
    assert [t.index for t in machine.on(Sent(0, 1, 1))] == [3]  # type: ignore[union-attr]
    assert machine.on(Sent(0, 1, 2)) == []
    assert [t.index for t in machine.on(Sent(0, 1, 3))] == [4]  # type: ignore[union-attr]
    assert machine.on(Sent(0, 1, 4)) == [Done(0)]


def test_windows_are_per_neighbour() -> None:
    machine = CollectiveMachine(0, 3, window_bytes=100)
    plan = Plan((*sends(90, 90).nodes, *sends(90, 90, peer=2).nodes), ((),) * 4)
    actions = machine.on(Submitted(0, plan))
    assert {(t.peer, t.index) for t in actions} == {(1, 0), (2, 0)}  # type: ignore[union-attr]


def test_sends_begin_in_the_order_of_their_index() -> None:
    """Message 1 is ready first, yet waits for message 0: receivers free their slots in that order."""
    machine = CollectiveMachine(0, 2, 1 << 20)
    region = Region(Space.OUT, 0, 8)
    plan = Plan((Receive(1, 0, region), Send(1, 0, region), Send(1, 1, region)), ((), (0,), ()))
    assert [type(a) for a in machine.on(Submitted(0, plan))] == [Await]
    assert [t.index for t in machine.on(Received(0, 1, 0))] == [0, 1]  # type: ignore[union-attr]


def test_a_later_operation_never_holds_up_an_earlier_one() -> None:
    """Rank 1 takes part in 1 only after 0 has ended, so what 1 has under way must not close the window for 0."""
    machine = CollectiveMachine(0, 2, window_bytes=100)
    machine.on(Submitted(0, answer(80)))
    assert len(of(Transmit, machine.on(Submitted(1, sends(100, 100))))) == 1
    assert [t.op for t in of(Transmit, machine.on(Received(0, 1, 0)))] == [0]  # type: ignore[union-attr]


def test_an_earlier_operation_goes_first_when_the_window_opens() -> None:
    machine = CollectiveMachine(0, 2, window_bytes=100)
    machine.on(Submitted(0, sends(100, 100)))
    machine.on(Submitted(1, sends(100, 100)))
    assert [(t.op, t.index) for t in of(Transmit, machine.on(Sent(0, 1, 0)))] == [(0, 1)]  # type: ignore[union-attr]


def test_point_to_point_begins_at_once_and_shares_no_window() -> None:
    machine = CollectiveMachine(0, 2, window_bytes=100, concurrent=1)
    machine.on(Submitted(0, sends(100, 100)))
    assert machine.on(Submitted(1, sends(100))) == []  # one collective at a time
    assert len(of(Transmit, machine.on(Submitted(-1, sends(60, 40, 60))))) == 2
    actions = machine.on_all([Sent(0, 1, 0), Sent(0, 1, 1)])
    assert [(a.op, type(a)) for a in actions] == [(0, Transmit), (0, Done), (1, Transmit)]  # type: ignore[union-attr]


def test_queued_collectives_begin_in_order() -> None:
    machine = CollectiveMachine(0, 2, 1 << 20, concurrent=2)
    for op in range(5):
        assert len(machine.on(Submitted(op, sends(8)))) == (op < 2)
    assert machine.on(Sent(1, 1, 0)) == [Done(1), Transmit(2, 1, 0, Region(Space.SOURCE, 0, 8))]
    assert machine.on(Sent(0, 1, 0)) == [Done(0), Transmit(3, 1, 0, Region(Space.SOURCE, 0, 8))]


def test_an_empty_plan_is_done_at_once_however_many_wait() -> None:
    machine = CollectiveMachine(0, 1, 0, concurrent=1)
    copy = Plan((Copy(Region(Space.SOURCE, 0, 8), Region(Space.OUT, 0, 8)),), ((),))
    machine.on(Submitted(0, copy))
    for op in range(1, 5000):
        assert machine.on(Submitted(op, Plan((), ()))) == []
    assert machine.on(Computed(0, 0)) == [Done(op) for op in range(5000)]


def test_the_first_error_fails_what_runs_and_skips_what_waits() -> None:
    machine = CollectiveMachine(0, 2, 100, concurrent=2)
    machine.on(Submitted(-3, sends(10)))
    for op in range(4):
        machine.on(Submitted(op, answer(10)))
    cause = LOST.cause
    assert machine.on(LOST) == [
        Break(cause),
        Failed(-3, cause),
        Failed(0, cause),
        Failed(1, cause),
        Skipped(2, cause),
        Skipped(3, cause),
    ]
    assert machine.idle and machine.cause == cause
    # the first reason stays, and what was under way means nothing any more
    later = [
        Aborted(Cause("later")),
        PeerLost(1, Cause("again")),
        Expired(0),
        Sent(-3, 1, 0),
        Received(0, 1, 0),
        Computed(1, 0),
    ]
    assert machine.on_all(later) == []
    assert machine.on(Submitted(4, sends(10))) == [Skipped(4, cause)]
    assert machine.on(Submitted(-4, sends(10))) == [Skipped(-4, cause)]
    assert machine.cause == cause


def test_an_abort_is_an_error_like_any_other() -> None:
    machine = CollectiveMachine(0, 2, 100)
    machine.on(Submitted(0, answer(10)))
    cause = Cause("the caller gave up")
    assert machine.on(Aborted(cause)) == [Break(cause), Failed(0, cause)]


def test_a_deadline_names_whom_the_operation_waits_for() -> None:
    machine = CollectiveMachine(0, 3, 100, concurrent=1)
    machine.on(Submitted(0, answer(10, peer=2)))
    machine.on(Submitted(1, answer(10, peer=1)))
    first, failed, skipped = machine.on(Expired(0))
    assert isinstance(first, Break) and first.cause.what == "collective 0 did not end in time; it waits for rank 2"
    assert (failed, skipped) == (Failed(0, first.cause), Skipped(1, first.cause))


def test_the_deadline_of_a_queued_operation_counts_too_that_of_an_ended_one_does_not() -> None:
    machine = CollectiveMachine(0, 2, 100, concurrent=1)
    machine.on(Submitted(0, answer(10)))
    machine.on_all([Received(0, 1, 0), Sent(0, 1, 0)])
    assert machine.on(Expired(0)) == []
    machine.on(Submitted(1, answer(10)))
    machine.on(Submitted(2, answer(10)))
    assert isinstance(machine.on(Expired(2))[0], Break)


def test_what_a_driver_must_not_report_is_caught() -> None:
    machine = CollectiveMachine(0, 2, 100)
    with pytest.raises(AssertionError, match="0 is next"):
        machine.on(Submitted(1, sends(10)))
    machine.on(Submitted(0, sends(10, 10)))
    machine.on(Sent(0, 1, 0))
    with pytest.raises(AssertionError, match="done before"):
        machine.on(Sent(0, 1, 0))


def test_many_operations_in_any_order_all_end_within_their_bounds(seed: int) -> None:
    """Four ranks, rings and barriers, each rank submitting when it likes; credit and window both bind."""
    chance = random.Random(seed)
    size, window = 4, 600
    for trial in range(40):
        plans = [
            [ring.ring_all_reduce(r, size, n, 8, TUNING) if n else direct.barrier(r, size) for r in range(size)]
            for n in (chance.choice((0, 8, 800, 5000)) for _ in range(6))
        ]
        machines = [CollectiveMachine(r, size, window, concurrent=chance.randint(1, 3)) for r in range(size)]
        submitted, done = [0] * size, [0] * size
        awaited: set[tuple[int, int, int, int]] = set()
        sent: dict[tuple[int, int, int, int], int] = {}
        next_index: dict[tuple[int, int, int], int] = {}
        events: list[tuple[int, object]] = []
        while any(d < len(plans) for d in done):
            # a rank submits one operation when it has seen the one two before end, as training would
            may = [r for r in range(size) if submitted[r] < len(plans) and submitted[r] <= done[r] + chance.randint(0, 2)]
            if may and (not events or chance.random() < 0.2):
                rank = chance.choice(may)
                event: object = Submitted(submitted[rank], plans[submitted[rank]][rank])
                submitted[rank] += 1
            else:
                ready = [name for name in sent if name in awaited]
                if not events and not ready:
                    assert any(submitted[r] < len(plans) for r in range(size)), f"stuck, trial {trial}"
                    continue
                if ready and (not events or chance.random() < 0.5):
                    name = op, a, b, index = chance.choice(ready)
                    awaited.remove(name)
                    del sent[name]
                    events += [(a, Sent(op, b, index)), (b, Received(op, a, index))]
                rank, event = events.pop(chance.randrange(len(events)))
            for action in machines[rank].on(event):  # type: ignore[arg-type]
                match action:
                    case Transmit():
                        key = (action.op, rank, action.peer)
                        assert next_index.get(key, 0) == action.index
                        next_index[key] = action.index + 1
                        mine = [n for (o, a, b, _), n in sent.items() if (a, b) == (rank, action.peer) and o <= action.op]
                        own = [name for name in sent if name[:3] == key]
                        assert not own or sum(mine) + action.region.length <= window
                        sent[(action.op, rank, action.peer, action.index)] = action.region.length
                    case Await():
                        awaited.add((action.op, action.peer, rank, action.index))
                    case Compute():
                        events.append((rank, Computed(action.op, action.node)))
                    case Done():
                        done[rank] += 1
        assert all(machine.idle for machine in machines) and not sent and not awaited
