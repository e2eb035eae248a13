"""The rules of Hopper, one by one: congestion, probes, switches, the delayed switch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixrt.errors import ConfigError
from helixrt.protocol.hopping import messages as h
from helixrt.protocol.hopping.hopper import Hopper, RttAverage
from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Reason, Unloaded
from tests.protocol.path_sender import ONE_S, PATHS, Sender, options

# ---------------------------------------------------------------- options


def test_the_defaults_are_those_of_table_1_but_for_alpha() -> None:
    made = HoppingOptions(unloaded=ONE_S)
    assert (made.probe_above, made.switch_above, made.remember, made.better) == (1.5, 2.5, 4.0, 0.8)
    assert made.base_s == pytest.approx(1.048576)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 1.1}, "alpha"),
        ({"better": 0.0}, "better"),
        ({"probe_above": 0.9}, "probe_above"),
        ({"probe_above": 3.0}, "probe_above"),
        ({"remember": 0.5}, "remember"),
        ({"look_within": -1.0}, "look_within"),
        ({"choices": 0}, "choices"),
        ({"probe_bytes": 0}, "probe_bytes"),
        ({"depth_bytes": 0}, "depth_bytes"),
    ],
)
def test_options_that_cannot_work(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        options(**wrong)


def test_a_floor_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="^rate_bytes_per_s=0"):
        Unloaded(0)
    with pytest.raises(ConfigError, match="^latency_s=-1"):
        Unloaded(1, -1)


def test_a_probe_counts_for_as_many_times_the_floor_as_it_took() -> None:
    unloaded = Unloaded(1e6, 0.01)
    assert unloaded.equal_sized(10 * unloaded.of(64_000), 64_000, 1_000_000) == pytest.approx(10 * unloaded.of(1_000_000))
    assert unloaded.equal_sized(0.0, 64_000, 1_000_000) == unloaded.of(1_000_000), "nothing is faster than an idle path"


# ---------------------------------------------------------------- congestion and probes


@pytest.mark.parametrize("policy", PolicyName)
def test_a_path_without_congestion_is_kept_and_nothing_is_probed(policy: PolicyName) -> None:
    sender = Sender(policy=policy)
    for rtt_s in [0.2, 1.0, 1.5] * 50:
        assert sender.message(rtt_s) == []
    assert sender.policy.patience_s > 1.5


def test_two_other_paths_are_probed_above_the_first_threshold() -> None:
    chosen = set()
    for seed in range(60):
        sender = Sender(seed, alpha=1.0)
        assert sender.message(1.5) == []
        (probe,) = sender.message(1.51)
        assert isinstance(probe, h.Probe) and len(set(probe.paths)) == 2 and set(probe.paths) <= sender.others()
        chosen |= {(sender.policy.path, path) for path in probe.paths}
    assert len(chosen) > 0.8 * PATHS * (PATHS - 1), "by chance, all are"


def test_the_average_weighs_the_newest_by_alpha() -> None:
    sender = Sender(alpha=0.25)
    sender.message(2.0)
    assert sender.policy.average.value_s == 1.25
    assert sender.message(2.2) == [] and sender.policy.average.value_s == pytest.approx(0.25 * 2.2 + 0.75 * 1.25)
    (probe,) = sender.message(1.6)
    assert isinstance(probe, h.Probe)


def test_one_round_of_probes_in_an_epoch_which_lasts_one_rtt() -> None:
    sender = Sender(alpha=1.0, choices=1)
    sender.message(2.0)
    assert len(sender.probes) == 1
    sender.answer(2.0)
    sender.now += 0.5
    sender.tell(h.Measured(sender.policy.path, 2.0))
    sender.now += 1.4
    sender.tell(h.Measured(sender.policy.path, 2.0))
    assert len(sender.probes) == 1
    sender.now += 0.1
    sender.tell(h.Measured(sender.policy.path, 2.0))
    assert len(sender.probes) == 2


def test_what_was_probed_is_not_probed_again_within_the_time_to_live() -> None:
    sender = Sender(alpha=1.0)
    for _ in range(30):
        sender.message(1.6)
        if sender.asked:
            sender.answer(*(1.6 for _ in sender.asked))
            sender.asked = []
    last: dict[int, float] = {}
    for at_s, paths in sender.probes:
        for path in paths:
            assert at_s - last.get(path, -math.inf) >= 4.0
            last[path] = at_s
    assert len(last) == PATHS - 1 and not sender.switches


def test_messages_on_other_paths_count_for_those() -> None:
    sender = Sender(alpha=1.0)
    other = min(sender.others())
    sender.tell(h.Measured(other, 50.0))
    assert isinstance(sender.policy, Hopper) and sender.policy.known(sender.now) == {other: 50.0}
    sender.now += 1
    sender.tell(h.Pending(other, 60.0))
    assert sender.policy.known(sender.now) == {other: 60.0} and not sender.probes
    sender.now += 4.0
    assert sender.policy.known(sender.now) == {}


# ---------------------------------------------------------------- switches


def test_a_congested_path_is_left_for_the_better_probe_once_both_are_answered() -> None:
    sender = Sender(alpha=1.0)
    (probe,) = sender.message(3.0)
    assert isinstance(probe, h.Probe)
    p, q = probe.paths
    assert sender.tell(h.Answered(p, 2.0)) == []
    (switch,) = sender.tell(h.Answered(q, 1.2))
    assert switch == h.Switch(switch.old, q, sender.now, Reason.CONGESTED, 3.0, 1.2)
    assert sender.policy.switches == 1 and sender.policy.average.value_s == 1.0, "a new path begins with the base RTT"


@pytest.mark.parametrize(("rtt_s", "switches"), [(2.5, 0), (2.51, 1)])
def test_only_above_the_second_threshold(rtt_s: float, switches: int) -> None:
    sender = Sender(alpha=1.0)
    sender.message(rtt_s)
    sender.answer(1.0, 1.0)
    assert len(sender.switches) == switches


@pytest.mark.parametrize(("rtt_s", "switches"), [(2.41, 0), (2.4, 1)])
def test_only_to_a_path_that_is_a_fifth_better(rtt_s: float, switches: int) -> None:
    sender = Sender(alpha=1.0)
    sender.message(3.0)
    sender.answer(3.0, rtt_s)
    assert len(sender.switches) == switches


def test_when_neither_is_better_both_are_remembered_and_an_epoch_passes_without_probes() -> None:
    sender = Sender(alpha=1.0)
    sender.message(3.0)
    first = set(sender.asked)
    sender.answer(3.0, 2.9)
    begun = sender.now
    while sender.now < begun + 2.9:
        sender.now += 0.29
        sender.tell(h.Measured(sender.policy.path, 3.0))
        assert len(sender.probes) == 1 or sender.now >= begun + 3.0
    sender.now = begun + 3.0
    sender.tell(h.Measured(sender.policy.path, 3.0))
    assert len(sender.probes) == 2 and not first & set(sender.asked)
    assert isinstance(sender.policy, Hopper) and first <= set(sender.policy.known(sender.now))


def test_a_path_that_was_found_good_is_taken_when_the_one_in_use_gets_worse() -> None:
    sender = Sender(alpha=1.0)
    sender.message(1.6)
    good = sender.asked[0]
    sender.answer(1.0, 1.5)
    sender.now += 1.5
    (switch,) = sender.tell(h.Measured(sender.policy.path, 2.6))
    assert isinstance(switch, h.Switch) and switch.path == good and len(sender.probes) == 1


def test_equally_good_paths_are_chosen_by_chance() -> None:
    taken = []
    for seed in range(200):
        sender = Sender(seed, alpha=1.0)
        sender.message(9.0)
        sender.answer(2.0, 2.0)
        taken.append(sender.asked.index(sender.policy.path))
    assert 60 < sum(taken) < 140


def test_after_a_switch_there_is_none_for_the_time_to_live() -> None:
    sender = Sender(alpha=1.0)
    sender.message(3.0)
    left = sender.policy.path
    sender.answer(1.0, 1.0)
    begun = sender.now
    while sender.now < begun + 3.5:
        sender.now += 0.5
        sender.tell(h.Measured(sender.policy.path, 50.0))
        if sender.asked:
            sender.answer(*(1.0 for _ in sender.asked))
    assert len(sender.switches) == 1 and all(left not in paths for _, paths in sender.probes)
    sender.now = begun + 60.0
    sender.tell(h.Measured(sender.policy.path, 50.0))
    sender.answer(*(1.0 for _ in sender.asked))
    assert len(sender.switches) == 2


@pytest.mark.parametrize("heard", [False, True])
def test_in_an_epoch_that_outlasts_the_time_to_live_it_probes_again(heard: bool) -> None:
    """What the epoch's probes said is forgotten when the hold after a switch ends: nothing was compared, so nothing rests."""
    sender = Sender(alpha=1.0)
    sender.message(3.0)
    left = sender.policy.path
    sender.answer(1.0, 1.0)
    begun = sender.now
    sender.tell(h.Measured(sender.policy.path, 50.0))  # an epoch of 50 s
    sender.answer(2.0, 2.0)
    assert len(sender.probes) == 2 and len(sender.switches) == 1
    sender.now = begun + 4.5
    if heard:
        sender.tell(h.Measured(left, 60.0))  # is known, but by no probe: no reason to wait an epoch either
    sender.tell(h.Pending(sender.policy.path, 40.0))
    assert len(sender.probes) == 3
    sender.answer(1.0, 1.0)
    assert len(sender.switches) == 2


def test_a_probe_that_is_not_answered_within_a_message_has_failed() -> None:
    sender = Sender(alpha=1.0)
    sender.message(3.0)
    late, good = sender.asked
    assert sender.policy.deadline == sender.now + 3.0
    assert sender.tell(h.Answered(good, 1.6)) == []
    sender.now += 2.9
    assert sender.tell(h.Tick()) == [] and sender.policy.deadline < math.inf
    sender.now += 0.2
    (switch,) = sender.tell(h.Tick())
    assert isinstance(switch, h.Switch) and switch.path == good and sender.policy.deadline == math.inf
    assert isinstance(sender.policy, Hopper) and sender.policy.known(sender.now)[late] == math.inf
    sender.tell(h.Answered(late, 1.5))
    assert sender.policy.known(sender.now)[late] == 1.5, "late, but now it is known"


def test_an_answer_as_fast_as_an_idle_paths_ends_the_wait() -> None:
    sender = Sender(alpha=1.0)
    sender.message(3.0)
    slow, good = sender.asked
    (switch,) = sender.tell(h.Answered(good, 1.5))
    assert isinstance(switch, h.Switch) and switch.path == good and sender.policy.deadline == math.inf
    assert sender.tell(h.Answered(slow, 9.0)) == []
    assert isinstance(sender.policy, Hopper) and sender.policy.known(sender.now)[slow] == 9.0


def test_a_path_is_proven_by_a_fast_probe_or_by_a_message() -> None:
    sender = Sender(alpha=1.0)
    assert not sender.policy.proven
    sender.message(9.0)
    assert sender.policy.proven, "that it is slow is known as well"
    sender.answer(3.0, 4.0)
    assert sender.switches and not sender.policy.proven
    sender.message(1.0)
    assert sender.policy.proven
    sender.tell(h.PathLost(sender.policy.path))
    assert not sender.policy.proven, "nobody looked"
    for policy in (PolicyName.FLOWBENDER, PolicyName.ECMP):
        assert Sender(policy=policy).policy.proven, "they do not ask"


def test_a_lost_probe_is_not_waited_for() -> None:
    sender = Sender(alpha=1.0)
    sender.message(3.0)
    lost, good = sender.asked
    assert sender.tell(h.Answered(good, 1.6)) == []
    (switch,) = sender.tell(h.Unanswered(lost))
    assert isinstance(switch, h.Switch) and switch.path == good


def test_a_message_that_does_not_come_back_is_not_waited_for() -> None:
    sender = Sender(alpha=0.25)  # a threefold RTT makes it probe, a sevenfold one leave
    assert sender.policy.patience_s == pytest.approx(3.0)
    sender.now += 2.9
    assert sender.tell(h.Pending(sender.policy.path, 2.9)) == []
    sender.now += 0.2
    assert isinstance(sender.tell(h.Pending(sender.policy.path, 3.1))[0], h.Probe)
    assert sender.answer(1.0, 1.0) == []
    sender.now += 3.8
    sender.tell(h.Pending(sender.policy.path, 6.9))
    sender.answer(*(1.0 for _ in sender.asked))
    assert not sender.switches and sender.policy.average.value_s == 1.0, "it has not ended, so it is in no average"
    sender.now += 0.2
    sender.tell(h.Pending(sender.policy.path, 7.1))
    assert len(sender.switches) == 1 and sender.switches[0][1].old_rtt_s == pytest.approx(0.75 + 7.1 / 4)


# ---------------------------------------------------------------- the delayed switch


def test_the_old_paths_rtt_is_continued_in_a_straight_line() -> None:
    average = RttAverage(options())
    assert average.predicted(5) == 1.0, "nothing is known but the average"
    average.take(1.2)
    assert average.predicted(5) == 1.2
    for rtt_s in (1.4, 1.6, 1.8):
        average.take(rtt_s)
    assert average.predicted(0) == pytest.approx(1.8) and average.predicted(4) == pytest.approx(2.6)
    average.look(1.0, 0.0)  # a new epoch
    for rtt_s in (3.0, 2.0, 1.5):
        average.take(rtt_s)
    assert average.predicted(10) == pytest.approx(6.5 / 3), "never falling"


@given(st.lists(st.floats(1.0, 50.0), min_size=2, max_size=20), st.integers(0, 50))
def test_the_line_is_that_of_least_squares(rtts_s: list[float], ahead: int) -> None:
    np = pytest.importorskip("numpy")
    average = RttAverage(options())
    for rtt_s in rtts_s:
        average.take(rtt_s)
    slope, start = np.polyfit(range(len(rtts_s)), rtts_s, 1)
    expected = start + slope * (len(rtts_s) - 1 + ahead) if slope > 0 else sum(rtts_s) / len(rtts_s)
    assert average.predicted(ahead) == pytest.approx(max(rtts_s[-1], expected), rel=1e-6)


def test_a_delayed_switch_waits_for_what_is_under_way_on_the_old_path() -> None:
    sender = Sender(alpha=1.0, delayed=True)
    for _ in range(5):
        sender.tell(h.Begun(sender.policy.path))
    sender.now += 3.0
    sender.tell(h.Measured(sender.policy.path, 3.0))
    sender.tell(h.Ended(sender.policy.path))
    sender.now += 0.5
    sender.tell(h.Measured(sender.policy.path, 3.5))
    sender.tell(h.Ended(sender.policy.path))
    (switch,) = sender.answer(1.0, 2.0)
    assert isinstance(switch, h.Switch) and switch.at_s == pytest.approx(sender.now + 3.5 + 3 * 0.5 - 1.0)
