"""What a loss cost is figured from the flight records of those who saw it."""

import pytest

from helixrt.observe.failures import Failure, Loss, births, failures, replica_of
from helixrt.observe.timeline import timeline, typical_step
from helixrt.record import Event, Kind


def event(kind: Kind, rank: str, step: int, at_s: float, begin_s: float | None = None, **detail: object) -> Event:
    return Event(kind, rank, step, at_s if begin_s is None else begin_s, at_s, dict(detail))


def run(noted: bool = True) -> list[Event]:
    """Steps of 1 s; replica 1 dies at 3.4 in step 4, is noticed at 5.0, restarts at 6.0, contributes from 8.5."""
    events = [event(Kind.RANK_START, f"r{r}.pp{s}", 0, 0.0, incarnation=0) for r in (0, 1) for s in (0, 1)]
    for step in (1, 2, 3):
        for r in (0, 1):
            events.append(event(Kind.QUORUM, f"r{r}.pp0", step, step - 0.9, members=[0, 1], contributors=[0, 1]))
            events.append(event(Kind.COMMIT, f"r{r}.pp0", step, float(step)))
    events.append(event(Kind.QUORUM, "r0.pp0", 4, 3.1, members=[0, 1], contributors=[0, 1]))
    events.append(event(Kind.OPERATION, "r1.pp0", 4, 3.4, 3.3, op="F", chunk=0, microbatch=0))
    events.append(event(Kind.OPERATION, "r1.pp1", 4, 3.41, 3.3, op="F", chunk=0, microbatch=0))
    if noted:
        events.append(event(Kind.FAILURE, "r1.pp0", 4, 3.4, replica=1, reason="chaos: killed at forward"))
    events.append(event(Kind.EXCHANGE_FAILED, "r0.pp1", 4, 5.0, reason="peer gone"))
    events.append(event(Kind.QUORUM, "r0.pp0", 4, 5.2, members=[0], contributors=[0]))
    events.append(event(Kind.COMMIT, "r0.pp0", 4, 5.5))
    events.append(event(Kind.RANK_START, "r1.pp0", 0, 6.0, incarnation=1))
    for step, end in ((5, 6.5), (6, 7.5), (7, 8.5), (8, 9.5)):
        both = [0, 1] if step >= 8 else [0]
        events.append(event(Kind.QUORUM, "r0.pp0", step, end - 0.9, members=[0, 1], contributors=both))
        events.append(event(Kind.COMMIT, "r0.pp0", step, end))
    events.append(event(Kind.FAILURE, "r0.pp0", 8, 9.6, replica=-1, reason="checkpoint of step 8 given up"))
    return events


@pytest.mark.parametrize("noted", [True, False])
def test_figures_of_one_loss(noted: bool) -> None:
    (failure,) = failures(reversed(run(noted)), [Loss(1, 0, 4.9, "signal 9")])
    assert (failure.replica, failure.step) == (1, 4)
    assert failure.reason == ("chaos: killed at forward" if noted else "signal 9")
    assert failure.lost_s == 3.4
    assert failure.detected_after_s == pytest.approx(1.6)
    assert failure.survivors_stalled_s == pytest.approx(1.5), "step 4 took 2.5 s, the others 1 s"
    assert failure.rejoined_after_s == pytest.approx(8.6 - 3.4)


def test_work_that_survivors_began_again_is_counted() -> None:
    """Of the step of the loss, by ranks that had begun it before: not that of other steps, nor a first beginning."""
    assert failures(run(), [Loss(1, 0, 4.9, "signal 9")])[0].survivors_recomputed == 0
    before = event(Kind.WORK_BEGIN, "r0.pp0", 4, 3.1, position=3)
    again = [event(Kind.WORK_BEGIN, "r0.pp0", step, 4.5, position=3) for step in (4, 5)]
    late = event(Kind.WORK_BEGIN, "r0.pp1", 4, 4.5, position=3)
    (failure,) = failures([*run(), before, *again, late], [Loss(1, 0, 4.9, "signal 9")])
    assert failure.survivors_recomputed == 1


def test_successor_that_starts_at_once_does_not_hide_when_the_loss_was_noticed() -> None:
    """Its process is there before the heartbeat of its predecessor is too old; the first quorum has it, behind."""
    events = [e for e in run() if e.kind is not Kind.EXCHANGE_FAILED and (e.rank, e.step) != ("r0.pp0", 4)]
    events = [e for e in events if not (e.kind is Kind.RANK_START and e.end_s > 0)]
    events.append(event(Kind.RANK_START, "r1.pp0", 0, 4.0, incarnation=1))
    events.append(event(Kind.WORK_BEGIN, "r1.pp0", 1, 0.1, position=0))
    (failure,) = failures(events, [Loss(1, 0, 3.5, "signal 9")])
    assert failure.detected_after_s == pytest.approx(5.6 - 3.4), "the quorum of step 5: a member, not a contributor"
    assert failure.rejoined_after_s == pytest.approx(8.6 - 3.4)


def test_no_survivor_and_no_return_have_no_figures() -> None:
    events = [e for e in run() if e.end_s < 4]
    found = failures(events, [Loss(0, 0, 4.0, "signal 9"), Loss(1, 0, 4.0, "signal 9")])
    assert [(f.replica, f.detected_after_s, f.survivors_stalled_s, f.rejoined_after_s) for f in found] == [
        (0, None, None, None),
        (1, None, None, None),
    ]
    assert failures(run(), []) == []


def test_second_life_that_is_lost_again_has_its_own_figures() -> None:
    events = run()
    events += [
        event(Kind.FAILURE, "r1.pp0", 9, 9.8, replica=1, reason="chaos: killed at forward"),
        event(Kind.QUORUM, "r0.pp0", 9, 10.0, members=[0], contributors=[0]),
        event(Kind.COMMIT, "r0.pp0", 9, 10.7),
    ]
    first, second = failures(events, [Loss(1, 1, 9.9, "signal 9"), Loss(1, 0, 4.9, "signal 9")])
    assert (first.lost_s, second.lost_s) == (3.4, 9.8)
    assert second == Failure(1, 9, 9.8, "chaos: killed at forward", pytest.approx(0.2), pytest.approx(0.2), None, 0, "signal 9")


def test_names() -> None:
    assert [replica_of(n) for n in ("r0.pp1", "r12.pp0.dp0.cp0.tp0", "driver", "")] == [0, 12, -1, -1]


def test_timeline_of_a_step_has_a_lane_per_rank() -> None:
    events = []
    for step in (1, 2):
        for stage in (0, 1):
            rank, base = f"r0.pp{stage}", 10.0 * step
            events.append(event(Kind.OPERATION, rank, step, base + 1, base, op="F", chunk=stage, microbatch=0))
            events.append(event(Kind.OPERATION, rank, step, base + 3, base + 2, op="B", chunk=stage, microbatch=0))
            events.append(event(Kind.SEND, rank, 0, base + 1.5, base + 1, tag="x", bytes=8))
            events.append(event(Kind.APPLY, rank, step, base + 4, base + 3.5, record="h"))
            events.append(event(Kind.COMMIT, rank, step, base + 3.5))
    found = timeline(events, 2)
    assert found is not None and (found.step, found.begin_s, found.duration_s) == (2, 20.0, 4.0)
    assert [lane.rank for lane in found.lanes] == ["r0.pp0", "r0.pp1"]
    assert [(b.what, b.begin_s, b.end_s) for b in found.lanes[1].bars] == [
        ("F", 0, 1), ("B", 2, 3), ("apply", 3.5, 4)]  # fmt: skip
    assert [m.what for m in found.lanes[0].marks] == ["commit"]
    assert timeline(events, 3) is None
    assert typical_step(events, avoid=[3]) == 1
    assert typical_step([]) is None


def test_a_loss_in_a_resumed_run_has_the_figures_of_its_own_life() -> None:
    """Incarnations begin at 0 again in each life of a run, at whatever incarnation the life before has ended."""
    alone = failures(run(), [Loss(1, 0, 4.9, "signal 9")])
    later = [Event(e.kind, e.rank, e.step + 100 * (e.step > 0), e.begin_s + 1e4, e.end_s + 1e4, dict(e.detail)) for e in run()]
    (resumed,) = failures([*run(), *later], [Loss(1, 0, 1e4 + 4.9, "signal 9")])
    assert (resumed.step, resumed.reason) == (104, alone[0].reason)
    assert resumed.lost_s == pytest.approx(1e4 + alone[0].lost_s)
    for figure in ("detected_after_s", "survivors_stalled_s", "rejoined_after_s"):
        assert getattr(resumed, figure) == pytest.approx(getattr(alone[0], figure)), figure
    assert failures([*run(), *later], [Loss(1, 0, 4.9, "signal 9")]) == alone, "nor of a later life"


def test_lives_are_told_apart_by_their_ranks_starts() -> None:
    starts = [("r1.pp0", 0, 1.0), ("r1.pp1", 0, 2.0), ("r1.pp1", 0, 50.0), ("r1.pp0", 0, 51.0), ("r1.pp0", 1, 60.0)]
    events = [event(Kind.RANK_START, rank, 0, at_s, incarnation=incarnation) for rank, incarnation, at_s in starts]
    assert births(events) == [(0, 1.0), (0, 50.0), (1, 60.0)]
