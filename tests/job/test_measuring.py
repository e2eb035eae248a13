"""What ranks measure reaches the leader: reduced in a thread, across the run's store, several short steps at once."""

from __future__ import annotations

import threading

import pytest

from helixrt.errors import Retryable
from helixrt.job.measuring import Measuring, ReplicaCosts
from helixrt.observe.stamps import RankTimes
from helixrt.observe.windows import Change
from helixrt.record import Event
from helixrt.replica.commands import Channel, Measured, decode, encode
from helixrt.replica.store import MemoryRunStore
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Op
from tests.observe.measured_world import World

TRUE = with_delays(uniform(3, 10.0, 12.0, 8.0), {(0, 1): 1.0, (1, 0): 1.0, (1, 2): 1.0, (2, 1): 1.0})
DEADLINE_S = 60.0


def steps_of(rank: str, steps: int) -> list[list[Event]]:
    """What a rank writes in each step."""
    events = [e for e in World(policies.build("zb", TRUE, 8), lambda step: TRUE, one_host=True).events(steps) if e.rank == rank]
    return [[e for e in events if e.step == step] for step in range(1, steps + 1)]


class Sent:
    """Takes summaries, and can be waited for."""

    def __init__(self) -> None:
        self.times: list[RankTimes] = []
        self.refuse = 0
        self._changed = threading.Condition()

    def __call__(self, times: RankTimes) -> None:
        with self._changed:
            if self.refuse:
                self.refuse -= 1
                raise Retryable("away")
            self.times.append(times)
            self._changed.notify_all()

    def wait(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.times) and self.times[-1].step >= step, DEADLINE_S)


def test_each_step_is_in_one_summary_and_short_steps_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measuring, "CLOSE_S", DEADLINE_S)  # its thread may have to wait for a busy machine
    sent = Sent()
    measuring = Measuring("r0.pp1", "host", sent)
    for step, events in enumerate(steps_of("r0.pp1", 12), start=1):
        for event in events:
            measuring.collector(event)
        measuring.step_done(step)
    sent.wait(12)
    measuring.close()
    measuring.close()
    assert sum(times.operations["F1"].size for times in sent.times) == 12 * 8
    assert [times.step for times in sent.times] == sorted({times.step for times in sent.times})
    assert all(times.clock == "host" and times.microbatches == 8 for times in sent.times)
    assert measuring.spent_s > 0


def test_what_could_not_be_sent_is_dropped_and_the_next_one_comes() -> None:
    sent = Sent()
    sent.refuse = 1
    measuring = Measuring("r0.pp0", "", sent)
    first, second = steps_of("r0.pp0", 2)
    for step, events in ((1, first), (2, second)):
        for event in events:
            measuring.collector(event)
        measuring.step_done(step)
        if step == 1:
            while sent.refuse:
                threading.Event().wait(0.01)
    sent.wait(2)
    measuring.close()
    assert [times.step for times in sent.times] == [2] and sent.times[0].operations["F0"].size == 8


def test_a_followers_summary_reaches_the_costs_of_the_leader_through_the_store() -> None:
    store, costs, done = MemoryRunStore(), ReplicaCosts(stages=3), threading.Event()
    reports, read = Channel(store, "reports/0/0/1", DEADLINE_S), Channel(store, "reports/0/0/1", DEADLINE_S)
    summaries = list(World(policies.build("zb", TRUE, 8), lambda step: TRUE, one_host=True).times(4))

    def take(report: Measured) -> None:
        costs.add(RankTimes.from_json(report.times))
        if RankTimes.from_json(report.times) == summaries[-1]:
            done.set()

    read.follow(take, lambda why: None)
    for times in summaries:
        report = Measured(times.to_json())
        assert decode(encode(report)) == report
        reports.put(report)
    assert done.wait(DEADLINE_S)
    read.close()
    found = costs.estimates()
    assert found is not None and found.step == 4 and found.stages == 3 and len(found.links) == 4
    assert not costs.shifts()


def test_changes_of_costs_are_told_however_many_there_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the whole run are kept up to a number, the newest."""
    costs, number = ReplicaCosts(2), iter(range(10_000))

    def add(times: object) -> None:
        for _ in range(2):
            costs._estimator._shifted("op", (Op.F, 0), Change(next(number), 1.0, 2.0))

    monkeypatch.setattr(costs._estimator, "add", add)
    found = [[shift.change.step for shift in costs.add(None)] for _ in range(700)]  # type: ignore[arg-type]
    assert found == [[2 * n, 2 * n + 1] for n in range(700)]
    assert [shift.change.step for shift in costs.shifts()] == list(range(400, 1400))
