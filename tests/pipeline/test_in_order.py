"""Direct communication in order, played in virtual time, against the exact simulation of the same schedules."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count

import pytest

from helixrt.pipeline.in_order import Communication, InOrder
from helixrt.pipeline.program import Transfer, compile_program
from helixrt.schedule.costs import Costs, Link, uniform
from helixrt.schedule.generators.policies import POLICIES
from helixrt.schedule.ir import Op, Schedule
from helixrt.schedule.simulate import Direct, makespan_ms

Wait = float | Callable[[], bool]  # for so long, or until that is so


class World:
    """Stages that compute for as long as their operations cost, and links that deliver after their delay."""

    def __init__(self, schedule: Schedule, costs: Costs, depth: int) -> None:
        self.schedule, self.costs, self.now = schedule, costs, 0.0
        self.queues = [InOrder(depth) for _ in range(schedule.stages)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._receives: dict[Transfer, tuple[int, Communication]] = {}
        self._there: set[Transfer] = set()
        self._waiting: dict[int, tuple[Callable[[], bool], Generator[Wait, None, None]]] = {}

    def run(self) -> float:
        for stage in range(self.schedule.stages):
            self._go_on(stage, self._stage(stage))
        while self._events:
            self.now, _, event = heappop(self._events)
            event()
        assert not self._waiting, "direct communication blocks itself"
        return self.now

    def _later(self, after: float, event: Callable[[], None]) -> None:
        heappush(self._events, (self.now + after, next(self._numbers), event))

    def _go_on(self, stage: int, steps: Generator[Wait, None, None]) -> None:
        for wait in steps:
            if not callable(wait):
                return self._later(wait, lambda: self._go_on(stage, steps))
            if not wait():
                self._waiting[stage] = wait, steps
                return None
        return None

    def _advance(self, stage: int) -> None:
        for communication in self.queues[stage].advance(self.now):
            communication.begin()
        if stage in self._waiting and self._waiting[stage][0]():
            self._go_on(stage, self._waiting.pop(stage)[1])

    def _deliver(self, source: int, transfer: Transfer, send: Communication) -> None:
        send.over = True
        self._there.add(transfer)
        if transfer in self._receives:
            stage, receive = self._receives[transfer]
            receive.over = True
            self._advance(stage)
        self._advance(source)

    def _stage(self, stage: int) -> Generator[Wait, None, None]:
        """As the executor goes through a program."""
        queue = self.queues[stage]
        for entry in compile_program(self.schedule, stage).entries:
            for action in entry:
                if action.takes is not None and action.source != stage:
                    receive = Communication(over=action.takes in self._there)
                    self._receives[action.takes] = stage, receive
                    yield lambda: not queue.full
                    queue.put(receive)
                    self._advance(stage)
                    yield lambda receive=receive: not math.isnan(receive.finished_s)
            yield math.fsum(
                {Op.F: self.costs.forward, Op.B: self.costs.backward, Op.W: self.costs.weight}[op][action.chunk]
                for action in entry
                for op in ((Op.B, Op.W) if action.op is Op.BW else (action.op,))
            )
            for action in entry:
                if action.gives is not None and action.target is not None and action.target != stage:
                    delay_ms = self.costs.link(stage, action.target).delay_ms
                    send = Communication()

                    def begin(transfer: Transfer = action.gives, send: Communication = send, ms: float = delay_ms) -> None:
                        self._later(ms, lambda: self._deliver(stage, transfer, send))

                    send.begin = begin
                    yield lambda: not queue.full
                    queue.put(send)
                    self._advance(stage)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["1f1b", "zb", "adaptra", "helix", "dualpipev"])
def test_it_takes_as_long_as_the_exact_simulation_says(policy: str, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        stages = rng.randint(2, 5)
        placement = POLICIES[policy].placement(stages)
        ways = [(a, b) for a in range(stages) for b in (a - 1, a + 1) if 0 <= b < stages]
        links = {way: Link(float(rng.choice([0, 1, 7, 30]))) for way in ways}
        base = uniform(stages, float(rng.randint(1, 9)), float(rng.randint(1, 9)), float(rng.randint(1, 9)))
        whole = Costs(base.placement, base.forward, base.backward, base.weight, links=links)
        costs = whole if placement == whole.placement else whole.split(placement)
        schedule = POLICIES[policy].schedule(costs, rng.randint(stages * 2, 12))
        assert World(schedule, costs, depth).run() == pytest.approx(makespan_ms(schedule, costs, Direct(depth))), f"seed {seed}"
