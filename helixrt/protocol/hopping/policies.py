"""The policies Hopper is compared with, behind the same interface: ECMP, and FlowBender triggered by RTT.

In: options that name a policy. Out: a `Policy`. FlowBender (Kabbani et al., CoNEXT 2014) moves a flow to a random other
path after an RTT in which it was congested, and knows nothing of where it goes; as in Hopper's section 4.2 congestion is
detected by RTTs instead of ECN marks, by the same average, threshold and epochs as in `hopper.Hopper`. ECMP draws a path
and keeps it; only a path that fails is left.
"""

from __future__ import annotations

import random

from helixrt.protocol.hopping.hopper import Hopper, Policy
from helixrt.protocol.hopping.messages import Action, HoppingOptions, PolicyName, Reason


class FlowBender(Policy):
    def __init__(self, paths: int, options: HoppingOptions, draw: random.Random) -> None:
        super().__init__(paths, options, draw)
        self._decided = False  # in this epoch

    @property
    def patience_s(self) -> float:
        return self.average.reached_by(self.options.switch_above * self.base_s)

    def _measured(self, path: int, rtt_s: float, now: float, out: list[Action]) -> None:
        if path == self.path:
            self._look(rtt_s, now)
            self.average.take(rtt_s)
            self._judge(self.average.value_s, now, out)

    def _pending(self, path: int, rtt_s: float, now: float, out: list[Action]) -> None:
        if path == self.path:
            self._look(rtt_s, now)
            self._judge(max(self.average.value_s, self.average.with_one_of(rtt_s)), now, out)

    def _look(self, rtt_s: float, now: float) -> None:
        if self.average.look(rtt_s, now):
            self._decided = False

    def _judge(self, average_s: float, now: float, out: list[Action]) -> None:
        others = self._others()
        if average_s > self.options.switch_above * self.base_s and others and not self._decided:
            self._decided = True
            self._go(self._draw.choice(others), Reason.CONGESTED, average_s, 0.0, now, now, out)


class Ecmp(Policy):
    """A random path, kept."""


_POLICIES: dict[PolicyName, type[Policy]] = {
    PolicyName.HOPPER: Hopper,
    PolicyName.FLOWBENDER: FlowBender,
    PolicyName.ECMP: Ecmp,
}


def policy_of(options: HoppingOptions, paths: int, draw: random.Random) -> Policy:
    return _POLICIES[options.policy](paths, options, draw)
