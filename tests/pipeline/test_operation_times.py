"""Times of operations on a device: durations by its clock, placed by what the host knows of when they were queued."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.operation_times import DeviceTimes
from helixrt.pipeline.program import compile_program
from helixrt.pipeline.stage import AutogradStage, StageChunk, Task
from helixrt.record import Event, FlightRecord, Kind
from helixrt.schedule.generators.classic import one_f_one_b

OFFSET_S = 1234.5  # of the device's clock


@dataclass
class Simulated:
    """A host that queues and a device that works through it; both clocks are numbers."""

    now_s: float = 100.0
    free_s: float = 0.0  # when the device has done all that is queued

    def work(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.now_s) + seconds

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self)


class SimulatedEvent:
    def __init__(self, simulated: Simulated) -> None:
        self._simulated, self.at_s = simulated, 0.0

    def record(self) -> None:
        self.at_s = self._simulated.free_s = max(self._simulated.free_s, self._simulated.now_s)

    def query(self) -> bool:
        return self.at_s <= self._simulated.now_s

    def synchronize(self) -> None:
        self._simulated.now_s = max(self._simulated.now_s, self.at_s)

    def elapsed_time(self, end_event: Any) -> float:
        assert self.query() and end_event.query(), "CUDA has no time of an event that has not passed"
        return 1e3 * ((end_event.at_s + OFFSET_S) - (self.at_s + OFFSET_S))


def test_durations_are_those_of_the_device_and_nothing_is_waited_for(seed: int) -> None:
    rng, simulated = random.Random(seed), Simulated()
    record = FlightRecord("pp0", clock=lambda: simulated.now_s)
    times = DeviceTimes(record, simulated.event)
    entries = compile_program(one_f_one_b(1, 6), 0).entries
    took: list[tuple[float, float]] = []
    for step in range(4):
        record.step = step
        simulated.work(0.5)  # of an update that was queued before
        times.begin_pass()
        for number, entry in enumerate(entries):
            simulated.now_s += rng.uniform(1e-5, 1e-3)
            if number == 3:
                simulated.now_s = max(simulated.now_s, simulated.free_s) + 0.01  # a message that comes late: the device is idle
            begun = times.begin()
            begin_s = simulated.free_s
            simulated.now_s += 1e-4
            simulated.work(rng.uniform(0.001, 0.05))
            if number == 1:
                # a busy host: the device is idle before the end
                simulated.now_s = max(simulated.now_s, simulated.free_s) + 0.005
            before_s = simulated.now_s
            times.end(begun, entry)
            times.write_passed()
            assert simulated.now_s == before_s
            took.append((begin_s, simulated.free_s))
        simulated.now_s = simulated.free_s + 0.02
    times.write_passed()
    events = [event for event in record.events() if event.kind is Kind.OPERATION]
    assert [event.step for event in events] == [step for step in range(4) for _ in entries]
    each = len(entries)
    for number, (event, (begin_s, end_s)) in enumerate(zip(events, took, strict=True)):
        assert event.end_s - event.begin_s == pytest.approx(end_s - begin_s, abs=1e-6)
        assert event.begin_s <= begin_s + 1e-6, "never later than it was"
        if number % each >= 1:
            assert event.begin_s == pytest.approx(begin_s, abs=1e-6), "exact once the device was idle"


def test_an_injected_slowdown_waits_for_the_device() -> None:
    simulated = Simulated()
    times = DeviceTimes(FlightRecord("pp0", clock=lambda: simulated.now_s), simulated.event)
    simulated.work(0.5)
    times.wait()
    assert simulated.now_s >= 100.5


# ---------------------------------------------------------------- on a real device


class Synchronised(AutogradStage):
    """Measures each operation by the host's clock, with the device idle before and after it."""

    def __init__(self, chunks: Mapping[int, StageChunk]) -> None:
        super().__init__(chunks)
        self.taken_s: defaultdict[str, list[float]] = defaultdict(list)

    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        op = tasks[0].op.value
        torch.cuda.synchronize()
        begun = time.perf_counter()
        results = super().compute(tasks, buckets)
        torch.cuda.synchronize()
        self.taken_s[op].append(time.perf_counter() - begun)
        return results


@pytest.mark.gpu
def test_times_of_a_device_are_those_of_a_synchronised_measurement() -> None:
    device, width, count = torch.device("cuda", 0), 4096, 6
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))).to(device)
    chunks = {0: StageChunk(module, nn.functional.mse_loss, first=True)}
    x = torch.randn(count, width, width, device=device).unbind(0)
    program, buckets = compile_program(one_f_one_b(1, count), 0), GradientBuckets({0: module}, 1 << 30)
    synchronised = Synchronised(chunks)
    began_s = time.time()
    events: list[Event] = []
    calls_s = 0.0
    for stage in (AutogradStage(chunks), synchronised, AutogradStage(chunks)):  # the first one warms up
        record = FlightRecord("pp0")
        executor = Executor(stage, {}, x[0], record, device=device)
        buckets.begin(lambda bucket: None)
        call_s = time.perf_counter()
        executor.run(program, x, x, buckets, generation=0, step=0)
        calls_s = time.perf_counter() - call_s
        torch.cuda.synchronize()
        executor.times.write_passed()
        events = [event for event in record.events() if event.kind is Kind.OPERATION]
    assert len(events) == 2 * count
    for op, taken_s in synchronised.taken_s.items():
        found = statistics.median(event.end_s - event.begin_s for event in events if event.detail["op"] == op)
        assert 0.5 * min(taken_s) <= found <= 2.0 * max(taken_s), op
    assert began_s <= events[0].begin_s and events[-1].end_s <= time.time() + 0.001
    ordered = [moment for event in events for moment in (event.begin_s, event.end_s)]
    assert ordered == sorted(ordered), "one after the other"
    assert calls_s < sum(event.end_s - event.begin_s for event in events), "the host did not wait for each"
