"""One rank of `helixrt bench adaptation`: a stage whose operations sleep, behind the executor and channels of a job.

In: which stage of how many it is; then `Round`s over a pipe, the same for all ranks. Out: for each how long its steps took, and
how exact the sleeps were. Nothing is computed: what is measured is the order, the channels, and who waits for whom.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from helixrt.collectives.endpoints import Reach, open_endpoint
from helixrt.observe.stamps import RankTimes, StampCollector
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.program import compile_program
from helixrt.pipeline.stage import Stage, Task
from helixrt.record import FlightRecord
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule
from helixrt.schedule.simulate import Comm

CONNECT_S, TIMEOUT_S = 120.0, 120.0
QUEUES = 2
LEAD_S = 0.03  # between agreeing on the beginning of a step and its beginning
ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Round:
    """Run a schedule so many times, under costs whose links are delayed as they say. A message is `elements` float32."""

    schedule: Schedule
    costs: Costs
    comm: Comm
    steps: int
    elements: int = 4


@dataclass(frozen=True)
class Measured:
    """Of one rank and round: when its last operation ended after the beginning of each step; by how much its sleeps ended too
    late; processor time and wall-clock time of all steps together; what its flight record has of each step."""

    ends_ms: list[float]
    late_ms: list[float]
    processor_s: float
    clock_s: float
    times: list[RankTimes]


@dataclass
class SleepingStage(Stage):
    """Each entry takes as long as `costs` say, from when it could begin: the end of the one before, or when what it waited for
    came about (`released_s`, Unix time). So what a sleep is late by is not added up over the entries of a stage."""

    costs: Costs
    like: torch.Tensor
    released_s: Callable[[], float]
    end_s: float = 0.0
    late_s: list[float] = field(default_factory=list)

    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        operations = [Operation(task.op, task.chunk, task.microbatch) for task in tasks]
        entry: Entry = operations[0] if len(operations) == 1 else Pair(*operations)
        self.end_s = max(self.end_s, self.released_s()) + self.costs.duration_ms(entry) / 1e3
        time.sleep(max(0.0, self.end_s - time.time()))
        self.late_s.append(time.time() - self.end_s)
        return [self._result(operation) for operation in operations]

    def _result(self, operation: Operation) -> torch.Tensor | None:
        if operation.op is Op.F:
            return torch.zeros(()) if operation.chunk + 1 == self.costs.chunks else self.like.clone()
        return None if operation.op is Op.W or operation.chunk == 0 else self.like.clone()

    def reset(self) -> None:
        """Nothing is kept between a forward and its backward."""


class SleepingRank:
    """`begin_together()` gives the Unix time at which all ranks begin the next step."""

    def __init__(self, stage: int, stages: int, channels: StageChannels, begin_together: Callable[[], float]) -> None:
        self.stage, self.stages, self.channels, self.begin_together = stage, stages, channels, begin_together
        self._steps = 0
        self._collector = StampCollector(channels.record.rank, "of this machine")
        channels.record.attach(self._collector)

    def run(self, asked: Round) -> Measured:
        self.channels.use(asked.comm)
        like = torch.zeros(asked.elements)
        program = compile_program(asked.schedule, self.stage)
        chunks: dict[int, nn.Module] = {chunk: nn.Identity() for chunk in asked.schedule.held[self.stage]}
        buckets = GradientBuckets(chunks, bucket_bytes=1)
        sleeping = SleepingStage(asked.costs, like, lambda: self.channels.released_s)
        executor = Executor(sleeping, self.channels.channels, like, self.channels.record)
        nothing = [like] * asked.schedule.microbatches
        ends_ms: list[float] = []
        processor_s = clock_s = 0.0
        found: list[RankTimes] = []
        for _ in range(asked.steps):
            self._steps += 1
            self.channels.record.step = self._steps
            begin_s = sleeping.end_s = self.begin_together()
            time.sleep(max(0.0, begin_s - time.time()))
            used_s = _processor_s()
            buckets.begin(lambda bucket: None)
            executor.run(program, nothing, nothing, buckets, generation=0, step=self._steps)
            ends_ms.append((time.time() - begin_s) * 1e3)
            processor_s += _processor_s() - used_s
            clock_s += ends_ms[-1] / 1e3
            self._collector.mark(self._steps)
            if (times := self._collector.take(self._steps)) is not None:
                found.append(times)
        return Measured(ends_ms, [late * 1e3 for late in sleeping.late_s], processor_s, clock_s, found)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(stage: int, stages: int, transport: str, pipe: Connection, barrier: Any, beginning: Any) -> None:
    """A process of the benchmark: connect to the others through the parent, then answer until it sends None. `barrier` and
    `beginning` (a shared number) belong to all ranks."""
    torch.set_num_threads(1)
    delays: dict[int, float] = {}
    reach = Reach(transport=transport, heartbeat_s=None)
    endpoints = [open_endpoint(b"of this benchmark", ADDRESS, reach) for _ in range(QUEUES)]
    pipe.send([endpoint.address() for endpoint in endpoints])
    addresses: Mapping[int, list[bytes]] = pipe.recv()
    for number, endpoint in enumerate(endpoints):
        peers = {peer: each[number] for peer, each in addresses.items() if peer != stage}
        endpoint.connect(0, stage, peers, CONNECT_S)

    def delay_s(source: int, step: int) -> float:
        return delays.get(source, 0.0)

    def begin_together() -> float:
        barrier.wait(TIMEOUT_S)
        if stage == 0:
            beginning.value = time.time() + LEAD_S
        barrier.wait(TIMEOUT_S)
        return float(beginning.value)

    channels = StageChannels(endpoints, stage, stages, FlightRecord(f"r0.pp{stage}"), timeout_s=TIMEOUT_S, delay=delay_s)
    try:
        rank = SleepingRank(stage, stages, channels, begin_together)
        while (asked := pipe.recv()) is not None:
            delays.clear()
            delays.update({a: link.delay_ms / 1e3 for (a, b), link in asked.costs.links.items() if b == stage})
            pipe.send(rank.run(asked))
    finally:
        channels.close()
