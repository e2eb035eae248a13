"""What replicas report of a step becomes one line."""

from hypothesis import given
from hypothesis import strategies as st

from helixrt.job.means import LATE_S, StepMeans, mean_of
from helixrt.job.metrics import Logged, StepMetrics


def text(replica: int, step: int = 1, *, loss: float | None = 1.0, tokens: int = 100, participants: int = 2) -> StepMetrics:
    return StepMetrics(replica, f"r{replica}.pp0", step, loss, tokens, 0.5 + replica, participants, 0.1 * replica, 2.0, 1e-3, 7)


def logged(replica: int, step: int = 1, participants: int = 2, **values: float) -> Logged:
    return Logged(Logged.STEP, replica, f"r{replica}", step, values, 0.5, participants, 0.0)


def test_a_step_is_told_when_all_that_contributed_have_reported_it() -> None:
    means = StepMeans()
    assert not list(means.add(text(1, loss=3.0, tokens=300), 0.0))
    (joined,) = means.add(text(0, loss=1.0, tokens=100), 0.1)
    line = joined.mean
    assert isinstance(line, StepMetrics)
    assert (line.rank, line.tokens, line.loss_nats) == ("r0-r1", 400, 2.5), "weighted by tokens"
    assert (line.seconds, line.stall_s) == (1.5, 0.1), "of the slowest"
    assert line.tokens_per_s == 400 / 1.5, "of all"


def test_a_replica_that_catches_up_does_not_count_in_the_mean() -> None:
    line = mean_of([text(0, loss=1.0), text(2, loss=None)])
    assert isinstance(line, StepMetrics) and (line.loss_nats, line.tokens, line.rank) == (1.0, 100, "r0,r2")
    assert mean_of([text(1)]) == text(1), "one replica's line stays as it is"


def test_a_step_that_a_lost_replica_never_reports_is_told_late_and_in_order() -> None:
    means = StepMeans()
    assert not list(means.add(text(0, 1), 0.0))
    assert not list(means.add(text(0, 2), 0.5)), "step 1 comes first"
    assert not list(means.add(text(1, 2), 0.6))
    assert not list(means.due(LATE_S - 0.1))
    assert [joined.step for joined in means.due(LATE_S)] == [1, 2]
    assert not list(means.add(text(1, 1), 3.0)), "too late"
    assert not list(means.add(text(0, 3), 4.0))
    assert [joined.step for joined in means.rest()] == [3]


def test_a_program_that_logs_on_one_replica_is_waited_for_in_its_first_steps_alone() -> None:
    means = StepMeans()
    for step in (1, 2, 3):
        assert not list(means.add(logged(0, step), 10.0 * step))
        assert [joined.step for joined in means.due(10.0 * step + LATE_S)] == [step]
    assert [joined.step for joined in means.add(logged(0, 4), 40.0)] == [4], "at once"
    assert not list(means.add(logged(1, 4), 40.1)), "too late for that step, but it does report"
    assert not list(means.add(logged(0, 5), 50.0))
    (joined,) = means.add(logged(1, 5), 50.1)
    assert joined.mean.rank == "r0-r1"
    assert not list(means.add(logged(0, 6), 60.0)), "both are waited for again"


def test_a_replica_that_comes_back_is_waited_for() -> None:
    means = StepMeans()
    for step in range(1, 7):
        assert len(list(means.add(logged(0, step, participants=1), 1.0 * step))) == 1
    assert not list(means.add(logged(0, 7), 7.0)), "both contribute"
    (joined,) = means.add(logged(1, 7), 7.1)
    assert joined.mean.rank == "r0-r1"


def test_logged_values_are_means_of_those_that_logged_the_name() -> None:
    line = mean_of([logged(0, loss=1.0, extra=5.0), logged(1, loss=2.0)])
    assert isinstance(line, Logged) and line.values == {"loss": 1.5, "extra": 5.0}


@given(st.permutations([replica for replica in range(3) for _ in range(4)]), st.floats(0, 1))
def test_each_step_is_told_once_however_replicas_take_turns(order: list[int], pause_s: float) -> None:
    means, told, newest = StepMeans(), [], [0, 0, 0]
    for number, replica in enumerate(order):
        newest[replica] += 1  # a replica reports its steps in order
        told += [joined.step for joined in means.add(text(replica, newest[replica], participants=3), number * pause_s)]
    told += [joined.step for joined in means.rest()]
    assert told == [1, 2, 3, 4]
