"""The path policies, rule by rule of the paper, and under noise: base RTT 1 s, so that RTTs are multiples of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixrt.errors import ConfigError
from helixrt.protocol import hopping_messages as h
from helixrt.protocol.hopping import Hopper, RttAverage
from helixrt.protocol.hopping_messages import HoppingOptions, PolicyName, Reason, Unloaded
from helixrt.protocol.hopping_policies import policy_of

ONE_S = Unloaded(1e6, 0.0)
PATHS = 6


def options(**changes: Any) -> HoppingOptions:
    return HoppingOptions(**(dict(unloaded=ONE_S, message_bytes=1_000_000, look_first=False, look_within=0.0) | changes))


class Sender:
    """A policy and a clock. Messages follow one another on the path in use; probes wait for `answer`."""

    def __init__(self, seed: int = 1, paths: int = PATHS, **changes: Any) -> None:
        self.now = 100.0
        self.options = options(**changes)
        self.policy = policy_of(self.options, paths, random.Random(seed))
        self.asked: list[int] = []  # of the last `Probe`
        self.probes: list[tuple[float, tuple[int, ...]]] = []
        self.switches: list[tuple[float, h.Switch]] = []

    def tell(self, event: h.Event) -> list[h.Action]:
        before = self.policy.path
        actions = self.policy.on(event, self.now)
        for action in actions:
            if isinstance(action, h.Probe):
                self.asked = list(action.paths)
                self.probes.append((self.now, action.paths))
            else:
                self.switches.append((self.now, action))
                assert action.old == before and action.path == self.policy.path != before
        return actions

    def message(self, rtt_s: float) -> list[h.Action]:
        """One more message, sent now."""
        self.now += rtt_s
        return self.tell(h.Measured(self.policy.path, rtt_s))

    def answer(self, *rtts_s: float) -> list[h.Action]:
        """The probes that were asked for come back, at once."""
        actions: list[h.Action] = []
        for path, rtt_s in zip(list(self.asked), rtts_s, strict=True):
            actions += self.tell(h.Answered(path, rtt_s))
        return actions

    def others(self) -> set[int]:
        return set(range(PATHS)) - {self.policy.path}


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


# ---------------------------------------------------------------- paths that fail


@pytest.mark.parametrize("policy", PolicyName)
def test_a_lost_path_is_left_at_once_and_not_used_until_it_is_back(policy: PolicyName) -> None:
    sender = Sender(policy=policy, paths=3, alpha=1.0)
    first = sender.policy.path
    (switch,) = sender.tell(h.PathLost(first))
    second = sender.policy.path
    assert isinstance(switch, h.Switch) and switch.reason is Reason.LOST and second != first
    (third,) = set(range(3)) - {first, second}
    assert sender.tell(h.PathLost(third)) == []
    for _ in range(20):
        sender.message(20.0)
    assert sender.policy.path == second and not sender.probes, "there is no other"
    assert sender.tell(h.PathLost(second)) == [], "there is none at all"
    (switch,) = sender.tell(h.PathBack(first))
    assert isinstance(switch, h.Switch) and sender.policy.path == first


def test_a_lost_path_is_left_for_the_best_one_known() -> None:
    sender = Sender(alpha=1.0)
    sender.message(1.6)
    good = sender.asked[1]
    sender.answer(2.0, 1.1)
    sender.tell(h.PathLost(sender.policy.path))
    assert sender.policy.path == good


def test_a_path_that_is_lost_while_it_is_probed_is_not_waited_for_nor_taken() -> None:
    sender = Sender(alpha=1.0)
    sender.message(3.0)
    lost, other = sender.asked
    sender.tell(h.Answered(lost, 1.6))
    sender.tell(h.PathLost(lost))
    (switch,) = sender.tell(h.Answered(other, 1.3))
    assert isinstance(switch, h.Switch) and switch.path == other


# ---------------------------------------------------------------- the first message


def test_before_the_first_message_the_drawn_path_and_two_more_are_looked_at() -> None:
    sender = Sender(look_first=True)
    drawn = sender.policy.path
    (probe,) = sender.tell(h.Starting())
    assert isinstance(probe, h.Probe) and probe.paths[0] == drawn and len(set(probe.paths)) == 3 and sender.policy.looking
    assert sender.answer(10.0, 10.0, 1.0)[0] == h.Switch(drawn, probe.paths[2], sender.now, Reason.LOOKED, 10.0, 1.0)
    assert not sender.policy.looking and sender.tell(h.Starting()) == []


@pytest.mark.parametrize("policy", [PolicyName.FLOWBENDER, PolicyName.ECMP])
def test_the_others_do_not_look(policy: PolicyName) -> None:
    sender = Sender(policy=policy, look_first=True)
    assert sender.tell(h.Starting()) == [] and not sender.policy.looking


def test_the_drawn_path_is_kept_if_it_is_as_good_and_the_first_good_answer_decides() -> None:
    sender = Sender(look_first=True)
    sender.tell(h.Starting())
    assert sender.answer(1.0, 1.0, 1.0) == [] and not sender.policy.looking and sender.policy.proven
    sender = Sender(2, look_first=True)
    sender.tell(h.Starting())
    drawn, good, _ = sender.asked
    (switch,) = sender.tell(h.Answered(good, 1.5))
    assert isinstance(switch, h.Switch) and switch.path == good and not sender.policy.looking
    assert sender.tell(h.Answered(drawn, 1.0)) == []


def test_a_look_waits_a_base_rtt_for_better_answers_and_no_longer() -> None:
    sender = Sender(look_first=True)
    sender.tell(h.Starting())
    drawn, fair, _ = sender.asked
    assert sender.policy.deadline == sender.now + 1.0
    assert sender.tell(h.Answered(fair, 2.0)) == [] and sender.policy.looking
    sender.now += 1.0
    (switch,) = sender.tell(h.Tick())
    assert isinstance(switch, h.Switch) and (switch.old, switch.path, switch.old_rtt_s) == (drawn, fair, math.inf)
    assert not sender.policy.looking and sender.policy.deadline == math.inf


def test_who_sees_only_congested_paths_looks_twice_more() -> None:
    sender = Sender(look_first=True)
    sender.tell(h.Starting())
    drawn = sender.policy.path
    (again,) = sender.answer(9.0, 9.0, 9.0)
    assert isinstance(again, h.Probe) and again.paths[0] == drawn and sender.policy.looking
    sender.now += 1.0
    (again,) = sender.tell(h.Tick())
    assert isinstance(again, h.Probe) and len(sender.probes) == 3
    (switch,) = sender.answer(9.0, 5.0, 4.0)
    assert isinstance(switch, h.Switch) and switch.path == again.paths[2], "the best there is"
    assert not sender.policy.looking and not sender.policy.proven


@pytest.mark.parametrize("slow", [True, False])
def test_a_path_taken_although_its_probe_was_slow_is_judged_by_its_first_message_alone(slow: bool) -> None:
    sender = Sender(look_first=True, choices=1)
    sender.tell(h.Starting())
    for _ in range(2):
        sender.answer(9.0, 8.0)
    sender.answer(9.0, 6.0 if slow else 2.0)
    assert len(sender.switches) == 1 and sender.policy.patience_s == pytest.approx(1.5 if slow else 3.5)
    begun = sender.now
    sender.now += 4.1  # the time-to-live: there was a switch
    sender.tell(h.Pending(sender.policy.path, 4.1))
    sender.answer(1.0)
    assert len(sender.switches) == (2 if slow else 1)
    if slow:
        assert sender.switches[1][1].old_rtt_s == pytest.approx(4.1) and sender.now == begun + 4.1
        assert sender.policy.patience_s == pytest.approx(3.5), "of the next one there is no suspicion"


def test_those_that_begin_together_do_not_look_together() -> None:
    begun = set()
    for seed in range(20):
        sender = Sender(seed, look_first=True, look_within=0.5, probe_bytes=1_000_000)
        assert sender.tell(h.Starting()) == [] and sender.policy.looking
        assert 100.0 <= sender.policy.deadline <= 100.5
        sender.now = sender.policy.deadline
        (probe,) = sender.tell(h.Tick())
        assert isinstance(probe, h.Probe) and sender.policy.deadline == sender.now + 1.0
        begun.add(sender.now)
    assert len(begun) == 20


def test_a_path_that_is_lost_before_the_look_is_not_looked_at() -> None:
    sender = Sender(look_first=True, look_within=0.5, probe_bytes=1_000_000)
    sender.tell(h.Starting())
    lost = sender.policy.path
    sender.tell(h.PathLost(lost))
    assert sender.policy.looking and sender.policy.path != lost
    sender.now = sender.policy.deadline
    (probe,) = sender.tell(h.Tick())
    assert isinstance(probe, h.Probe) and lost not in probe.paths
    for path in probe.paths:
        sender.tell(h.PathLost(path))
    assert not sender.policy.looking


# ---------------------------------------------------------------- the others


def test_flowbender_takes_any_other_path_without_a_look_once_an_epoch() -> None:
    taken = set()
    for seed in range(100):
        sender = Sender(seed, policy=PolicyName.FLOWBENDER, alpha=1.0)
        first = sender.policy.path
        assert sender.message(2.5) == []
        (switch,) = sender.message(2.6)
        assert isinstance(switch, h.Switch) and switch.rtt_s == 0.0
        taken.add((first, switch.path))
        sender.message(3.0)
        assert len(sender.switches) == 2 and not sender.probes
        sender.now += 1.0
        sender.tell(h.Measured(sender.policy.path, 1.0))
        sender.tell(h.Measured(sender.policy.path, 9.0))
        assert len(sender.switches) == 3
    assert len(taken) > 0.8 * PATHS * (PATHS - 1)


def test_ecmp_stays_whatever_happens() -> None:
    drawn = set()
    for seed in range(100):
        sender = Sender(seed, policy=PolicyName.ECMP)
        drawn.add(sender.policy.path)
        for _ in range(5):
            assert sender.message(100.0) == []
        assert sender.tell(h.Pending(sender.policy.path, 1e6)) == [] and sender.policy.patience_s == math.inf
    assert drawn == set(range(PATHS))


# ---------------------------------------------------------------- properties


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[float, str, int, float]]:
    """(seconds later, what, path or probe, RTT)."""
    what = st.sampled_from([*["message"] * 3, *["answer"] * 2, "other", "pending", "lose", "back", "tick", "miss"])
    rtt = st.one_of(st.floats(1.0, 4.0), st.floats(0.0, 60.0))
    return draw(st.lists(st.tuples(st.floats(0.0, 3.0), what, st.integers(0, PATHS - 1), rtt), max_size=120))


@settings(max_examples=150)
@given(histories(), st.integers(0, 2**32), st.sampled_from([0.1, 0.2, 1.0]), st.booleans())
def test_whatever_happens_the_rules_hold(
    history: Sequence[tuple[float, str, int, float]], seed: int, alpha: float, look_first: bool
) -> None:
    sender = Sender(seed, alpha=alpha, look_first=look_first)
    usable = set(range(PATHS))
    if look_first:
        sender.tell(h.Starting())
        sender.probes.clear()
    congested_at = -math.inf
    for later_s, what, path, rtt_s in history:
        sender.now += later_s
        before = sender.policy.path
        event: h.Event = h.Tick()
        match what:
            case "message":
                event = h.Measured(before, rtt_s)
            case "other":
                event = h.Measured(path, rtt_s)
            case "pending":
                event = h.Pending(before, rtt_s)
            case "answer" if sender.asked:
                event = h.Answered(sender.asked.pop(path % len(sender.asked)), rtt_s)
            case "miss" if sender.asked:
                event = h.Unanswered(sender.asked.pop(path % len(sender.asked)))
            case "lose":
                usable.discard(path)
                event = h.PathLost(path)
            case "back":
                usable.add(path)
                event = h.PathBack(path)
        for action in sender.tell(event):
            if isinstance(action, h.Probe):
                assert len(set(action.paths)) == len(action.paths) and set(action.paths) <= usable
                assert len(action.paths) <= 2 + sender.policy.looking
                assert sender.policy.looking == (sender.policy.path in action.paths)
                continue
            assert action.path in usable and action.at_s == sender.now
            if action.reason is Reason.CONGESTED:
                assert sender.now >= congested_at + 4.0
                congested_at = sender.now
        assert sender.policy.path in usable or not usable or before == sender.policy.path
        assert not sender.policy.looking or sender.policy.deadline < math.inf


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 2.5), max_size=200), st.integers(0, 2**32))
def test_without_congestion_no_noise_makes_it_switch(rtts_s: list[float], seed: int) -> None:
    sender = Sender(seed, alpha=1.0)
    for rtt_s in rtts_s:
        sender.message(rtt_s)
        if sender.asked:
            sender.answer(*(1.0 for _ in sender.asked))
            sender.asked = []
    assert not sender.switches


def test_the_same_seed_gives_the_same_history() -> None:
    def history(seed: int) -> list[Any]:
        rng, sender = random.Random(5), Sender(seed)
        for _ in range(300):
            sender.message(rng.choice((1.0, 1.0, 4.0, 30.0)))
            if sender.asked:
                sender.answer(*(rng.uniform(1, 4) for _ in sender.asked))
                sender.asked = []
        return [*sender.probes, *sender.switches]

    assert history(3) == history(3) != history(4)


# ---------------------------------------------------------------- noise


def jitter(rng: random.Random) -> float:
    """An idle path as software measures it: a spread of a fifth, and one message in fifty four times as late."""
    return rng.lognormvariate(0.0, 0.2) * (4.0 if rng.random() < 0.02 else 1.0)


def stalls(rng: random.Random) -> float:
    """Worse: a spread of half, and one message in a hundred up to thirty times as late."""
    return rng.lognormvariate(0.0, 0.5) * (rng.uniform(5, 30) if rng.random() < 0.01 else 1.0)


def shared(rng: random.Random) -> float:
    """Busy, all paths alike: between the thresholds on average, and often above both."""
    return 2.0 * rng.lognormvariate(0.0, 0.4)


def switches(noise: Callable[[random.Random], float], seed: int, messages: int, **changes: Any) -> tuple[int, float]:
    """How many there are, and in how many seconds, when all paths have the same noise."""
    rng, sender = random.Random(seed), Sender(seed, **changes)
    for _ in range(messages):
        sender.message(max(1.0, noise(rng)))
        if sender.asked:
            sender.answer(*(max(1.0, noise(rng)) for _ in sender.asked))
            sender.asked = []
    return len(sender.switches), sender.now - 100.0


def total(noise: Callable[[random.Random], float], **changes: Any) -> int:
    return sum(switches(noise, seed, 1000, **changes)[0] for seed in range(20))


def test_jitter_moves_nothing_with_our_alpha_and_much_with_the_papers() -> None:
    assert total(jitter) == 0
    assert total(jitter, alpha=1.0) > 200


def test_stalls_move_it_at_most_once_each() -> None:
    assert total(stalls) < 200, "a message in a hundred"
    assert total(stalls) < total(stalls, alpha=1.0) / 4 and total(stalls) < total(stalls, policy=PolicyName.FLOWBENDER)


def test_paths_that_are_all_busy_are_not_tried_in_turn() -> None:
    assert total(shared) < 0.04 * 20_000
    assert total(shared) < total(shared, alpha=1.0) / 5 and total(shared) < total(shared, policy=PolicyName.FLOWBENDER)


@pytest.mark.parametrize("noise", [jitter, stalls, shared, lambda rng: rng.uniform(0, 100)])
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_switches_are_bounded_in_time_whatever_the_noise(noise: Callable[[random.Random], float], alpha: float) -> None:
    for seed in range(20):
        count, seconds = switches(noise, seed, 500, alpha=alpha)
        assert count <= 1 + seconds / 4.0
