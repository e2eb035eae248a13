"""Measure: how long operators take on this device, alone and together.

In: nodes of a graph, or anything callable; all ranks measure at the same time, as they compute at the same time. Out:
a low
quantile of several runs in microseconds, the slowest rank's for communication; measured again while they differ, and marked
where they still do. A CPU is timed by its clock, a
GPU by events on the current stream, and communication runs on the stream its backend has for it.

DHelix, section 3.2: the overlap effectiveness factor of a pair. What is shorter is repeated until both take about as
long, and each round measures both alone and together, so that a machine that gets slower meanwhile does it to all three.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from helixrt.passes.classify import Time
from helixrt.passes.ranks import Ranks
from helixrt.passes.samples import Arguments, samples

COLD_BYTES = 64 << 20  # of arguments used in turn: more than caches hold
PER_OPERATOR_US = 20_000.0
ROUNDS = (8, 25)  # fewest and most, of operators alone
PAIR_ROUNDS = 9
LOW, HIGH = 0.2, 0.8  # the quantile that counts, and the one it is compared with
SPREAD, COLLECTIVE_SPREAD = 0.3, 1.0  # of the high quantile above the low one, as a share; where more, the machine is busy
WINDOWS, COLLECTIVE_WINDOWS, PAIR_WINDOWS = 6, 3, 2  # most, of runs after one another
PAUSE_S = 0.02  # before measuring again: what disturbed may be over then
PATIENCE_S = 30.0
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
    """A pair, measured: each alone (`first` repeated `repeats` times) and both started together; slowest rank's.

    Not `steady` where the machine was too busy to tell.
    """

    first_us: float
    second_us: float
    together_us: float
    repeats: int = 1
    steady: bool = True

    @property
    def effectiveness(self) -> float:
        """DHelix, equation (1): 1 when the shorter one is wholly hidden, 0 when it is not at all."""
        return (self.first_us + self.second_us - self.together_us) / min(self.first_us, self.second_us)


@runtime_checkable
class Pending(Protocol):
    """Something started, that is not a collective."""

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Roof:
    """What an operator can take at least, by the device's rates, and what it should not exceed without a second look."""

    least_us: float
    most_us: float

    def holds(self, time_us: float) -> bool:
        return self.least_us <= time_us <= self.most_us


NO_ROOF = Roof(0.0, math.inf)


@dataclass(frozen=True, slots=True)
class Window:
    """Several runs after one another: a low quantile of their times, how far the high one is above it (a share of it), and
    whether most of them were interrupted by other programs."""

    low_us: float
    spread: float
    interrupted: bool = False

    @staticmethod
    def of(taken: Sequence[float], interrupted: Sequence[bool] = ()) -> Window:
        """Interrupted runs do not count, as long as enough others are left."""
        kept = [time for time, bad in zip(taken, interrupted, strict=False) if not bad] or list(taken)
        busy = bool(interrupted) and 2 * len(kept) < len(taken) or all(interrupted or [False])
        kept = list(taken) if busy else kept
        low = low_quantile(kept)
        return Window(low, (_quantile(kept, HIGH) - low) / max(low, 1e-9), busy)


class Stopwatch:
    """Times on one device, on all ranks at once. `patience_s` bounds what measuring again may take in all."""

    def __init__(self, device: torch.device, ranks: Ranks, patience_s: float = PATIENCE_S) -> None:
        self.device, self.ranks, self.patience_s = device, ranks, patience_s
        self.on_gpu = device.type == "cuda"

    def span_us(self, run: Callable[[], Any]) -> float:
        """One run, from an idle device until all it started is done."""
        if not self.on_gpu:
            began = time.perf_counter_ns()
            run()
            return (time.perf_counter_ns() - began) / 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.device)  # that of another device may be current
        torch.cuda.synchronize(self.device)
        start.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def work_us(self, run: Callable[[], Any]) -> float:
        """As `span_us`; of one processor thread the time it works, without what other programs take of its core."""
        if self.on_gpu or torch.get_num_threads() > 1:
            return self.span_us(run)
        began = time.thread_time_ns()
        run()
        return (time.thread_time_ns() - began) / 1e3

    def compute(self, operation: Callable[[], Any], roof: Roof = NO_ROOF) -> Time:
        """Time of a compute operator on this rank; not steady where the machine was too busy to tell.

        Measured in windows until one is quiet: its runs agree, other programs did not interrupt them, and the roof holds.
        A time beyond the roof is steady only if all windows agree on it: then the operator is slow, not the machine. One that
        is not steady is given within the roof's bounds.
        """
        windows = [self._window(operation)]
        while not steady(windows, roof) and len(windows) < WINDOWS and self.patience_s > 0:
            began = time.monotonic()
            time.sleep(PAUSE_S)
            windows.append(self._window(operation))
            self.patience_s -= time.monotonic() - began
        low = min(window.low_us for window in windows)
        if steady(windows, roof):
            return Time(low)
        return Time(min(max(low, roof.least_us), roof.most_us), steady=False)

    def _window(self, operation: Callable[[], Any]) -> Window:
        self.work_us(operation)
        once = max(self.work_us(operation), 0.1)
        inner = max(1, math.ceil(RESOLUTION_US[self.device.type] / once))
        rounds = min(max(int(PER_OPERATOR_US / (once * inner)), ROUNDS[0]), ROUNDS[1])
        by_the_wall = not self.on_gpu and torch.get_num_threads() > 1  # else what others take is not counted
        taken, interrupted = [], []
        for _ in range(rounds):
            before = interruptions()
            taken.append(self.work_us(repeated(operation, inner)) / inner)
            interrupted.append(by_the_wall and interruptions() > before)
        return Window.of(taken, interrupted)

    def collective(self, operation: Callable[[], Any]) -> Time:
        """Time of a collective from launch to completion, and of the processor's work for it (0 on a GPU).

        The processor's work is what all threads of this process do meanwhile: the backend's own ones do most of it.
        Ranks take the slowest one's figures, and so agree on when to measure again.
        """
        for _ in range(2):
            finish(operation())
        once = self.ranks.maxima([low_quantile([self._collective(operation)[0] for _ in range(3)])])[0]
        rounds = min(max(int(4 * PER_OPERATOR_US / max(once, 1.0)), ROUNDS[0]), ROUNDS[1])
        windows: list[Window] = []
        works: list[float] = []
        while not windows or (windows[-1].spread > COLLECTIVE_SPREAD and len(windows) < COLLECTIVE_WINDOWS):
            taken = [self._collective(operation) for _ in range(rounds)]
            own = Window.of([span for span, _ in taken])
            work = 0.0 if self.on_gpu else low_quantile([work for _, work in taken])
            low_us, spread, work = self.ranks.maxima([own.low_us, own.spread, work])
            windows.append(Window(low_us, spread))
            works.append(work)
        best = min(windows, key=lambda window: window.low_us)
        return Time(best.low_us, min(min(works), best.low_us), steady=windows[-1].spread <= COLLECTIVE_SPREAD)

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

        found: list[tuple[float, Together]] = []
        while not found or (found[-1][0] > COLLECTIVE_SPREAD and len(found) < PAIR_WINDOWS):
            taken: list[list[float]] = [[], [], []]
            for warm_up in range(PAIR_ROUNDS + 1):
                for times, run in zip(taken, (alone_first, alone_second, both), strict=True):
                    self.ranks.meet()
                    span = self.span_us(run)
                    if warm_up:
                        times.append(span)
            windows = [Window.of(times) for times in taken]
            spread, *lows = self.ranks.maxima([max(w.spread for w in windows), *(w.low_us for w in windows)])
            found.append((spread, Together(lows[0], lows[1], lows[2], repeats, steady=spread <= COLLECTIVE_SPREAD)))
        return min(found, key=lambda each: each[0])[1]

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


def quiet(window: Window) -> bool:
    return window.spread <= SPREAD and not window.interrupted


def steady(windows: Sequence[Window], roof: Roof) -> bool:
    """Whether the lowest time of the windows can be trusted; see `Stopwatch.compute`."""
    low = min(window.low_us for window in windows)
    trusted = [window for window in windows if quiet(window) and window.low_us <= (1.0 + SPREAD) * low]
    if roof.holds(low):
        return bool(trusted)
    return low > roof.most_us and len(trusted) == len(windows) == WINDOWS


def interruptions() -> int:
    """How often other programs have taken a processor from this process's threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def low_quantile(values: Sequence[float]) -> float:
    """Below which a fifth of the values lie: other programs only ever make an operator slower, and the fastest run may be
    luck."""
    return _quantile(values, LOW)


def _quantile(values: Sequence[float], share: float) -> float:
    found = sorted(values)
    return found[round(share * (len(found) - 1))]


def finish(result: Any) -> None:
    """Wait for what was started: collectives, by their results, or something `Pending`; anything else is done already."""
    if isinstance(result, list | tuple):
        for each in result:
            finish(each)
    elif isinstance(result, torch.Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
    elif isinstance(result, Pending):
        result.wait()
