"""What the path policies have in common, paths that fail, and what FlowBender and ECMP do."""

from __future__ import annotations

import math

import pytest

from helixrt.protocol.hopping import messages as h
from helixrt.protocol.hopping.messages import PolicyName, Reason
from tests.protocol.path_sender import PATHS, Sender

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
