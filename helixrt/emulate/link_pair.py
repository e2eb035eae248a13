"""Two links joined by rails that one holds, cuts and mutes by hand: a scripted world, for scenarios that are read.

In: what the callers of both ends do, what becomes of each rail, how much time passes. Out: every action of both
ends, in order. Nothing here is random (`link_world` is): a script decides what happens, so that a reader can follow it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TypeVar

from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.rails import SendState

LONG = 100_000  # bytes: it needs a credit
OPTIONS = LinkOptions(eager_bytes=1000, eager_memory_bytes=4000)
GENERATION = 7

A = TypeVar("A")


class Pair:
    """Ends 0 and 1. Frames wait per rail and direction until `flow` delivers them; a held rail keeps them."""

    def __init__(self, rails: int = 1, connect: bool = True, options: LinkOptions = OPTIONS) -> None:
        self.now = 100.0
        self.links = [Link(GENERATION, 1 - me, rails, options) for me in range(2)]
        self.log: list[list[m.Action]] = [[], []]
        self.wire: dict[tuple[int, int], deque[Frame]] = {(rail, to): deque() for rail in range(rails) for to in range(2)}
        self.held: set[tuple[int, int]] = set()
        self.incarnations = [0] * rails
        for rail in range(rails if connect else 0):
            self.up(rail)

    def tell(self, me: int, event: m.Event) -> list[m.Action]:
        actions = self.links[me].on(event, self.now)
        self.log[me] += actions
        for action in actions:
            if isinstance(action, m.SendFrame | m.SendData):
                self.wire[action.rail, 1 - me].append(action.frame)
            elif isinstance(action, m.ResetRail):
                self.wire[action.rail, me].clear()
        return actions

    def submit(
        self, me: int, op: int, index: int = 0, length: int = LONG, *, repeatable: bool = True, deadline: float = math.inf
    ) -> list[m.Action]:
        return self.tell(me, m.Submit(op, index, length, repeatable, deadline))

    def post(self, me: int, op: int, index: int = 0, length: int = LONG, *, deadline: float = math.inf) -> list[m.Action]:
        return self.tell(me, m.Post(op, index, length, deadline))

    # ---- frames

    def flow(self) -> None:
        """Deliver all that is not held, until nothing moves."""
        moved = True
        while moved:
            moved = False
            for (rail, to), waiting in self.wire.items():
                while waiting and (rail, to) not in self.held:
                    moved = True
                    self.deliver(rail, to)

    def deliver(self, rail: int, to: int) -> None:
        frame = self.wire[rail, to].popleft()
        self.tell(to, m.FrameArrived(rail, frame))
        if frame.kind is Kind.DATA and not self.links[to].closed:
            self.tell(to, m.PayloadArrived(rail, frame.sequence))

    def hold(self, rail: int, *to: int) -> None:
        self.held |= {(rail, end) for end in to or (0, 1)}

    def release(self, rail: int) -> None:
        self.held -= {(rail, 0), (rail, 1)}
        self.flow()

    # ---- rails

    def up(self, rail: int) -> None:
        self.incarnations[rail] += 1
        self.wire[rail, 0].clear()
        self.wire[rail, 1].clear()
        for to in range(2):
            self.tell(to, m.RailUp(rail, self.incarnations[rail]))

    def cut(self, rail: int, failure: m.Failure = m.Failure.PATH, *ends: int) -> None:
        """Both ends, or those named, learn that the rail broke; what was on it is gone."""
        for to in range(2):
            self.wire[rail, to].clear()
        for me in ends or (0, 1):
            self.tell(me, m.RailDown(rail, failure, "cable cut"))

    # ---- time

    def wait(self, seconds: float) -> None:
        """Time passes; every link gets its Ticks, and frames flow."""
        end = self.now + seconds
        self.flow()
        while True:
            due = min(link.deadline for link in self.links)
            if due > end:
                break
            self.now = max(self.now, due)
            for me in range(2):
                if self.links[me].deadline <= self.now:
                    self.tell(me, m.Tick())
            self.flow()
        self.now = end

    # ---- what came of it

    def said(self, me: int, *kinds: type[A]) -> list[A]:
        """All actions of these kinds, oldest first."""
        return [action for action in self.log[me] if isinstance(action, kinds)]

    def kinds(self, me: int, rail: int | None = None) -> list[Kind]:
        """Of all frames that `me` has sent, on `rail` if given."""
        sends = [a for a in self.log[me] if isinstance(a, m.SendFrame | m.SendData) and rail in (None, a.rail)]
        return [send.frame.kind for send in sends]

    def states(self, me: int) -> list[SendState]:
        return [rail.send for rail in self.links[me].rails]
