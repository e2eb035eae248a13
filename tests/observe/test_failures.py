"""What a loss cost is figured from the flight records of those who saw it."""

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from helixrt.observe.failures import Failure, Loss, births, failures, replica_of
from helixrt.observe.timeline import timeline, typical_step
from helixrt.record import BoundedSink, Event, Kind, read_events, shrink_life


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


@dataclass
class Drawn:
    """What a generator of a run knows of a loss: none of it is read from events."""

    loss: Loss
    lost_s: float
    detected_s: float
    stalled_s: float
    rejoined_s: float | None = None


def drawn_run(chance: random.Random) -> tuple[list[Event], list[Drawn]]:
    """Steps of equal length; in some, one or two replicas are lost, and the survivors need longer. A lost one starts again,
    fetches for a while, and may be lost again meanwhile."""
    replicas, ranks, usual_s = chance.choice((2, 3, 4)), chance.choice((1, 2)), chance.uniform(0.05, 1.0)
    lives, truth, events = [0] * replicas, [], []
    back_s = [0.0] * replicas  # when it is ready to contribute
    born_s: list[float] = [0.0] * replicas  # of the present life, perhaps later than now

    def tell(kind: Kind, replica: int, step: int, at_s: float, **detail: object) -> None:
        events.extend(event(kind, f"r{replica}.pp{rank}", step, at_s, **detail) for rank in range(ranks))

    def lose(replica: int, at_s: float, detected_s: float, stalled_s: float) -> None:
        truth.append(Drawn(Loss(replica, lives[replica], at_s + 0.001, "signal 9"), at_s, detected_s, stalled_s))
        lives[replica] += 1
        born_s[replica] = at_s + chance.uniform(0.1, 4.0)
        back_s[replica] = born_s[replica] + chance.uniform(0.01, 3.0)
        tell(Kind.RANK_START, replica, 0, born_s[replica], incarnation=lives[replica])

    for replica in range(replicas):
        tell(Kind.RANK_START, replica, 0, -1.0, incarnation=0)
    now_s = 0.0
    for step in range(1, 200):
        ready = [replica for replica in range(replicas) if back_s[replica] <= now_s]
        there = [replica for replica in range(replicas) if born_s[replica] <= now_s]
        for drawn in truth:
            if drawn.rejoined_s is None and drawn.loss.replica in ready and drawn.loss.incarnation < lives[drawn.loss.replica]:
                drawn.rejoined_s = now_s
        for replica in ready:
            tell(Kind.QUORUM, replica, step, now_s, members=there, contributors=ready)
            tell(Kind.WORK_BEGIN, replica, step, now_s + usual_s / 100)
        lost = chance.sample(ready, min(len(ready) - 1, chance.choice((1, 1, 2)))) if chance.random() < 0.05 else []
        stalled_s = chance.uniform(0.0, 5.0) if lost else 0.0
        end_s = now_s + usual_s + stalled_s
        begun = [now_s + chance.uniform(0.02, 0.5) * usual_s for _ in lost]
        detected_s = chance.uniform(max(begun, default=now_s), end_s)
        for replica in ready:
            if replica not in lost:
                if lost:
                    tell(Kind.EXCHANGE_FAILED, replica, step, detected_s, reason="peer gone")
                tell(Kind.COMMIT, replica, step, end_s)
        for replica, at_s in zip(lost, begun, strict=True):
            tell(Kind.OPERATION, replica, step, at_s, op="F", chunk=0, microbatch=0)
            lose(replica, at_s, detected_s, stalled_s)
        now_s = end_s
    return events, truth


@pytest.mark.parametrize("draw", range(40))
def test_figures_are_those_that_the_generator_of_a_run_knows(draw: int) -> None:
    events, truth = drawn_run(random.Random(draw))
    found = failures(events, [drawn.loss for drawn in truth])
    assert len(found) == len(truth)
    for failure, drawn in zip(found, sorted(truth, key=lambda drawn: drawn.lost_s), strict=True):
        assert (failure.replica, failure.lost_s) == (drawn.loss.replica, drawn.lost_s)
        assert failure.detected_after_s == pytest.approx(drawn.detected_s - drawn.lost_s)
        assert failure.survivors_stalled_s == pytest.approx(drawn.stalled_s, abs=0.011)
        back_s = None if drawn.rejoined_s is None else drawn.rejoined_s - drawn.lost_s
        assert failure.rejoined_after_s == (None if back_s is None else pytest.approx(back_s))


@pytest.mark.parametrize("draw", range(10))
def test_where_records_were_shrunk_a_stall_is_true_or_not_told_and_a_return_is_true(tmp_path: Path, draw: int) -> None:
    events, truth = drawn_run(random.Random(draw))
    lives: dict[str, list[list[Event]]] = defaultdict(list)
    for told in sorted(events, key=lambda told: told.end_s):
        if told.kind is Kind.RANK_START:
            lives[told.rank].append([])
        lives[told.rank][-1].append(told)
    for path, own in ((tmp_path / f"{rank}.inc{n}.jsonl", own) for rank in lives for n, own in enumerate(lives[rank])):
        sink = BoundedSink(path, 1 << 20)
        for told in own:
            sink(told)
        sink.close()
        shrink_life(path, 1_000)
    left = [told for path in tmp_path.iterdir() for told in read_events(path)]
    assert len(left) < 0.8 * len(events)
    found = failures(left, [drawn.loss for drawn in truth])
    of = {replica: [failure for failure in found if failure.replica == replica] for replica in range(4)}
    pairs = [(of[drawn.loss.replica].pop(0), drawn) for drawn in sorted(truth, key=lambda drawn: drawn.lost_s)]
    stalls = [(failure.survivors_stalled_s, drawn.stalled_s) for failure, drawn in pairs]
    assert all(told is None or told == pytest.approx(true, abs=0.011) for told, true in stalls), stalls
    assert not pairs or any(told is not None for told, _ in stalls)
    for failure, drawn in pairs:
        back_s = None if failure.rejoined_after_s is None else failure.lost_s + failure.rejoined_after_s
        assert back_s == (None if drawn.rejoined_s is None else pytest.approx(drawn.rejoined_s))
