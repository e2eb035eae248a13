"""Where the time of a step went: of exact simulations nothing is late, and what was put in is found where it was put in."""

from __future__ import annotations

import pytest

from helixrt.bench._lateness import Lateness, lateness
from helixrt.observe.estimator import place_of
from helixrt.record import Event, Kind
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Op
from helixrt.schedule.simulate import makespan_ms
from tests.observe.measured_world import World

OPERATION_MS = 10.0
DELAYS = {(1, 2): 60.0, (2, 1): 60.0}
TRUE = with_delays(uniform(4, OPERATION_MS, OPERATION_MS, OPERATION_MS), DELAYS)
QUIET = {"one_host": True, "noise": 0.0, "outliers": 0.0, "jitter_ms": 1e-6}


def found(events: list[Event]) -> Lateness:
    takes = lambda op: OPERATION_MS * (2 if op is Op.BW else 1)  # noqa: E731
    late = lateness(events, lambda rank: place_of(rank)[1], takes, DELAYS)
    assert late is not None
    return late


def world(name: str) -> World:
    return World(build(name, 4, 8), lambda step: TRUE, **QUIET)  # type: ignore[arg-type]


def parts(late: Lateness) -> dict[str, float]:
    names = ("before_ms", "overlong_ms", "between_ms", "queueing_ms", "transport_ms", "starting_ms", "waking_ms", "behind_ms")
    return {name: getattr(late, name) for name in names}


@pytest.mark.parametrize("name", ["zb", "1f1b", "gpipe", "adaptra"])
def test_nothing_is_late_in_an_exact_simulation(name: str) -> None:
    late = found([event for stage in world(name).step(1) for event in stage])
    assert late.work_ms == pytest.approx(late.nominal_ms, abs=0.1)
    assert late.nominal_ms == pytest.approx(makespan_ms(build(name, 4, 8), TRUE), abs=0.1)
    assert all(abs(part) < 0.1 for part in parts(late).values()), late


@pytest.mark.parametrize("name", ["zb", "1f1b"])
def test_the_parts_add_up_to_the_work(name: str) -> None:
    noisy = World(build(name, 4, 8), lambda step: TRUE, one_host=True, noise=0.1, jitter_ms=3.0)
    for step in range(1, 6):
        late = found([event for stage in noisy.step(step) for event in stage])
        assert late.nominal_ms + sum(parts(late).values()) == pytest.approx(late.work_ms, abs=1e-3)


def test_what_stages_wait_for_behind_the_last_operation_and_before_the_first_one_is_told_apart() -> None:
    events = [event for stage in world("zb").step(1) for event in stage]
    begin_s = min(event.begin_s for event in events if event.kind is Kind.WORK_BEGIN)
    end_s = max(event.end_s for event in events if event.kind is Kind.WORK_END)
    begun = Event(Kind.WORK_BEGIN, "r0.pp0", 1, begin_s - 0.005, begin_s - 0.005, {})
    ended = Event(Kind.WORK_END, "r0.pp3", 1, begin_s, end_s + 0.007, {})
    late = found([*events, begun, ended])
    assert (late.before_ms, late.behind_ms) == (pytest.approx(5.0, abs=0.1), pytest.approx(7.0, abs=0.1))


def test_a_stage_that_begins_its_step_late_is_told_from_one_that_wakes_up_late() -> None:
    stages = world("zb").step(1)
    begin_s = stages[0][0].begin_s
    late_s = begin_s + 0.025  # F of micro-batch 0 came 15 ms before
    moved = [Event(e.kind, e.rank, e.step, e.begin_s, e.end_s, e.detail) for stage in (0, 2, 3) for e in stages[stage]]
    for event in stages[1]:
        at_s = late_s if event.kind is Kind.WORK_BEGIN else event.begin_s
        if event.kind is Kind.OPERATION and event.detail["op"] == "F" and event.detail["microbatch"] == 0:
            at_s = late_s + 0.001
            event = Event(event.kind, event.rank, 1, at_s, event.end_s + at_s - event.begin_s, event.detail)
        moved.append(Event(event.kind, event.rank, 1, at_s, event.end_s, event.detail))
    only = [e for e in moved if e.kind is not Kind.OPERATION or e.detail["microbatch"] == 0 and e.rank in ("r0.pp0", "r0.pp1")]
    found_ = found([e for e in only if e.kind is not Kind.OPERATION or e.detail["op"] == "F"])
    assert (found_.starting_ms, found_.waking_ms) == (pytest.approx(15.0, abs=0.1), pytest.approx(1.0, abs=0.1))


def test_a_record_that_lacks_a_part_says_nothing() -> None:
    events = [event for stage in world("zb").step(1) for event in stage]
    ends = [event for event in events if event.kind is not Kind.WORK_BEGIN]
    assert lateness(ends, lambda rank: place_of(rank)[1], lambda op: OPERATION_MS, DELAYS) is None
    assert Lateness.medians([]) == {}
