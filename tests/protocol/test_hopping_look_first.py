"""Hopper before the first message: it looks at the path that was drawn and at two more."""

from __future__ import annotations

import math

import pytest

from helixrt.protocol.hopping import messages as h
from helixrt.protocol.hopping.messages import PolicyName, Reason
from tests.protocol.path_sender import Sender


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
