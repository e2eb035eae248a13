"""The executor runs every valid schedule, and refuses the others: random ones, of any placement and order, whole and
split backwards, pairs; by autograd, and by graphs with W apart and pairs woven.

Stages are threads. Most runs go over channels in memory that check what the executor claims: a send that it waits for
in a step has been taken in already. Some go over Gloo and over endpoints.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import Channel, RecvHandle, SendHandle, Tag
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.graph_stage import Example, GraphStage
from helixrt.pipeline.program import Transfer, compile_program, given, whole_backwards
from helixrt.pipeline.stage import AutogradStage, Stage, StageChunk
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.check import check
from helixrt.schedule.generators.classic import build
from helixrt.schedule.generators.evaluation import forward_only
from helixrt.schedule.ir import (
    Entry,
    Op,
    Operation,
    Pair,
    Schedule,
    ScheduleError,
    folded,
    interleaved,
    linear,
    needs,
    operations_of,
    provides,
)
from helixrt.schedule.simulate import DELEGATED, Direct
from helixrt.transport.contract import Endpoint

DIM, ROWS = 5, 3
DEADLINE_S = 60.0


def random_placement(rng: random.Random) -> tuple[int, ...]:
    stages = rng.randint(1, 4)
    scattered = [*range(stages), *(rng.randrange(stages) for _ in range(rng.randint(0, 4)))]
    rng.shuffle(scattered)
    return rng.choice([linear(stages), interleaved(stages, rng.randint(2, 3)), folded(stages), tuple(scattered)])


def random_schedule(rng: random.Random, microbatches: int) -> Schedule:
    """Stages drawn at random do something drawn at random that could begin, until all is done."""
    placement = random_placement(rng)
    stages, chunks = max(placement) + 1, len(placement)
    every = [(c, m) for c in range(chunks) for m in range(microbatches)]
    left = {Operation(Op.F, c, m) for c, m in every}
    whole = rng.choice([0.0, 0.5, 1.0])
    for c, m in every:
        left |= {Operation(op, c, m) for op in ((Op.BW,) if rng.random() < whole else (Op.B, Op.W))}
    draft = Schedule("random", stages, microbatches, placement, ((),) * stages)
    entries: list[list[Entry]] = [[] for _ in range(stages)]
    done: set[Operation] = set()
    forwards_first = rng.random()
    while left:
        ready = sorted((o for o in left if all(n in done for n in needs(draft, o))), key=str)
        chosen: Entry = rng.choice(ready)
        if rng.random() < forwards_first:
            chosen = rng.choice([o for o in ready if o.op is Op.F] or ready)
        stage = placement[operations_of(chosen)[0].chunk]
        here = [o for o in ready if placement[o.chunk] == stage]
        forwards, backwards = ([o for o in here if o.op in ops] for ops in ((Op.F,), (Op.B, Op.BW)))
        if forwards and backwards and rng.random() < 0.5:
            chosen = Pair(rng.choice(forwards), rng.choice(backwards))
        entries[stage].append(chosen)
        left -= set(operations_of(chosen))
        done |= {r for o in operations_of(chosen) for r in provides(o)}
    schedule = Schedule("random", stages, microbatches, placement, tuple(map(tuple, entries)))
    check(schedule)
    return schedule


# Channels in memory


@dataclass
class Delivery:
    """One message: there, and taken in."""

    there: threading.Event = field(default_factory=threading.Event)
    taken: threading.Event = field(default_factory=threading.Event)
    tensor: torch.Tensor | None = None


class Mail:
    """All messages of a step, by sender, receiver and tag."""

    def __init__(self) -> None:
        self._deliveries: dict[tuple[int, int, Tag], Delivery] = {}

    def __getitem__(self, key: tuple[int, int, Tag]) -> Delivery:
        return self._deliveries.setdefault(key, Delivery())


class StrictSend(SendHandle):
    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery

    def wait(self) -> None:
        assert self.delivery.taken.is_set(), "the executor would have waited for a send"


class MemoryRecv(RecvHandle):
    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery

    def wait(self) -> torch.Tensor:
        assert self.delivery.there.wait(DEADLINE_S), "deadlock"
        self.delivery.taken.set()
        assert self.delivery.tensor is not None
        return self.delivery.tensor


class MemoryChannel(Channel):
    def __init__(self, mail: Mail, stage: int, peer: int) -> None:
        self.mail, self.stage, self.peer = mail, stage, peer

    def send(self, tag: Tag, tensor: torch.Tensor) -> SendHandle:
        delivery = self.mail[self.stage, self.peer, tag]
        assert not delivery.there.is_set(), f"{tag} is sent twice"
        delivery.tensor = tensor.clone()
        delivery.there.set()
        return StrictSend(delivery)

    def recv(self, tag: Tag, like: torch.Tensor) -> RecvHandle:
        return MemoryRecv(self.mail[self.peer, self.stage, tag])

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


# The oracle and the runs


def layer(chunk: int) -> nn.Module:
    made = nn.Linear(DIM, DIM, dtype=torch.float64)
    generator = torch.Generator().manual_seed(chunk)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return nn.Sequential(made, nn.Tanh())


def data(microbatches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    both = torch.randn(2, microbatches, ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return list(both[0]), list(both[1])


def whole(chunks: int, microbatches: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    model = nn.Sequential(*map(layer, range(chunks)))
    losses = [nn.functional.mse_loss(model(x), t) for x, t in zip(*data(microbatches), strict=True)]
    (sum(losses) / microbatches).backward()
    return [x.detach() for x in losses], [[p.grad for p in part.parameters()] for part in model]


def run_on(schedule: Schedule, stage: int, channels: Mapping[int, Channel], graphs: bool, step: int = 0) -> None:
    """Run one stage of a step and of an evaluation, and check its losses, its gradients, buckets and order."""
    modules = {c: layer(c) for c in schedule.held[stage]}
    chunks = {c: StageChunk(m, nn.functional.mse_loss if c + 1 == schedule.chunks else None) for c, m in modules.items()}
    schedule = schedule if graphs else whole_backwards(schedule)
    program = compile_program(schedule, stage)
    computing: Stage = AutogradStage(chunks)
    if graphs:
        x = torch.empty(ROWS, DIM, dtype=torch.float64)
        computing = GraphStage(chunks, {c: Example(x, x if chunks[c].loss else None) for c in chunks})
        computing.prepare(program)
    buckets = GradientBuckets(modules, bucket_bytes=8)
    handed: list[int] = []
    buckets.begin(handed.append)
    record = FlightRecord(f"pp{stage}")
    executor = Executor(computing, channels, torch.empty(ROWS, DIM, dtype=torch.float64), record)
    inputs, targets = data(schedule.microbatches)
    losses, grads = whole(schedule.chunks, schedule.microbatches)
    losses = losses if schedule.chunks - 1 in modules else []
    got = executor.run(program, inputs, targets, buckets, generation=0, step=step)
    torch.testing.assert_close(got, losses, rtol=1e-12, atol=0)
    for chunk, module in modules.items():
        torch.testing.assert_close([p.grad for p in module.parameters()], grads[chunk], rtol=1e-11, atol=1e-12)
    assert handed == list(reversed(range(len(buckets.flat))))
    ran = [(e.detail["op"], e.detail["chunk"], e.detail["microbatch"]) for e in record.events() if e.kind is Kind.OPERATION]
    assert ran == [(o.op.value, o.chunk, o.microbatch) for o in schedule.operations(stage)]
    evaluation = compile_program(forward_only(schedule.placement, schedule.microbatches), stage)
    got = executor.run(evaluation, inputs, targets, None, generation=0, step=step + 1)
    torch.testing.assert_close(got, losses, rtol=1e-12, atol=0)


def in_memory(schedule: Schedule, graphs: bool) -> None:
    mail = Mail()
    errors: list[BaseException] = []

    def body(stage: int) -> None:
        try:
            channels = {p: MemoryChannel(mail, stage, p) for p in range(schedule.stages) if p != stage}
            run_on(schedule, stage, channels, graphs)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(s,)) for s in range(schedule.stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("graphs", [False, True], ids=["autograd", "graphs"])
def test_random_schedules_give_the_whole_models_gradients(seed: int, graphs: bool, captured_once: None) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        schedule = random_schedule(rng, rng.randint(1, 5))
        try:
            in_memory(schedule, graphs)
        except BaseException as error:
            error.add_note(f"{schedule.placement}: " + " | ".join(" ".join(map(schedule.label, e)) for e in schedule.entries))
            raise


def three_stages(rng: random.Random) -> list[Schedule]:
    return [s for s in (random_schedule(rng, rng.randint(2, 6)) for _ in range(60)) if s.stages == 3]


def test_random_schedules_over_real_channels(any_stages: Any, seed: int, captured_once: None) -> None:
    """Many schedules in turn over the same channels: nothing of one is taken for another's."""
    schedules = three_stages(random.Random(seed))

    def body(stage: int, channels_of: Any) -> None:
        channels = channels_of(FlightRecord(f"pp{stage}"))
        for number, schedule in enumerate(schedules):
            run_on(schedule, stage, channels, bool(number % 2), step=2 * number)
        for channel in channels.values():
            channel.close()

    assert len(schedules) >= 5
    any_stages.run(3, body)


def test_random_schedules_under_direct_communication_and_changes_of_it(endpoint_stages: Any, seed: int) -> None:
    """Queues of one to three communications, and delegated between them: no deadlock that the order does not have."""
    rng = random.Random(seed)
    schedules = [(schedule, rng.choice([DELEGATED, Direct(1), Direct(2), Direct(3)])) for schedule in three_stages(rng)]

    def body(stage: int, endpoints: Sequence[Endpoint]) -> None:
        channels = StageChannels(endpoints, stage, 3, FlightRecord(f"pp{stage}"), host_bytes=300)
        try:
            for number, (schedule, comm) in enumerate(schedules):
                channels.use(comm)
                run_on(schedule, stage, channels.channels, graphs=False, step=2 * number)
        finally:
            channels.close()

    assert len(schedules) >= 5
    endpoint_stages.connected(3, body)


@pytest.mark.parametrize(
    "placement", [linear(4), interleaved(3), interleaved(2, 3), folded(4), folded(1), (0, 0, 1, 0)], ids=str
)
def test_evaluation_fills_the_pipeline(placement: tuple[int, ...]) -> None:
    """In units of one forward: no longer than the first micro-batch's way and the busiest stage's work."""
    schedule = forward_only(placement, 8)
    check(schedule)
    ends: dict[Operation, int] = {}
    free, at = [0] * schedule.stages, [0] * schedule.stages
    while any(at[s] < len(schedule.entries[s]) for s in range(schedule.stages)):
        for stage in range(schedule.stages):
            order = list(schedule.operations(stage))
            while at[stage] < len(order) and all(n in ends for n in needs(schedule, order[at[stage]])):
                operation = order[at[stage]]
                free[stage] = ends[operation] = 1 + max([free[stage], *(ends[n] for n in needs(schedule, operation))])
                at[stage] += 1
    assert max(free) <= 8 * max(map(len, schedule.held)) + len(placement) - 1


def test_what_cannot_be_run_is_refused_before_anything_runs() -> None:
    f, b = ([Operation(op, 0, m) for m in (0, 1)] for op in (Op.F, Op.BW))
    below = (*f, *b)
    above = tuple(Operation(o.op, 1, o.microbatch) for o in below)
    good = Schedule("good", 2, 2, linear(2), (below, above))
    assert [a.last for a in compile_program(good, 0).actions] == [False, False, False, True]
    with pytest.raises(ScheduleError, match="lacks"):
        compile_program(replace(good, entries=(below, above[:-1])), 0)
    with pytest.raises(ScheduleError, match="blocks itself"):
        compile_program(replace(good, entries=((f[0], b[0], f[1], b[1]), above)), 0)


def sent_to(schedule: Schedule, stage: int, done: int) -> set[Transfer]:
    """What the others have sent to a stage that stopped after so many entries, when all have gone as far as they can."""
    made: set[Operation] = set()
    at = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for other, entries in enumerate(schedule.entries):
            limit = done if other == stage else len(entries)
            while at[other] < limit and all(n in made for o in operations_of(entries[at[other]]) for n in needs(schedule, o)):
                made |= {r for o in operations_of(entries[at[other]]) for r in provides(o)}
                at[other] += 1
                moved = True
    sent = {given(schedule, o) for o in made if schedule.placement[o.chunk] != stage}
    return {t for t in sent if t is not None and schedule.placement[t.chunk] == stage}


def test_every_message_is_expected_as_soon_as_it_can_be_sent_and_no_sooner(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        schedule = random_schedule(rng, rng.randint(1, 5))
        for stage in range(schedule.stages):
            expected: set[Transfer] = set()
            for done, arrivals in enumerate(compile_program(schedule, stage).arrivals):
                expected |= {arrival.transfer for arrival in arrivals}
                assert expected == sent_to(schedule, stage, done), f"seed {seed}: stage {stage} after {done} of {schedule}"


class PostedChannel(MemoryChannel):
    """Counts what is expected and not taken in yet."""

    waiting = 0
    most = 0

    def recv(self, tag: Tag, like: torch.Tensor) -> RecvHandle:
        type(self).waiting += 1
        type(self).most = max(self.most, self.waiting)
        handle = super().recv(tag, like)

        class Counted(RecvHandle):
            def wait(self) -> torch.Tensor:
                PostedChannel.waiting -= 1
                return handle.wait()

        return Counted()


@pytest.mark.parametrize(("messages", "most"), [(100, 8), (3, 3), (0, 1)])
def test_what_is_expected_ahead_has_a_limit_in_bytes(messages: int, most: int) -> None:
    """All eight forwards of GPipe can come at once; with a limit only what it holds, and always what is needed next."""
    schedule = build("gpipe", 2, 8)
    mail = Mail()
    below, above = MemoryChannel(mail, 0, 1), PostedChannel(mail, 1, 0)
    PostedChannel.waiting = PostedChannel.most = 0
    boundary = torch.empty(ROWS, DIM, dtype=torch.float64)
    inputs, targets = data(8)

    def run(stage: int, channel: Channel, peer: int) -> None:
        module = layer(stage)
        chunk = StageChunk(module, nn.functional.mse_loss if stage else None)
        limit = messages * boundary.nbytes
        executor = Executor(AutogradStage({stage: chunk}), {peer: channel}, boundary, FlightRecord("r"), limit)
        buckets = GradientBuckets({stage: module}, bucket_bytes=8)
        buckets.begin(lambda bucket: None)
        executor.run(compile_program(whole_backwards(schedule), stage), inputs, targets, buckets, generation=0, step=0)

    other = threading.Thread(target=run, args=(0, below, 1))
    other.start()
    run(1, above, 0)
    other.join()
    assert PostedChannel.most == most and PostedChannel.waiting == 0
