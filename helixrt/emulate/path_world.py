"""A simulated world of NICs with several paths each: rails are paths, and the link's policy chooses where messages go.

In: a seed. Out: as in `link_world`, whose rules hold here, too. A path has a rate, a latency and a queue of its own;
some are slower than others, some become so for a while (other traffic), every delay is noisy. Faults strike one path,
or a NIC with all its paths.

Checked of every hop: it goes to a path that works, long messages follow it, a path gets no more than its depth, and after
a hop there is none for congestion until the time-to-live is over: whatever the noise, a flow does not oscillate.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from helixrt.emulate import link_world
from helixrt.emulate.link_end import End, Surroundings
from helixrt.emulate.link_network import LONG_BYTES, Incarnation
from helixrt.emulate.link_world import GENERATION, LinkWorld, Verdict
from helixrt.emulate.seeded import check
from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Reason, Unloaded
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import HEADER_BYTES, Frame
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions

RATE, LATENCY_S = 2e6, 0.001  # of an idle path: bytes a second, seconds one way
MESSAGE_BYTES = 5000
NOISE_S = (0.0, 0.0002, 0.001, 0.003)  # mean of what is added to a frame's latency
HOPPING = HoppingOptions(
    unloaded=Unloaded(RATE, 2 * LATENCY_S + 2 * HEADER_BYTES / RATE),
    message_bytes=MESSAGE_BYTES,
    probe_bytes=500,
    depth_bytes=2 * MESSAGE_BYTES,
)


@dataclass(frozen=True)
class PathVerdict(Verdict):
    congested: int  # hops, by their reason
    looked: int
    fled: int
    probed: int  # paths


class HoppingEnd(End):
    def __init__(self, world: Surroundings, me: int, link: Link) -> None:
        super().__init__(world, me, link)
        assert link.policy is not None and link.options.hopping is not None
        self.policy, self.hopping = link.policy, link.options.hopping
        self.path = self.policy.path
        self.hopped_s = float("-inf")
        self.hops: Counter[Reason] = Counter()
        self.probed = 0
        self.begun: list[tuple[float, int]] = []  # long messages: when, and on which rail

    def check_reports(self, event: m.Event, before: set[int]) -> None:
        super().check_reports(event, before)
        if self.link.closed or self.link.unsettled:  # the choice is made when the batch is settled, before a frame is sent
            return
        check(self.path == self.policy.path, f"the policy uses path {self.policy.path}, reported was {self.path}")
        fit = self._fit()
        check(not fit or self.path in fit, f"path {self.path} is in use; {fit} work")
        if not self.link.resent:
            for rail in self.link.rails:
                long = [flight.bytes for flight in rail.flights.values() if flight.bytes > LONG_BYTES]
                check(len(long) < 2 or sum(long) <= self.hopping.depth_bytes, f"path {rail.number} has {long} bytes")

    def _fit(self) -> set[int]:
        """Paths that may be chosen: they work, or have yet to come."""
        return self.usable | {rail.number for rail in self.link.rails if rail.fresh and not rail.up}

    def said(self, action: m.Action) -> None:
        match action:
            case m.Hopped(old, path, reason):
                self.to_note += 1
                self._hop(old, path, reason)
            case m.PathProbed(path, rtt_s):
                self.to_note += 1
                self.probed += 1
                check(rtt_s >= self.hopping.base_s, f"path {path} was faster than an idle one: {rtt_s}")
            case _:
                super().said(action)

    def _hop(self, old: int, path: int, reason: Reason) -> None:
        now = self.world.now
        check(old == self.path and path != old, f"a hop from {old} to {path}: {self.path} was in use")
        check(path in self._fit(), f"a hop to path {path}; {self._fit()} work")
        rest_s = self.hopping.remember * self.hopping.base_s
        again = reason is Reason.CONGESTED and now < self.hopped_s + rest_s
        check(not again, f"a hop {now - self.hopped_s} s after the last one: {rest_s} s is the least")
        self.path, self.hopped_s = path, now
        self.hops[reason] += 1

    def begins(self, rail: int, frame: Frame) -> None:
        if frame.length > LONG_BYTES:
            self.begun.append((self.world.now, rail))
            there = rail == self.path or self.path not in self.usable
            check(there, f"a long message on path {rail}: {self.path} was chosen")
        super().begins(rail, frame)


class PathWorld(LinkWorld):
    module = "helixrt.emulate.path_world"
    lengths = (10, 900, MESSAGE_BYTES, MESSAGE_BYTES, MESSAGE_BYTES, 2 * MESSAGE_BYTES)
    spans_s = (0.05, 0.1, 0.3)
    capacities_bytes = (1 << 20,)  # what waits in a full connection would count as congestion
    lasting = 0.3
    policy = PolicyName.HOPPER

    # ---- what a world is like

    def draw_rails(self, rng: random.Random) -> int:
        self.nics = rng.choice((1, 2, 2, 3))
        self.paths = rng.choice((2, 3, 4) if self.nics == 1 else (1, 2))
        return self.nics * self.paths

    def draw_options(self, rng: random.Random) -> LinkOptions:
        hopping = replace(HOPPING, policy=self.policy, probe_bytes=rng.choice((500, 500, 6000)), delayed=rng.random() < 0.2)
        return replace(
            link_world.OPTIONS, hopping=hopping, window_bytes=60_000, window_frames=24, attempt_s=0.8, longest_rest_s=0.2
        )

    def make_end(self, me: int) -> HoppingEnd:
        draw = random.Random(self.random.random())
        return HoppingEnd(self, me, Link(GENERATION, 1 - me, self.rails, self.options, draw))

    def draw_weather(self, rng: random.Random) -> None:
        self.doubles, self.loses = rng.choice((0.0, 0.0, 0.0, 0.1)), rng.choice((0.0, 0.0, 0.0, 0.02))
        self.noise_s, self.stalls = rng.choice(NOISE_S), rng.choice((0.0, 0.0, 0.02))
        self.rates = [RATE * rng.choice((1.0, 1.0, 0.5, 0.1)) for _ in range(self.rails)]
        self.latencies = [LATENCY_S * rng.uniform(1.0, 1.5) for _ in range(self.rails)]
        self.busy = [[0.0, 0.0] for _ in range(self.rails)]  # [rail][end] until when its wire carries what it has
        self.safe = rng.random() < 0.5  # the last path of the last NIC never fails
        for rail, paths in enumerate(self._by_nic()):
            self.note(2, f"NIC {rail}: " + ", ".join(f"path {path} at {self.rates[path] / RATE:g}" for path in paths))

    def _by_nic(self) -> list[range]:
        return [range(nic * self.paths, (nic + 1) * self.paths) for nic in range(self.nics)]

    # ---- what paths do to frames

    def header_s(self, me: int, made: Incarnation, frame: Frame) -> float:
        rail, rng = made.rail, self.random
        begin = max(self.now, self.busy[rail][me])
        self.busy[rail][me] = begin + (HEADER_BYTES + frame.length) / self.rates[rail]
        late_s = rng.expovariate(1 / self.noise_s) if self.noise_s else 0.0
        if rng.random() < self.stalls:
            late_s += 0.03
        return begin - self.now + HEADER_BYTES / self.rates[rail] + self.latencies[rail] + late_s

    def payload_s(self, made: Incarnation, frame: Frame) -> float:
        return frame.length / self.rates[made.rail]

    def set_rate(self, rail: int, share: float) -> None:
        self.note(2, f"path {rail} has {share:g} of an idle path's rate")
        self.rates[rail] = RATE * share

    # ---- what happens

    def traffic(self, until: float) -> None:
        for end in self.ends:
            for op in range(self.random.randint(0, 2)):
                for index in range(self.random.randint(2, 12)):
                    self.message(end, self.ends[1 - end.me], op, index, until)

    def trouble(self, until: float) -> None:
        super().trouble(until)
        for _ in range(self.random.choice((0, 1, 2))):
            rail, when = self.random.randrange(self.rails), self.random.uniform(0, until)
            self.at(when, self.set_rate, rail, self.random.choice((0.05, 0.1, 0.3)))
            self.at(when + self.random.uniform(0.02, 0.5), self.set_rate, rail, 1.0)

    def draw_victims(self, rng: random.Random) -> Sequence[int]:
        victims = rng.choice(self._by_nic()) if rng.random() < 0.4 else [rng.randrange(self.rails)]
        return [rail for rail in victims if not self.safe or rail < self.rails - 1]

    def findings(self) -> dict[str, Any]:
        ends = [end for end in self.ends if isinstance(end, HoppingEnd)]
        hops = sum((end.hops for end in ends), Counter[Reason]())
        return super().findings() | dict(
            congested=hops[Reason.CONGESTED],
            looked=hops[Reason.LOOKED],
            fled=hops[Reason.LOST],
            probed=sum(end.probed for end in ends),
        )

    def verdict(self) -> PathVerdict:
        return PathVerdict(**self.findings())


def main(arguments: Sequence[str] | None = None) -> None:
    link_world.main(arguments, PathWorld)


if __name__ == "__main__":
    main()
