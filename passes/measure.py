"""Measure: how long operators take on this device, alone and together.

In: nodes of a graph, or anything callable; all ranks measure at the same time, as they compute at the same time. Out:
the `typical` time of several runs in microseconds, the slowest rank's for communication. A CPU is timed by its clock, a
GPU by events on the current stream, and communication runs on the stream its backend has for it.

DHelix, section 3.2: the overlap effectiveness factor of a pair. What is shorter is repeated until both take about as
long, and each round measures both alone and together, so that a machine that gets slower meanwhile does it to all three.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from helixrt.passes.ranks import Ranks
from helixrt.passes.samples import Arguments, samples

COLD_BYTES = 64 << 20  # of arguments used in turn: more than caches hold
PER_OPERATOR_US = 20_000.0
ROUNDS = (5, 25)  # fewest and most, of operators alone
PAIR_ROUNDS = 9
RESOLUTION_US = {"cpu": 20.0, "cuda": 500.0}  # what is shorter is run several times between two looks at the clock


class Operation:
    """One operator with arguments, to be run again and again."""

    def __init__(self, target: Callable[..., Any], arguments: Sequence[Arguments]) -> None:
        self.target, self.arguments, self.turn = target, arguments, 0

    @staticmethod
    def of(node: fx.Node, cold_bytes: int = COLD_BYTES) -> Operation:
        """Of a graph's node. Raises ValueError for what no arguments can be made for."""
        if not callable(node.target):
            raise ValueError(f"{node} ({node.op}) calls nothing")
        return Operation(node.target, samples(node, cold_bytes))

    def __call__(self) -> Any:
        self.turn = (self.turn + 1) % len(self.arguments)
        positional, keyword = self.arguments[self.turn]
        return self.target(*positional, **keyword)


@dataclass(frozen=True, slots=True)
class Together:
    """A pair, measured: each alone (`first` repeated `repeats` times) and both started together; slowest rank's."""

    first_us: float
    second_us: float
    together_us: float
    repeats: int = 1

    @property
    def effectiveness(self) -> float:
        """DHelix, equation (1): 1 when the shorter one is wholly hidden, 0 when it is not at all."""
        return (self.first_us + self.second_us - self.together_us) / min(self.first_us, self.second_us)


@runtime_checkable
class Pending(Protocol):
    """Something started, that is not a collective."""

    def wait(self) -> None: ...


class Stopwatch:
    """Times on one device, on all ranks at once."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self.device, self.ranks = device, ranks
        self.on_gpu = device.type == "cuda"

    def span_us(self, run: Callable[[], Any]) -> float:
        """One run, from an idle device until all it started is done."""
        if not self.on_gpu:
            began = time.perf_counter_ns()
            run()
            return (time.perf_counter_ns() - began) / 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def work_us(self, run: Callable[[], Any]) -> float:
        """As `span_us`; of one processor thread the time it works, without what other programs take of its core."""
        if self.on_gpu or torch.get_num_threads() > 1:
            return self.span_us(run)
        began = time.thread_time_ns()
        run()
        return (time.thread_time_ns() - began) / 1e3

    def compute_us(self, operation: Callable[[], Any]) -> float:
        """Time of a compute operator on this rank."""
        self.work_us(operation)
        once = max(self.work_us(operation), 0.1)
        inner = max(1, math.ceil(RESOLUTION_US[self.device.type] / once))
        rounds = min(max(int(PER_OPERATOR_US / (once * inner)), ROUNDS[0]), ROUNDS[1])
        return typical(self.work_us(repeated(operation, inner)) / inner for _ in range(rounds))

    def collective_us(self, operation: Callable[[], Any]) -> tuple[float, float]:
        """Time of a collective from launch to completion, and of the processor's work for it (0 on a GPU).

        The processor's work is what all threads of this process do meanwhile: the backend's own ones do most of it.
        """
        for _ in range(2):
            finish(operation())
        once = self.ranks.maxima([typical(self._collective(operation)[0] for _ in range(3))])[0]
        rounds = min(max(int(4 * PER_OPERATOR_US / max(once, 1.0)), ROUNDS[0]), ROUNDS[1])
        taken = [self._collective(operation) for _ in range(rounds)]
        span = typical(t for t, _ in taken)
        work = 0.0 if self.on_gpu else typical(w for _, w in taken)
        span, work = self.ranks.maxima([span, work])
        return span, min(work, span)

    def together(self, first: Callable[[], Any], second: Callable[[], Any], repeats: int = 1) -> Together:
        """`second` launched, and `first` run `repeats` times before it is waited for.

        Both may be collectives, in different groups; what else `second` does it starts and gives as `Pending`.
        """
        many = repeated(first, repeats)

        def alone_first() -> None:
            finish(many())

        def alone_second() -> None:
            finish(second())

        def both() -> None:
            launched = second()
            finish(many())
            finish(launched)

        taken: list[list[float]] = [[], [], []]
        for warm_up in range(PAIR_ROUNDS + 1):
            for times, run in zip(taken, (alone_first, alone_second, both), strict=True):
                self.ranks.meet()
                span = self.span_us(run)
                if warm_up:
                    times.append(span)
        alone, other, paired = self.ranks.maxima([typical(times) for times in taken])
        return Together(alone, other, paired, repeats)

    def _collective(self, operation: Callable[[], Any]) -> tuple[float, float]:
        self.ranks.meet()
        worked = time.process_time_ns()
        span = self.span_us(lambda: finish(operation()))
        return span, (time.process_time_ns() - worked) / 1e3


def repeated(operation: Callable[[], Any], times: int) -> Callable[[], Any]:
    """Runs it that often and gives the last result."""
    if times == 1:
        return operation

    def run() -> Any:
        for _ in range(times - 1):
            operation()
        return operation()

    return run


def typical(values: Iterable[float]) -> float:
    """The mean of the faster half: other programs only ever make an operator slower, and the fastest run may be luck."""
    found = sorted(values)
    return statistics.fmean(found[: (len(found) + 1) // 2])


def finish(result: Any) -> None:
    """Wait for what was started: collectives, by their results, or something `Pending`; anything else is done already."""
    if isinstance(result, list | tuple):
        for each in result:
            finish(each)
    elif isinstance(result, torch.Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
    elif isinstance(result, Pending):
        result.wait()
