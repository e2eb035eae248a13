"""What one generation knows of a peer before and beside its link: how its rails are reached, and whether it has come.

Used by `meeting` alone, in the one thread of `links`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from helixrt.protocol.liveness import Liveness
from helixrt.transport.native.dial import Dial, Way
from helixrt.transport.tcp.interfaces import trouble, trouble_of_all
from helixrt.transport.tcp.watch import Timer

NUMBERS_AHEAD = 64  # a peer's connection number is at most so much higher than this end's


@dataclass
class PairRail:
    way: Way
    number: int = 0  # of its newest connection; 0: it had none in this generation
    asked: int = 0  # the number of the connection that the engine waits for; 0: none
    dial: Dial | None = None
    wait: Timer | None = None  # for the peer to dial

    def stop(self) -> None:
        """Neither dial nor wait any more."""
        if self.dial is not None:
            self.dial.cancel()
        if self.wait is not None:
            self.wait.cancel()
        self.dial = self.wait = None


@dataclass
class Pair:
    rank: int
    rails: list[PairRail]
    life: Liveness | None  # until it has come; None: no heartbeats
    came_s: float | None = None  # when its first rail was connected
    probes: set[Dial] = field(default_factory=set)
    resting_s: float = 0.0  # it is not probed again before that
    process: int = 0  # of a peer on this host, 0: not known

    @property
    def local(self) -> bool:
        return self.rails[0].way.local

    @property
    def complete(self) -> bool:
        return all(rail.number for rail in self.rails)

    def own_trouble(self) -> str:
        """What of this host alone keeps every rail to the peer from working; empty if there is no such thing."""
        return "" if self.local else trouble_of_all(tuple(rail.way.rail for rail in self.rails))

    def stop(self) -> None:
        for rail in self.rails:
            rail.stop()
        for probe in self.probes:
            probe.cancel()
        self.probes.clear()


def rail_trouble(rail: PairRail) -> str:
    """What of this host keeps the rail from working; empty if nothing does, or it is not known."""
    return "" if rail.way.local else trouble(rail.way.rail)
