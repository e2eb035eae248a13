"""A path policy and whoever sends by it, in one thread: base RTT 1 s, so that RTTs are multiples of it."""

from __future__ import annotations

import random
from typing import Any

from helixrt.protocol.hopping import messages as h
from helixrt.protocol.hopping.messages import HoppingOptions, Unloaded
from helixrt.protocol.hopping.policies import policy_of

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
