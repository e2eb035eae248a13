"""A stage computed by graphs: what it keeps between operations, random operators and buffers, layers shared by ranks.

That every schedule gets the right gradients is tested with the executor and with the training engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helixrt.bench._live_storage import LiveStorage
from helixrt.collectives.gloo_groups_private import gloo_backend
from helixrt.parallel.group import Group
from helixrt.passes.pair import Rules
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import GroupChannel
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.graph_stage import Example, GraphStage
from helixrt.pipeline.program import compile_program, whole_backwards
from helixrt.pipeline.stage import AutogradStage, Stage, StageChunk, Task
from helixrt.record import FlightRecord
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Op, Schedule
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk, build_chunks
from helixrt.train.models.parallel import ParallelGroups, layouts, own_part
from tests.train.whole_tensors import reduce_gradients

ROWS, DIM, MICROBATCHES = 4, 6, 4


pytestmark = pytest.mark.usefixtures("one_thread")


class Noisy(nn.Module):
    """Draws random numbers and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(DIM, 2 * DIM), nn.BatchNorm1d(2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.dropout(F.gelu(self.norm(self.a(x))), 0.4, self.training))


def noisy_chunks(schedule: Schedule) -> dict[int, StageChunk]:
    torch.manual_seed(1)
    modules = [Noisy().double() for _ in range(schedule.chunks)]
    return {n: StageChunk(m, F.mse_loss if n + 1 == schedule.chunks else None) for n, m in enumerate(modules)}


def examples(chunks: dict[int, StageChunk], x: torch.Tensor) -> dict[int, Example]:
    return {number: Example(x, x if chunk.loss else None) for number, chunk in chunks.items()}


@pytest.mark.parametrize("policy", ["w", "zbv"])
def test_random_operators_and_buffers_are_autograds(policy: str) -> None:
    """Two chunks on one stage: masks are drawn, and buffers change, in the order of forwards, woven or not."""
    schedule = build(policy, 1, MICROBATCHES)
    x, y = torch.randn(2, MICROBATCHES, ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).unbind()
    found = []
    for graphs in (True, False):
        chunks = noisy_chunks(schedule)
        stage: Stage = AutogradStage(chunks)
        ordered = schedule if graphs else whole_backwards(schedule)
        program = compile_program(ordered, 0)
        if graphs:
            stage = GraphStage(chunks, examples(chunks, x[0]))
            stage.prepare(program)
        modules = {number: chunk.module for number, chunk in chunks.items()}
        buckets = GradientBuckets(modules, 64)
        torch.manual_seed(3)
        losses = []
        for step in range(2):  # what a step leaves, the next one finds
            buckets.begin(lambda bucket: None)
            executor = Executor(stage, {}, x[0], FlightRecord("pp0"))
            losses += executor.run(program, list(x), list(y), buckets, generation=0, step=step)
        state = [tensor for module in modules.values() for tensor in module.buffers()]
        found.append((losses, [b.clone() for b in buckets.flat], state, torch.get_rng_state()))
    (losses, gradients, state, drawn), (losses0, gradients0, state0, drawn0) = found
    torch.testing.assert_close(losses, losses0, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, gradients0, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(state, state0, rtol=1e-12, atol=0)
    assert torch.equal(drawn, drawn0)


def test_activations_are_free_after_the_last_that_needs_them() -> None:
    """A chunk in the middle: W keeps what it needs and no more; nothing but gradients outlives W; outputs are not kept."""
    config = ModelConfig(layers=6, dim=32, heads=4, ffn=64, vocab=32)
    module = build_chunk(config, 32, 1, 3)
    stage = GraphStage({1: StageChunk(module)}, {1: Example(torch.empty(2, 32, 32))})
    stage.prepare(compile_program(build("zb-h1", 3, 4), 1))
    buckets = GradientBuckets({1: module}, 1 << 20)
    buckets.begin(lambda bucket: None)

    def run(op: Op, microbatch: int) -> int:
        """What is alive when it is done, and its result gone."""
        given = None if op is Op.W else torch.randn(2, 32, 32)
        stage.compute([Task(op, 1, microbatch, given)], buckets)
        del given
        return live.now_bytes

    with LiveStorage([*module.parameters(), *buckets.flat]) as live:
        before = live.now_bytes
        one = run(Op.F, 0)
        assert one > before
        two = run(Op.F, 1)
        assert two - one == one - before
        halfway = run(Op.B, 0)
        assert one < halfway < two + (one - before), "B frees what W does not need"
        assert run(Op.W, 0) == one
        run(Op.B, 1)
        assert run(Op.W, 1) == before
        run(Op.F, 2)
        stage.reset()
        assert live.now_bytes == before, "a step that broke leaves nothing"
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.system
def test_a_woven_pair_needs_the_memory_of_its_two_graphs_in_turn() -> None:
    """Of two chunks; the backward first, as the forward's activations take the place of those it frees.

    Two tensors between chunks come on top: the forward's input is there from the start, the input's gradient to the end.
    """
    config = ModelConfig(layers=16, dim=32, heads=4, ffn=64, vocab=32)
    modules = build_chunks(config, 32, (0, 1, 1, 0), 1)
    stage = GraphStage({n: StageChunk(m) for n, m in modules.items()}, dict.fromkeys(modules, Example(torch.empty(2, 32, 32))))
    stage.prepare(compile_program(build("w", 2, 4), 1))
    buckets = GradientBuckets(dict(modules), 1 << 20)
    buckets.begin(lambda bucket: None)

    def peak(*entries: tuple[tuple[Op, int, int], ...]) -> int:
        """The most that is alive during entries run in turn, besides what was there before them."""
        before = live.peak_bytes = live.now_bytes
        for entry in entries:
            stage.compute([Task(*each, torch.randn(2, 32, 32)) for each in entry], buckets)
        return live.peak_bytes - before

    with LiveStorage([*(p for m in modules.values() for p in m.parameters()), *buckets.flat]) as live:
        woven = peak(((Op.F, 2, 0),), ((Op.F, 1, 1), (Op.BW, 2, 0)))
        in_turn = peak(((Op.F, 2, 2),), ((Op.BW, 2, 2),), ((Op.F, 1, 3),))
        forward_first = peak(((Op.F, 2, 4),), ((Op.F, 1, 5),), ((Op.BW, 2, 4),))
    between = torch.empty(2, 32, 32).nbytes
    assert woven <= 1.03 * in_turn + 2 * between < 0.8 * forward_first, (woven, in_turn, forward_first)


@pytest.mark.parametrize("policy", ["gpipe", "zb-h1"])
def test_buckets_leave_while_the_last_graph_runs_and_hooks_are_called(policy: str) -> None:
    module = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    hooked: nn.Parameter = module[1].weight
    calls: list[float] = []
    hooked.register_post_accumulate_grad_hook(lambda p: calls.append(float(p.grad.abs().sum())))
    hooked.register_hook(lambda gradient: 3 * gradient)
    stage = GraphStage({0: StageChunk(module, F.mse_loss)}, {0: Example(torch.empty(ROWS, DIM), torch.empty(ROWS, DIM))})
    program = compile_program(build(policy, 1, MICROBATCHES), 0)
    stage.prepare(program)
    buckets = GradientBuckets({0: module}, 1)
    finished: list[int] = []
    finish = buckets.finish
    seen: list[int] = []
    buckets.finish = lambda chunk: (finished.extend(seen), finish(chunk))[1]  # type: ignore[method-assign]
    x, y = torch.randn(2, MICROBATCHES, ROWS, DIM).unbind()
    buckets.begin(seen.append)
    executor = Executor(stage, {}, x[0], FlightRecord("pp0"))
    losses = executor.run(program, list(x), list(y), buckets, generation=0, step=0)
    assert seen == list(reversed(range(8))) and len(finished) >= 4, "most left before the end"
    assert len(calls) == MICROBATCHES
    plain = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    plain.load_state_dict(module.state_dict())
    expected = torch.stack([F.mse_loss(plain(a), b) for a, b in zip(x, y, strict=True)])
    expected.mean().backward()
    torch.testing.assert_close(torch.stack(losses), expected.detach())
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad * (3 if one is hooked else 1))


# ------------------------------------------------------------------------------------------------ ranks


SHARED = ModelConfig(layers=4, dim=8, heads=2, kv_heads=2, ffn=12, vocab=17, family="llama")
STAGES, SEQ = 2, 6


def tokens() -> torch.Tensor:
    return torch.randint(0, SHARED.vocab, (2 * MICROBATCHES, SEQ + 1), generator=torch.Generator().manual_seed(4))


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train_shared_stages(policy: str) -> None:
    """On one of two ranks that share every layer: both stages, each a thread with groups of its own."""
    schedule = build(policy, STAGES, MICROBATCHES)
    whole = build_chunk(SHARED, SEQ, 0, 1, dtype=torch.float64)
    loss = token_loss(whole(tokens()[:, :-1]), tokens()[:, 1:])
    loss.backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    neighbours = dist.HashStore()
    groups = [dist.new_group([0, 1]) for _ in range(STAGES)]  # on all ranks in the same order
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            shared = ParallelGroups(tp=Group.of(groups[number]), sequence=True)
            modules = build_chunks(SHARED, SEQ, schedule.placement, number, dtype=torch.float64, groups=shared)
            last = schedule.chunks - 1
            chunks = {n: StageChunk(m, token_loss if n == last else None) for n, m in modules.items()}
            given = torch.zeros(2, SEQ, dtype=torch.int64)
            boundary = torch.empty(2, SEQ // 2, SHARED.dim, dtype=torch.float64)
            comes_in = {n: Example(boundary if n else given, given if n == last else None) for n in chunks}
            stage = GraphStage(chunks, comes_in, mode="estimate", rules=Rules(labels=500))
            program = compile_program(schedule, number)
            stage.prepare(program)
            backend = gloo_backend(neighbours, number, STAGES, timedelta(seconds=120))
            record = FlightRecord(f"pp{number}")
            channels = {peer: GroupChannel(backend, peer, record) for peer in range(STAGES) if peer != number}
            buckets = GradientBuckets(dict(modules), 256)
            buckets.begin(lambda bucket: None)
            x, y = tokens()[:, :-1].chunk(MICROBATCHES), tokens()[:, 1:].chunk(MICROBATCHES)
            losses = Executor(stage, channels, boundary, record).run(program, x, y, buckets, generation=0, step=0)
            if last in modules:
                torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-12, atol=0)
            assert bool(stage.woven) == (policy != "zb-h1")
            assert all(plan.pairing is not None for plan in stage.plans.values()), "both strands communicate"
            assert all(graph.took_s for graph in stage.woven.values()), "every woven graph ran"
            for module in modules.values():
                reduce_gradients(module, shared)
                for name, parameter in module.named_parameters():
                    wanted = expected[name]
                    assert wanted is not None and parameter.grad is not None
                    mine = own_part(wanted, layouts(module)[name], shared)
                    torch.testing.assert_close(parameter.grad, mine, rtol=1e-10, atol=1e-14)
            for channel in channels.values():
                channel.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(STAGES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.system
@pytest.mark.parametrize(
    "policies", [["w"], pytest.param(["dualpipev", "zb-h1"], marks=pytest.mark.slow)], ids=["pairs", "B and W apart"]
)
def test_stages_whose_layers_two_ranks_share(policies: list[str], ask_ranks: Callable[..., Any]) -> None:
    """Collectives inside woven pairs of different chunks, and in B and W apart."""
    answers = ask_ranks(train_shared_stages, policies)
    for policy in policies:
        answers.check(policy)
