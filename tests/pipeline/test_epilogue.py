"""What stages tell each other once a pass: the same values on all of them, by the quickest way there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from helixrt.errors import Retryable
from helixrt.pipeline.channels import Channel, Lane
from helixrt.pipeline.epilogue import gather, relays_of, share_loss
from helixrt.record import FlightRecord
from helixrt.schedule.simulate import DELEGATED, Direct

NEVER_S = 1e6  # the tests would fail long before

ChannelsOf = Callable[[FlightRecord], Mapping[int, Channel]]


def told(stages: int, passes: int) -> Callable[[int, ChannelsOf], list[list[float]]]:
    def body(stage: int, channels_of: ChannelsOf) -> list[list[float]]:
        channels, found = channels_of(FlightRecord(f"pp{stage}")), []
        for number in range(passes):
            for lane in (Lane.BATCH, Lane.NORM):
                found.append(gather(channels, stage, stages, 0, number, 0.1 + stage + 10 * number, lane))
        return found

    return body


def expected(stages: int, passes: int) -> list[list[float]]:
    return [[0.1 + stage + 10 * number for stage in range(stages)] for number in range(passes) for _ in range(2)]


@pytest.mark.grid
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_stage_is_told_the_value_of_every_one(any_stages: Any, stages: int) -> None:
    assert any_stages.run(stages, told(stages, 3)) == [expected(stages, 3)] * stages


@pytest.mark.parametrize("comm", [DELEGATED, Direct(2)], ids=["delegated", "direct"])
def test_a_slow_link_holds_up_no_stage_where_another_one_can_tell(endpoint_stages: Any, comm: Any) -> None:
    def slow(stage: int) -> Callable[[int, int], float]:
        return lambda source, step: NEVER_S if {source, stage} == {1, 2} else 0.0

    assert endpoint_stages.run(4, told(4, 3), delay_of=slow, comm=comm) == [expected(4, 3)] * 4


def losses(stages: int, passes: int) -> Callable[[int, ChannelsOf], list[float]]:
    def body(stage: int, channels_of: ChannelsOf) -> list[float]:
        channels, home = channels_of(FlightRecord(f"pp{stage}")), stages - 1
        shared = [share_loss(channels, stage, home, 0, number) for number in range(passes)]
        found = [told(number + 0.1 if stage == home else None) for number, told in enumerate(shared)]
        gather(channels, stage, stages, 0, passes, 0.0)  # nobody leaves before all have come
        return found

    return body


@pytest.mark.grid
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_stage_gets_the_loss_of_the_last_one(any_stages: Any, stages: int) -> None:
    assert any_stages.run(stages, losses(stages, 3)) == [[0.1, 1.1, 2.1]] * stages


@pytest.mark.parametrize("comm", [DELEGATED, Direct(2)], ids=["delegated", "direct"])
def test_the_loss_takes_the_way_around_a_slow_last_link(endpoint_stages: Any, comm: Any) -> None:
    def slow(stage: int) -> Callable[[int, int], float]:
        return lambda source, step: NEVER_S if {source, stage} == {2, 3} else 0.0

    assert endpoint_stages.run(4, losses(4, 3), delay_of=slow, comm=comm) == [[0.1, 1.1, 2.1]] * 4


def test_a_lost_stage_is_told_and_one_that_has_told_its_value_before_is_not_missed(endpoint_stages: Any) -> None:
    """Stage 3 ends behind its first value: the first is known to all, the second to nobody."""

    def body(stage: int, channels_of: ChannelsOf) -> list[float]:
        channels = channels_of(FlightRecord(f"pp{stage}"))
        found = gather(channels, stage, 4, 0, 0, 0.5 + stage)
        if stage < 3:
            with pytest.raises(Retryable, match="of this replica cannot be reached"):
                gather(channels, stage, 4, 0, 1, 0.5 + stage)
        return found

    assert endpoint_stages.run(4, body) == [[0.5, 1.5, 2.5, 3.5]] * 4


@pytest.mark.parametrize("stages", range(2, 20))
def test_of_the_stages_that_tell_what_they_know_one_is_at_no_end_of_a_link(stages: int) -> None:
    relays = relays_of(stages)
    assert list(relays) == sorted(set(relays)) and len(relays) <= 4 and all(0 <= relay < stages for relay in relays)
    assert len(relays) >= 3 or stages == 2
