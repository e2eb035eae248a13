"""Every policy's schedules: valid at any size, as long and as large as their papers say."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixrt.errors import ConfigError
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.generators.adaptra import slack as schedule_slack
from helixrt.schedule.generators.adaptra import tolerates
from helixrt.schedule.generators.classic import build as build_by_sizes
from helixrt.schedule.generators.classic import gpipe, interleaved, one_f_one_b
from helixrt.schedule.generators.policies import POLICIES, build, costs_for
from helixrt.schedule.generators.zero_bubble import handcrafted
from helixrt.schedule.ir import Op, Operation, linear
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.simulate import simulate

PUBLISHED = [name for name in POLICIES if name != "helix"]
ONE_CHUNK = [name for name in PUBLISHED if POLICIES[name].placement(2) == linear(2)]


@pytest.mark.parametrize("name", POLICIES)
def test_schedules_of_any_size_are_valid(name: str) -> None:
    for stages in (1, 2, 3, 4, 7):
        for microbatches in (1, 2, stages, stages + 1, 2 * stages - 1, 12):
            schedule = build_by_sizes(name, stages, microbatches)
            check(schedule)
            assert (schedule.name, schedule.stages, schedule.microbatches) == (name, stages, microbatches)
            assert schedule.placement == POLICIES[name].placement(stages)


@st.composite
def linear_costs(draw: st.DrawFn) -> Costs:
    stages = draw(st.integers(1, 6))
    times = st.tuples(*[st.floats(0.5, 4) for _ in range(stages)])
    ways = [(a, b) for a in range(stages) for b in (a - 1, a + 1) if 0 <= b < stages]
    slow = draw(st.lists(st.sampled_from(ways), unique=True)) if ways else []
    return Costs(
        placement=linear(stages),
        forward=draw(times),
        backward=draw(times),
        weight=draw(times),
        links={way: Link(draw(st.floats(0, 8)), draw(st.floats(0, 1))) for way in slow},
        memory=tuple(draw(st.sampled_from([1, 2, 3.5, stages, math.inf])) for _ in range(stages)),
        activation=draw(st.tuples(*[st.floats(0.2, 1) for _ in range(stages)])),
    )


@settings(max_examples=60, deadline=None)
@given(linear_costs(), st.integers(1, 14))
def test_schedules_of_any_costs_are_valid_and_adaptra_keeps_to_the_cap(costs: Costs, microbatches: int) -> None:
    for name in PUBLISHED:
        schedule = build(name, costs, microbatches)
        check(schedule)
        timeline = simulate(schedule, costs_for(name, costs))
        if name in ONE_CHUNK:  # Lemma 1
            assert all(above >= below for above, below in pairwise(schedule.warmup()))
        if name == "adaptra":
            assert all(held <= cap * (1 + 1e-9) for held, cap in zip(timeline.peak_memory, costs.memory, strict=True))


def test_backwards_are_whole_except_where_w_is_moved() -> None:
    for name in PUBLISHED:
        ops = {o.op for s in range(4) for o in build_by_sizes(name, 4, 12).operations(s)}
        whole = {"gpipe", "1f1b", "interleaved", "w"}
        assert ops == ({Op.F, Op.BW} if name in whole else set(Op) if name == "dualpipev" else {Op.F, Op.B, Op.W})


@pytest.mark.parametrize("stages,microbatches", [(1, 4), (2, 8), (4, 12), (8, 5)])
def test_activations_in_flight(stages: int, microbatches: int) -> None:
    costs = uniform(stages)
    assert peak_memory(gpipe(stages, microbatches), costs) == (microbatches,) * stages
    assert peak_memory(one_f_one_b(stages, microbatches), costs) == tuple(min(stages - s, microbatches) for s in range(stages))
    for name, most in (("zb-h1", stages), ("zb-h2", 2 * stages - 1)):
        assert peak_memory(build(name, costs, microbatches), costs) == (min(most, microbatches),) * stages


@pytest.mark.parametrize(
    "name,expected",
    [("1f1b", [450, 550, 650]), ("zb", [390, 400, 440]), ("zb-h1", [390, 460, 560]), ("zb-h2", [390, 400, 420])],
)
def test_figures_4_and_5_of_adaptra(name: str, expected: list[float]) -> None:
    """4 stages, 12 micro-batches of 10 ms operations: undisturbed, then 10 and 20 ms on link 0, both ways."""
    costs = uniform(4, 10, 10, 10)
    schedule = build(name, costs, 12)
    delayed = [with_delays(costs, {(0, 1): delay, (1, 0): delay}) for delay in (0, 10, 20)]
    assert [simulate(schedule, c).makespan_ms for c in delayed] == expected


@pytest.mark.parametrize("delay,expected", [(0, 117), (1, 147), (2, 177), (4, 237)])
def test_one_f_one_b_under_a_slow_link(delay: float, expected: float) -> None:
    costs = with_delays(uniform(8), {(3, 4): delay, (4, 3): delay})
    assert simulate(one_f_one_b(8, 32), costs).makespan_ms == expected


@pytest.mark.grid
@pytest.mark.parametrize("stages,microbatches", [(2, 30), (4, 30), (4, 60), (8, 60)])
@pytest.mark.parametrize("slack", [1, 2, 3, 4])
def test_theorem_1(stages: int, microbatches: int, slack: int) -> None:
    """Up to c = (slack - 1) t a link's delay adds 2 c in all, beyond it again 2 c for each group of slack + 1 micro-batches.

    On the last link that holds to the millisecond; further up, stages that idle in their cool-down take in a little,
    and only groups in the steady phase of the stage before the link count.
    """
    t = 10.0
    # warm-up of F, steady phase of B and F in turn, cool-down of W, with the same slack on every link: W fill no bubbles,
    # which would hide a part of the delay
    schedule = handcrafted("", stages, microbatches, lambda i: slack * (stages - 1 - i) + 1, lambda i: microbatches)
    costs = uniform(stages, t, t, t)
    knee = (slack - 1) * t
    groups = microbatches / (slack + 1)

    def added_ms(link: int, delay: float) -> float:
        slow = with_delays(costs, {(link, link + 1): delay, (link + 1, link): delay})
        assert tolerates(slow, [slack] * (stages - 1))[link] == (delay <= knee)
        return simulate(schedule, slow).makespan_ms - simulate(schedule, costs).makespan_ms

    assert schedule_slack(schedule) == (slack,) * (stages - 1)
    for link in range(stages - 1):
        steady = (microbatches - schedule.warmup()[link]) // (slack + 1)
        for delay in (0.0, knee / 2, knee):
            assert added_ms(link, delay) == 2 * delay
        for beyond in (1.0, t, 3 * t):
            added = added_ms(link, knee + beyond)
            assert added <= 2 * knee + 2 * beyond * math.ceil(groups)
            assert added >= 2 * knee + 2 * beyond * (math.floor(groups) if link == stages - 2 else 1)
        assert added_ms(link, knee + 4 * t) - added_ms(link, knee + 3 * t) >= 2 * t * max(steady, 1)


def test_interleaved_takes_turns_of_as_many_microbatches_as_stages() -> None:
    schedule = interleaved(2, 4)
    assert [schedule.label(e) for e in schedule.entries[1]] == (
        "F0 F1 F0.1 BW0.1 F1.1 BW1.1 F2 BW0 F3 BW1 F2.1 BW2.1 F3.1 BW3.1 BW2 BW3".split()
    )
    assert [o.chunk for o in interleaved(2, 2, rounds=3).operations(0) if o.op is Op.F] == [0, 0, 2, 2, 4, 4]
    odd = interleaved(2, 3)
    assert list(odd.entries[0]) == [e for e in interleaved(2, 4).entries[0] if isinstance(e, Operation) and e.microbatch < 3]


def test_names_and_numbers_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"^policy=zigzag: must be one of gpipe, 1f1b, .*helix$"):
        build("zigzag", uniform(2), 2)
    with pytest.raises(ConfigError, match=r"^schedule.name=zigzag: must be one of gpipe"):
        build_by_sizes("zigzag", 2, 2)
    with pytest.raises(ConfigError, match="^mesh.pp=0: must be at least 1$"):
        build_by_sizes("gpipe", 0, 2)
    with pytest.raises(ConfigError, match="^schedule.microbatches=0: must be at least 1$"):
        build_by_sizes("zb", 2, 0)
    for name in PUBLISHED:
        with pytest.raises(ConfigError, match="^microbatches=0: must be at least 1$"):
            build(name, uniform(2), 0)
    with pytest.raises(ConfigError, match="^costs.placement="):
        build("zb", costs_for("zbv", uniform(3)), 4)
    folded = costs_for("zbv", uniform(3))
    assert costs_for("w", folded) == folded == costs_for("helix", folded)
    assert build("helix", folded, 4).placement == folded.placement
