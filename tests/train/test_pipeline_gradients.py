"""Gradients through the pipeline are the single-process model's, within float64 rounding.

For every policy, one, two and four stages, several counts of micro-batches, GPT and Llama, tied and not, by autograd
and by graphs of F, B and W, with pairs woven: all of it with `make test-slow`, a part in which each policy meets each
number of stages on every commit. The oracle is the whole model over the whole batch in one plain backward.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from helixrt.bench._job_engine import pipeline_engine
from helixrt.engines.pipeline import PipelineEngine
from helixrt.errors import ConfigError
from helixrt.passes.executable import TIMED
from helixrt.pipeline.graph_stage import GraphStage
from helixrt.pipeline.program import needs_graphs, whole_backwards
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.generators.classic import build
from helixrt.schedule.generators.policies import POLICIES
from helixrt.schedule.ir import Pair, operations_of
from helixrt.train import engine as engine_module
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import TIED_PARAMETER, build_chunk

BATCH, SEQ = 24, 8
MODEL = ModelConfig(layers=8, dim=16, heads=4, kv_heads=2, ffn=24, vocab=32)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2, clip=0.05, bucket_bytes=4096)
MODELS = [replace(MODEL, family=family, tied=tied) for family in ("gpt", "llama") for tied in (False, True)]


def batch_at(position: int) -> torch.Tensor:
    return torch.randint(0, MODEL.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(position))


def record_of(step: int) -> CommitRecord:
    return CommitRecord(step, step, "", ((0, 0),), {0: step}, "run")


def make_engine(
    model: ModelConfig, schedule: ScheduleConfig, stage: int, stages: int, group: Any, **types: torch.dtype
) -> PipelineEngine:
    """`types`: `dtype` of the parameters, float64 if none is given, or `autocast`."""
    return pipeline_engine(
        model,
        OPTIM,
        schedule,
        batch=BATCH,
        seq_len=SEQ,
        steps=10,
        seed=5,
        stage=stage,
        stages=stages,
        group=group if stages > 1 else None,
        batch_at=batch_at,
        validation=lambda i: batch_at(1000 + i),
        record=FlightRecord(f"pp{stage}"),
        **(types or {"dtype": torch.float64}),
    )


def plain(model: ModelConfig, position: int) -> tuple[float, dict[str, torch.Tensor]]:
    whole = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64)
    tokens = batch_at(position)
    loss = token_loss(whole(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in whole.named_parameters()}


@dataclass(frozen=True)
class Case:
    """A model trained with a policy over so many micro-batches."""

    policy: str
    microbatches: int
    model: ModelConfig
    graphs: str

    def __str__(self) -> str:
        model = f"{self.model.family}, tied={self.model.tied}"
        return f"{self.policy}, {self.microbatches} micro-batches, {model}, graphs={self.graphs}"


def pairings(stages: int) -> list[tuple[str, int]]:
    return list(itertools.product(POLICIES, sorted({stages, 8, 12})))


def check_gradients(run_stages: Any, stages: int, cases: list[Case]) -> None:
    expected = {model: plain(model, 3) for model in {case.model for case in cases}}

    def body(stage: int, group: Any) -> None:
        for case in cases:
            schedule = ScheduleConfig(case.policy, case.microbatches, case.graphs)
            engine = make_engine(case.model, schedule, stage, stages, group)
            order: list[int] = []
            result = engine.run(3, order.append)
            loss, grads = expected[case.model]
            assert abs(result.loss - loss) < 1e-13, case
            assert result.tokens == BATCH * SEQ
            assert order == list(reversed(range(len(engine.buckets)))), case
            for slot, (key, parameter) in zip(engine._buckets.slots, engine._buckets.named, strict=True):
                got = slot.view(engine.buckets)
                assert slot.name == key and parameter.grad is not None and parameter.grad.data_ptr() == got.data_ptr()
                difference = (got - grads[key]).abs().max().item()
                assert difference <= 1e-10 * grads[key].abs().max().item() + 1e-15, f"{case}: {key} differs by {difference}"
            check_what_ran(engine, case, stages)
            engine.close()

    run_stages(stages, body)


def check_what_ran(engine: PipelineEngine, case: Case, stages: int) -> None:
    """Graphs ran what the schedule has, W where it stands and each pair woven; autograd whole backwards in its order."""
    schedule = build(case.policy, stages, case.microbatches)
    computing = engine._executor.stage
    by_graphs = isinstance(computing, GraphStage)
    assert by_graphs == (case.graphs == "always" or (case.graphs == "auto" and needs_graphs(schedule))), case
    entries = (schedule if by_graphs else whole_backwards(schedule)).entries[engine.stage]
    ran = [tuple(e.detail.values()) for e in engine.record.events() if e.kind is Kind.OPERATION]
    assert ran == [
        (o.op.value, o.chunk, o.microbatch, *([True] if isinstance(entry, Pair) else []))
        for entry in entries
        for o in operations_of(entry)
    ], case
    if isinstance(computing, GraphStage):
        runs = {key: 0 for key in (*computing.single, *computing.woven)}
        for entry in entries:
            if isinstance(entry, Pair):
                runs[entry.forward.chunk, entry.backward.op, entry.backward.chunk] += 1
            else:
                runs[entry.chunk, entry.op] += 1
        graphs = {**computing.single, **computing.woven}
        assert {key: len(graph.took_s) for key, graph in graphs.items()} == {k: min(n, TIMED) for k, n in runs.items()}, case


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gradients_are_the_single_process_models(run_stages: Any, stages: int) -> None:
    """By autograd; policies and counts meet with one model each, in turns."""
    policies = list(POLICIES)
    turns = [(policies.index(policy) + at) % len(MODELS) for at, (policy, _) in enumerate(pairings(stages))]
    cases = [Case(*pairing, MODELS[turn], "never") for pairing, turn in zip(pairings(stages), turns, strict=True)]
    check_gradients(run_stages, stages, cases)


@pytest.mark.system
@pytest.mark.parametrize(
    ("stages", "model", "graphs"), [(2, MODELS[3], "always"), (4, MODELS[1], "auto")], ids=["2-llama-tied", "4-gpt-tied"]
)
def test_graphs_give_the_single_process_models_gradients(
    run_stages: Any, stages: int, model: ModelConfig, graphs: str, captured_once: None
) -> None:
    """Every policy, a layer in each chunk. What neither moves W nor pairs is left to autograd if nothing else is said."""
    check_gradients(run_stages, stages, [Case(name, 8, replace(model, layers=2 * stages), graphs) for name in POLICIES])


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_every_combination(run_stages: Any, policy: str) -> None:
    for stages in (1, 2, 4):
        cases = [Case(*pairing, model, "never") for pairing in pairings(stages) for model in MODELS if pairing[0] == policy]
        check_gradients(run_stages, stages, cases)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS, ids=["gpt", "gpt-tied", "llama", "llama-tied"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_graphs_give_every_combinations_gradients(
    run_stages: Any, stages: int, model: ModelConfig, captured_once: None
) -> None:
    cases = [Case(*pairing, model, "always") for pairing in pairings(stages)]
    for microbatches in {case.microbatches for case in cases}:  # a run of stages has a deadline
        check_gradients(run_stages, stages, [case for case in cases if case.microbatches == microbatches])


@pytest.mark.system
@pytest.mark.parametrize(
    ("model", "policy"),
    [(MODELS[1], "1f1b"), (MODELS[2], "zbv"), (MODELS[3], "dualpipev"), (MODELS[1], "interleaved")],
    ids=["gpt-tied-1f1b", "llama-zbv", "llama-tied-dualpipev", "gpt-tied-interleaved"],
)
def test_training_is_the_single_process_models(run_stages: Any, model: ModelConfig, policy: str) -> None:
    """Steps with clipping over all stages, against torch's own optimizer and clipping on the whole model."""
    whole = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64)
    matrices = [p for p in whole.parameters() if p.dim() > 1]
    vectors = [p for p in whole.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps)
    norms, losses = [], []
    for step in range(1, 5):
        oracle.zero_grad()
        tokens = batch_at(step)
        loss = token_loss(whole(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(whole.parameters(), OPTIM.clip).item())
        for group in oracle.param_groups:
            group["lr"] = OPTIM.lr * step / 2 if step <= 2 else make_rate(step)
        oracle.step()
    tokens = batch_at(1000)
    validation = token_loss(whole(tokens[:, :-1]), tokens[:, 1:]).item()

    def body(stage: int, group: Any) -> tuple[PipelineEngine, list[float], list[float], float]:
        engine = make_engine(model, ScheduleConfig(policy, 4), stage, 2, group)
        got_losses, got_norms = [], []
        for step in range(1, 5):
            got_losses.append(engine.run(step, lambda bucket: None).loss)
            reduced = [b.clone() for b in engine.buckets]
            got_norms.append(engine.apply(record_of(step), reduced).grad_norm)
        result = engine.evaluate(1)
        assert result[1] == BATCH * SEQ
        engine.close()
        return engine, got_losses, got_norms, result[0]

    results = run_stages(2, body)
    reference = dict(whole.named_parameters())
    for engine, got_losses, got_norms, got_validation in results:
        torch.testing.assert_close(got_losses, losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(got_norms, norms, rtol=1e-9, atol=0)
        assert abs(got_validation - validation) < 1e-9
        for name, parameter in engine._buckets.named:
            torch.testing.assert_close(parameter, reference[name], rtol=1e-7, atol=1e-10)
    assert results[0][1:] == results[1][1:]  # every stage has the same loss, norm and validation, bit for bit
    if model.tied:
        copies = [p for r in results for name, p in r[0]._buckets.named if name == TIED_PARAMETER]
        assert len(copies) == len({results[0][0].placement[0], results[0][0].placement[-1]})
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def make_rate(step: int) -> float:
    import math

    low = OPTIM.lr * OPTIM.min_lr_ratio
    return low + (OPTIM.lr - low) * (1 + math.cos(math.pi * (step - 2) / 8)) / 2


def test_every_operation_and_message_is_recorded(run_stages: Any) -> None:
    def body(stage: int, group: Any) -> FlightRecord:
        engine = make_engine(MODEL, ScheduleConfig("1f1b", 4), stage, 2, group)
        engine.record.step = 9
        engine.run(9, lambda bucket: None)
        engine.close()
        return engine.record

    for stage, record in enumerate(run_stages(2, body)):
        events = record.events()
        assert all(e.step == 9 and e.rank == f"pp{stage}" for e in events)
        kinds = {kind: [e for e in events if e.kind is kind] for kind in Kind}
        assert len(kinds[Kind.OPERATION]) == 8
        lanes = {k: sorted(e.detail["tag"].split(".", 2)[2] for e in kinds[k]) for k in (Kind.SEND, Kind.RECV)}
        up = [f"c1.m{m}.F" for m in range(4)]
        down = [f"c0.m{m}.B" for m in range(4)]
        assert lanes == (
            {Kind.SEND: up, Kind.RECV: sorted([*down, "c0.m0.loss"])}
            if stage == 0
            else {Kind.SEND: sorted([*down, "c0.m0.loss"]), Kind.RECV: up}
        )


@pytest.mark.system
@pytest.mark.parametrize(("before", "after", "elsewhere"), [("1f1b", "zb-h1", "zbv"), ("zbv", "w", "interleaved")])
def test_a_schedule_is_swapped_between_steps(
    run_stages: Any, before: str, after: str, elsewhere: str, captured_once: None
) -> None:
    """Also between autograd and graphs."""

    def body(stage: int, group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        engine = make_engine(MODEL, ScheduleConfig(before, 8), stage, 2, group)
        engine.run(0, lambda bucket: None)
        kept = [b.clone() for b in engine.buckets]
        engine.use_schedule(build(after, 2, 8))
        engine.run(0, lambda bucket: None)
        with pytest.raises(ValueError, match="is for 2 stages, 4 micro-batches"):
            engine.use_schedule(build(after, 2, 4))
        with pytest.raises(ValueError, match=f"schedule {elsewhere} has chunks on stages"):
            engine.use_schedule(build(elsewhere, 2, 8))
        engine.close()
        return kept, [b.clone() for b in engine.buckets]

    for kept, got in run_stages(2, body):
        torch.testing.assert_close(kept, got, rtol=1e-12, atol=1e-17)


def test_chunks_that_cannot_be_captured_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where autograd is to run it, the same model trains."""
    chunks = engine_module.build_chunks

    def asking(*args: Any, **kwargs: Any) -> Any:
        modules = chunks(*args, **kwargs)
        for module in modules.values():
            module.register_forward_hook(lambda m, args, out: out * 2 if out.sum().item() > 1e9 else out)
        return modules

    monkeypatch.setattr(engine_module, "build_chunks", asking)
    with pytest.raises(ConfigError, match=r"^schedule.graphs=auto: .*never runs whole backwards by autograd$") as caught:
        make_engine(MODEL, ScheduleConfig("zb-h1", 4), 0, 1, None)
    assert "\n" not in str(caught.value) and "change: " in str(caught.value)
    engine = make_engine(MODEL, ScheduleConfig("zb-h1", 4, "never"), 0, 1, None)
    assert engine.run(3, lambda bucket: None).loss == pytest.approx(plain(MODEL, 3)[0], rel=1e-12)
