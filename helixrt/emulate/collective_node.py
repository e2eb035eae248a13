"""One process of a simulated world for FTAR, and what it holds for its generation.

In and out: nothing; `collective_driver` moves it, `collective_world` judges it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from helixrt.emulate.fabric import Connection, Payload
from helixrt.emulate.plans import Memory
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.collective.messages import Await
from helixrt.protocol.link.machine import Link

Name = tuple[int, int, int]  # peer's index in the generation, op, index


@dataclass(eq=False)
class Node:
    """One process: a rank's incarnation, and what it holds for its generation. Peers are numbered by their place in it."""

    rank: int
    incarnation: int
    ahead: int  # collectives it submits before the first of them has ended
    alive: bool = True
    unreachable: bool = False  # it died with its host: nobody is there to refuse a connection
    paused_until: float = 0.0
    backlog: list[tuple[object, ...]] = field(default_factory=list)

    generation: int = 0  # 0: it is in none
    ranks: tuple[int, ...] = ()
    me: int = 0
    machine: CollectiveMachine = field(default_factory=lambda: CollectiveMachine(0, 1, 0))
    links: dict[int, Link] = field(default_factory=dict)
    ticks: dict[int, float] = field(default_factory=dict)  # when the link's next Tick is due
    rails: dict[tuple[int, int], Connection] = field(default_factory=dict)  # (peer, rail)
    reached: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # peers that closed on purpose
    closing: bool = False  # it is about to do that itself
    points_first: bool = False  # its program waits for single messages before it begins with collectives
    submitted: int = 0
    finished: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)  # collectives that failed or were skipped

    memories: dict[int, Memory] = field(default_factory=dict)
    after: dict[int, bytes] = field(default_factory=dict)  # op -> what OUT was when it ended
    outgoing: dict[Name, memoryview] = field(default_factory=dict)
    kept: dict[Name, bytes] = field(default_factory=dict)
    flying: dict[Name, list[Payload]] = field(default_factory=dict)
    posted: dict[Name, memoryview] = field(default_factory=dict)
    summing: dict[Name, Await] = field(default_factory=dict)  # posted, and reduced when they are whole
    held: dict[Name, bytes] = field(default_factory=dict)
    landing: dict[Connection, memoryview | Name | None] = field(default_factory=dict)
    received: set[Name] = field(default_factory=set)
    unsent: set[Name] = field(default_factory=set)

    def begin_again(self) -> None:
        """Nothing of the last generation is left."""
        for numbers in (self.reached, self.left, self.finished, self.given_up):
            numbers.clear()
        self.submitted = 0
        self.received.clear()
        self.unsent.clear()
        self.memories.clear()
        self.after.clear()
        self.rails.clear()
        self.landing.clear()
        for by_name in (self.outgoing, self.kept, self.flying, self.posted, self.summing, self.held):
            cast("dict[Name, object]", by_name).clear()
