"""Cost of the adaptation loop per step: time stamps, summaries, estimates, the decision; in the leading rank and in the others.

The rank's events are those of exact simulations of a step, with noise, its stages on hosts whose clocks are apart, or on one.
Processor time of the thread that does the work, by part: writing the stamps, reducing them, the text that a follower sends;
in the leader reading the followers' texts, estimates, and the judgement, which a job makes once a second while costs stay.
Beside it `--pairs` pairs of blocks of steps that compute for as long as a step takes, with the leader's part of the loop and
without it: the ratio of their times, with the 95% interval of its median.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median, stdev
from typing import Any

import torch

from helixrt.bench._arguments import add_json
from helixrt.bench._figures import Spread, write
from helixrt.bench.adaptation import Size
from helixrt.errors import ConfigError
from helixrt.job.measuring import ReplicaCosts
from helixrt.job.order_adapter import CALM_S
from helixrt.observe.estimates import interval_of_median
from helixrt.observe.stamps import RankTimes, StampCollector
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.adaptation.judge import CostEstimate, judge
from helixrt.schedule.adaptation.policy import Adaptation, Ask, OrderPolicy
from helixrt.schedule.costs import uniform
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Op, operations_of
from helixrt.schedule.simulate import simulate

BUDGET = 0.005  # of a step
WARM_UP = 300  # steps that are not counted
BLOCK = 10  # steps of each side of a pair
_APART_S, _DRIFT, _NOISE = 5.0, 50e-6, 0.02

Written = tuple[Kind, float, float, dict[str, Any]]  # an event's kind, begin and end by its host's clock, detail


class Rehearsal:
    """The events of one replica's stages, step by step."""

    def __init__(self, size: Size, hosts: bool) -> None:
        self.size = size
        self.order = build("zb", size.stages, size.microbatches)
        self.costs = uniform(size.stages, *(size.operation_ms,) * 3)
        self._timeline = simulate(self.order, self.costs)
        self._random = random.Random(0)
        self._clocks = [
            (self._random.uniform(-_APART_S, _APART_S), self._random.gauss(0.0, _DRIFT)) for _ in range(size.stages)
        ]
        self._hosts = hosts
        self.names = [f"host{stage}" if hosts else "host" for stage in range(size.stages)]
        self._now_s = 1.7e9

    @property
    def step_ms(self) -> float:
        return self._timeline.makespan_ms

    def step(self, number: int) -> list[list[Written]]:
        """By stage."""
        begin_s, draw = self._now_s, self._random
        self._now_s += self.step_ms * 1e-3

        def at(stage: int, ms: float) -> float:
            offset_s, drift = self._clocks[stage] if self._hosts else (0.0, 0.0)
            return begin_s + ms * 1e-3 + offset_s + drift * (begin_s - 1.7e9)

        found: list[list[Written]] = [[] for _ in range(self.size.stages)]
        for stage, spans in enumerate(self._timeline.spans):
            for span in spans:
                end_ms = span.start_ms + (span.end_ms - span.start_ms) * (1 + draw.gauss(0.0, _NOISE))
                for each in operations_of(span.entry):
                    detail = {"op": each.op.value, "chunk": each.chunk, "microbatch": each.microbatch}
                    found[stage].append((Kind.OPERATION, at(stage, span.start_ms), at(stage, end_ms), detail))
        for message in self._timeline.messages:
            each = message.operation
            lane, chunk = ("F", each.chunk + 1) if each.op is Op.F else ("B", each.chunk - 1)
            tag = f"g1.s{number}.c{chunk}.m{each.microbatch}.{lane}"
            sent_s = at(message.source, message.ready_ms)
            arrived_s = at(message.target, message.arrive_ms + draw.expovariate(20.0))
            found[message.source].append((Kind.SEND, sent_s, sent_s, {"tag": tag, "bytes": 1000}))
            stamps = {"tag": tag, "bytes": 1000, "sent_s": sent_s, "arrived_s": arrived_s, "needed_s": arrived_s}
            found[message.target].append((Kind.RECV, sent_s, arrived_s, stamps))
        return found


class Loop:
    """The loop of one replica, all in this thread, with the time of each part."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        stages = rehearsal.size.stages
        self._rehearsal, self._end_s = rehearsal, 0.0
        self._records = [FlightRecord(f"r0.pp{stage}", clock=lambda: self._end_s) for stage in range(stages)]
        self._collectors = [StampCollector(f"r0.pp{stage}", name) for stage, name in enumerate(rehearsal.names)]
        for record, collector in zip(self._records, self._collectors, strict=True):
            record.attach(collector)
        self._costs = ReplicaCosts(stages)
        self._policy = OrderPolicy(rehearsal.order, Adaptation(), 0)
        self._base = uniform(stages).split(rehearsal.order.placement)
        self.spent_ms: defaultdict[str, list[float]] = defaultdict(list)

    def follow(self, number: int, events: Sequence[Sequence[Written]]) -> list[str]:
        """What all ranks but the leader do for a step, and send."""
        texts = []
        for stage in range(1, len(events)):
            times = self._measured(stage, number, events[stage], "follower")
            with self._timed("follower: text"):
                texts.append(times.to_json())
        return texts

    def lead(self, number: int, judged: bool, events: Sequence[Written], texts: Sequence[str]) -> None:
        """What the leader does for a step, with what the others sent."""
        times = self._measured(0, number, events, "leader")
        with self._timed("leader: estimates"):
            self._costs.add(times)
            for text in texts:
                self._costs.add(RankTimes.from_json(text))
        if judged:
            self._judge(number)

    def _measured(self, stage: int, number: int, events: Sequence[Written], side: str) -> RankTimes:
        record, collector = self._records[stage], self._collectors[stage]
        with self._timed(f"{side}: stamps"):
            for kind, begin_s, end_s, detail in events:
                self._end_s = end_s
                record.write(kind, begin_s=begin_s, step=number, **detail)
            collector.mark(number)
        with self._timed(f"{side}: summary"):
            times = collector.take(number)
        assert times is not None
        return times

    def _judge(self, number: int) -> None:
        with self._timed("leader: judgement"):
            measured = self._costs.estimates()
            if measured is None or measured.lacking():
                return
            observed = CostEstimate(measured.costs(base=self._base), measured.spread(base=self._base))
            decision = self._policy.observed(number, observed)
        if isinstance(decision, Ask):  # answered by another process, beside the training
            self._policy.answered(number, judge(decision.question))

    def _timed(self, part: str) -> _Timed:
        return _Timed(self.spent_ms[part])


class _Timed:
    """Adds the thread's processor time inside it to a list, in ms."""

    def __init__(self, spent_ms: list[float]) -> None:
        self._spent_ms = spent_ms

    def __enter__(self) -> None:
        self._begin_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._spent_ms.append((time.thread_time() - self._begin_s) * 1e3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", default="4x8@3.7", help="the pipeline, as STAGESxMICROBATCHES@MS (default: steps of about 100 ms)"
    )
    parser.add_argument("--steps", type=int, default=600, help="steps over which processor time is measured")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks of steps, with and without the loop; 0: none")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    size = Size.parse(args.size)
    if args.steps <= WARM_UP or args.pairs < 0 or args.pairs == 1:
        raise ConfigError("--steps", args.steps, f"must be above {WARM_UP}, and --pairs 0 or at least 2")
    found: dict[str, dict[str, Any]] = {}
    for name, hosts in (("one host", False), ("several hosts", True)):
        found[name] = _processor_ms(size, hosts, args.steps)
    step_ms = Rehearsal(size, False).step_ms
    print(f"adapting_cost: processor time per step of {step_ms:.0f} ms, {size}")
    for name, parts in found.items():
        print(f"  {name}:")
        for part, ms in parts.items():
            print(f"    {part:24} {ms:.3f} ms  {ms / step_ms:.2%}")
    figures: dict[str, Spread] = {}
    pairs: dict[str, Any] = {}
    if args.pairs:
        ratios = _pairs(size, args.pairs)
        figures["time with the loop / without"] = Spread.of(ratios)
        middle = median(ratios)
        half = interval_of_median(stdev(ratios), len(ratios))
        pairs = {"ratios": ratios, "median": middle, "interval": [middle - half, middle + half]}
        print(f"  with the loop / without: {middle:.4f}, 95% from {middle - half:.4f} to {middle + half:.4f}")
    settings = {"size": args.size, "steps": args.steps, "pairs": args.pairs}
    more = {"step_ms": step_ms, "budget_ms": BUDGET * step_ms, "parts_ms": found, "pairs": pairs}
    write(args.json, "adapting_cost", settings, figures, **more)
    return 0


def _processor_ms(size: Size, hosts: bool, steps: int) -> dict[str, float]:
    """Of a step, by part and in all: medians of the calls, the judgement by how often it is made."""
    rehearsal = Rehearsal(size, hosts)
    loop, every = Loop(rehearsal), _judged_every(rehearsal)
    for number in range(1, steps + 1):
        if number == WARM_UP:
            loop.spent_ms.clear()
        events = rehearsal.step(number)
        loop.lead(number, number % every == 0, events[0], loop.follow(number, events))
    parts = {part: median(spent_ms) for part, spent_ms in sorted(loop.spent_ms.items())}
    parts["leader: judgement"] /= every
    for side in ("leader", "follower"):
        parts[f"{side}, in all"] = sum(ms for part, ms in parts.items() if part.startswith(f"{side}:"))
    return parts


def _judged_every(rehearsal: Rehearsal) -> int:
    """Steps from one judgement to the next."""
    return max(1, round(CALM_S * 1e3 / rehearsal.step_ms))


def _pairs(size: Size, pairs: int) -> list[float]:
    """Time of a block of steps with the leader's part of the loop by that of one without; each side is first in turn."""
    rehearsal = Rehearsal(size, True)
    loop, every, work = Loop(rehearsal), _judged_every(rehearsal), _work(rehearsal.step_ms)
    step = 0

    def block_s(with_loop: bool) -> float:
        nonlocal step
        spent_s = 0.0
        for _ in range(BLOCK):
            step += 1
            events = rehearsal.step(step)
            texts = loop.follow(step, events) if with_loop else []
            begin_s = time.perf_counter()
            work()
            if with_loop:
                loop.lead(step, step % every == 0, events[0], texts)
            spent_s += time.perf_counter() - begin_s
        return spent_s

    block_s(True)
    ratios = []
    for pair in range(pairs):
        first = bool(pair % 2)
        one, other = block_s(first), block_s(not first)
        ratios.append(one / other if first else other / one)
    return ratios


def _work(step_ms: float) -> Callable[[], None]:
    """Computes, always as much, for about so long on an idle machine."""
    matrix = torch.rand(128, 128)

    def times(count: int) -> float:
        begin_s = time.thread_time()
        for _ in range(count):
            torch.mm(matrix, matrix)
        return (time.thread_time() - begin_s) * 1e3

    times(100)
    count = max(1, round(step_ms / (times(1000) / 1000)))

    def work() -> None:
        times(count)

    return work
