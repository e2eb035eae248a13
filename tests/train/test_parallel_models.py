"""Models shared by tensor-, sequence-, context- and expert-parallel ranks are the model of one rank.

The oracle is the whole model on one rank in float64: same loss, and, put together, the same gradients.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.engines.inner_group import lost_rank
from helixrt.errors import ConfigError
from helixrt.parallel import CONTEXTS
from helixrt.parallel.group import Group
from helixrt.passes import nodes
from helixrt.train.config import ModelConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import ALONE, ParallelGroups, Shard, take
from tests.train.model_ranks import (
    BATCH,
    GPT,
    LLAMA,
    MOE,
    SEQ,
    alone,
    backward,
    batch,
    close,
    gradients,
    on_ranks,
    on_two_ranks,
    put_together,
    registered,
)
from tests.train.whole_tensors import join, reduce_gradients


@dataclass(frozen=True)
class Case:
    model: ModelConfig
    sequence: bool = False

    def __str__(self) -> str:
        kind = f"{self.model.family}{'-moe' if self.model.experts else ''}{'-tied' if self.model.tied else ''}"
        return kind + ("-sequence" if self.sequence else "")


MODELS = [*(replace(m, tied=tied) for m in (GPT, LLAMA) for tied in (False, True)), replace(GPT, **MOE), replace(LLAMA, **MOE)]
CASES = [Case(model, sequence) for model in MODELS for sequence in (False, True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensor_parallel_ranks_are_the_whole_model(run_stages: Any, case: Case) -> None:
    expected, grads = alone(case.model, [batch()])

    def work(tp: Group) -> tuple[nn.Module, float]:
        groups = ParallelGroups(tp=tp, sequence=case.sequence)
        module = build_chunk(case.model, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=groups)
        loss = backward(module, batch())
        reduce_gradients(module, groups)
        return module, loss

    modules, losses = on_two_ranks(run_stages, work)
    assert losses == pytest.approx([expected] * 2, rel=1e-13)
    close(put_together([gradients(m) for m in modules], modules[0], "tp"), grads)
    whole = build_chunk(case.model, SEQ, 0, 1, seed=5, dtype=torch.float64).state_dict()
    weights = put_together([m.state_dict() for m in modules], modules[0], "tp")
    assert all(torch.equal(weights[name], whole[name]) for name in weights)
    assert sum(p.numel() for p in modules[0].parameters()) < sum(value.numel() for value in weights.values())


def test_stages_of_a_pipeline_may_be_tensor_parallel(run_stages: Any) -> None:
    """With sequence parallelism what goes between chunks is a rank's slice of it."""
    model = replace(LLAMA, **MOE)
    expected, grads = alone(model, [batch()])

    def work(tp: Group) -> tuple[nn.Module, float]:
        groups = ParallelGroups(tp=tp, sequence=True)
        chunks = [build_chunk(model, SEQ, c, 2, seed=5, dtype=torch.float64, groups=groups) for c in range(2)]
        hidden = chunks[0](batch()[:, :-1])
        assert hidden.shape == (BATCH, SEQ // 2, model.dim)
        loss = token_loss(chunks[1](hidden), batch()[:, 1:])
        loss.backward()
        for chunk in chunks:
            reduce_gradients(chunk, groups)
        return nn.ModuleList(chunks), loss.item()

    modules, losses = on_two_ranks(run_stages, work)
    assert losses == pytest.approx([expected] * 2, rel=1e-13)
    got: dict[str, torch.Tensor] = {}
    for ranks in zip(*modules, strict=True):
        got |= put_together([gradients(chunk) for chunk in ranks], ranks[0], "tp")
    close(got, grads)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", [GPT, LLAMA, replace(LLAMA, tied=True)], ids=lambda m: f"{m.family}-{m.tied}")
def test_context_parallel_ranks_are_the_whole_model(run_stages: Any, model: ModelConfig, ranks: int, context: str) -> None:
    model = replace(model, context=context)
    expected, grads = alone(model, [batch()])

    def work(cp: Group) -> tuple[nn.Module, float]:
        module = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=ParallelGroups(cp=cp))
        loss = backward(module, batch(), cp)
        reduce_gradients(module, ParallelGroups(cp=cp))
        return module, loss

    modules, losses = zip(*on_ranks(run_stages, ranks, work), strict=True)
    assert sum(losses) / ranks == pytest.approx(expected, rel=1e-13)
    for module in modules:
        close(gradients(module), grads, tolerance=1e-12)


@pytest.mark.parametrize("model", [replace(m, **MOE, tied=tied) for m, tied in ((GPT, True), (LLAMA, False))], ids=str)
def test_expert_parallel_ranks_are_one_rank_with_their_batches(run_stages: Any, model: ModelConfig) -> None:
    """Each rank routes its own batch, as one rank does with one micro-batch after the other; choices are dropped."""
    batches = [batch(3), batch(4)]
    expected, grads = alone(model, batches)

    def work(ep: Group) -> tuple[nn.Module, float]:
        groups = ParallelGroups(ep=ep)
        module = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=groups)
        loss = backward(module, batches[ep.rank])
        reduce_gradients(module, groups)
        return module, loss

    modules, losses = on_two_ranks(run_stages, work)
    assert sum(losses) / 2 == pytest.approx(expected, rel=1e-13)
    assert modules[0].layers["1"].moe.ffn_in.weight.shape[0] == 2
    close(put_together([gradients(m) for m in modules], modules[0], "ep"), grads)


@pytest.mark.parametrize(("capacity", "context"), [(4.0, "gathered"), (0.0, "ring")])
def test_experts_may_be_spread_over_context_parallel_ranks(run_stages: Any, capacity: float, context: str) -> None:
    model = replace(LLAMA, **MOE | {"capacity": capacity, "auxiliary": 0.0}, context=context)
    expected, grads = alone(model, [batch()])

    def work(cp: Group) -> tuple[nn.Module, float]:
        groups = ParallelGroups(cp=cp, ep=cp)
        module = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=groups)
        loss = backward(module, batch(), cp)
        reduce_gradients(module, groups)
        return module, loss

    modules, losses = on_two_ranks(run_stages, work)
    assert sum(losses) / 2 == pytest.approx(expected, rel=1e-13)
    close(put_together([gradients(m) for m in modules], modules[0], "ep"), grads)


@pytest.mark.system
@pytest.mark.parametrize(
    "model,axes,expected",
    [
        (GPT, ("tp",), {"all_reduce": 4}),  # two forward and two backward
        (LLAMA, ("tp", "sequence"), {"all_gather_into_tensor": 4 + 2, "reduce_scatter_tensor": 4}),
        (LLAMA, ("cp",), {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}),
        (replace(LLAMA, context="ring"), ("cp",), {"helixrt_ring_shift": 1 + 1 + 2}),  # keys and values twice, their gradients
        (replace(LLAMA, **MOE | {"moe_every": 1}), ("ep",), {"all_to_all_single": 4}),
    ],
    ids=["gpt-tp", "llama-sequence", "llama-cp", "llama-cp-ring", "moe-ep"],
)
def test_captured_without_a_break(run_stages: Any, model: ModelConfig, axes: tuple[str, ...], expected: dict[str, int]) -> None:
    """Both graphs of one layer are whole, hold the method's collectives and no other, and give eager's gradients."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    counts: dict[str, int] = {}
    model = replace(model, layers=1)

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if nodes.is_collective(node):
                key = node.target._schema.name.split("::")[1]
                counts[key] = counts.get(key, 0) + 1
        return make_boxed_func(graph.forward)

    def body(rank: int, backend: Any) -> None:
        with registered(backend, rank, 2) as group:
            groups = ParallelGroups(**{axis: True if axis == "sequence" else group for axis in axes})
            cp = groups.cp
            eager = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=groups)
            module = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=groups)
            loss = backward(eager, batch(), cp)
            if rank == 0:
                compiled = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
                assert backward(compiled, batch(), cp) == pytest.approx(loss, rel=1e-13)
            else:
                backward(module, batch(), cp)
            close(gradients(module), gradients(eager))

    run_stages(2, body)
    assert counts == expected


@pytest.mark.parametrize("during", ["forward", "backward"])
def test_a_rank_that_is_lost_is_told_from_an_error_of_the_program(run_stages: Any, during: str) -> None:
    """Also where the collective is an operator, inside autograd."""

    def body(rank: int, backend: Any) -> None:
        with registered(backend, rank, 2) as tp:
            module = build_chunk(GPT, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=ParallelGroups(tp=tp))
            if rank == 1 and during == "forward":
                return  # its end of the group is closed with it
            with pytest.raises(RuntimeError) if rank == 0 else nullcontext() as lost:
                loss = token_loss(module(batch()[:, :-1]), batch()[:, 1:])
                if rank == 0:
                    loss.backward()
            if rank == 0:
                assert lost_rank(lost.value) != "", "".join(traceback.format_exception(lost.value))
                with pytest.raises(RuntimeError) as own:
                    torch.ones(2, 3) @ torch.ones(2, 3)
                assert lost_rank(own.value) == ""

    run_stages(2, body, 10.0)


def test_parts_make_the_whole_again() -> None:
    full = torch.arange(48).view(12, 4)
    for shard in (Shard("tp", 0), Shard("tp", 1), Shard("tp", 0, (4, 8)), Shard("ep", 0, (4, 4, 4))):
        for count in (1, 2, 4):
            assert torch.equal(join([take(full, shard, i, count) for i in range(count)], shard), full)
    assert take(full, Shard("tp", 0, (4, 8)), 1, 2)[:, 0].tolist() == [8, 12, 32, 36, 40, 44]


TWO = Group("two", 0, 2)
THREE = Group("three", 0, 3)


@pytest.mark.parametrize(
    "model,groups,message",
    [
        (GPT, ParallelGroups(tp=THREE), r"^model.heads=4: must be a multiple of the 3 ranks"),
        (replace(LLAMA, kv_heads=1), ParallelGroups(tp=TWO), r"^model.kv_heads=1: must be a multiple of the 2 ranks"),
        (GPT, ParallelGroups(sequence=True), r"^sequence=True: .* needs a group"),
        (GPT, ParallelGroups(cp=THREE), r"^data.seq_len=16: must be a multiple of 6"),
        (GPT, ParallelGroups(ep=TWO), r"^model.experts=0: must be a multiple of the 2 ranks"),
        (replace(GPT, experts=4), ParallelGroups(ep=THREE), r"^model.experts=4: must be a multiple of the 3 ranks"),
        (replace(GPT, experts=1), ALONE, r"^model.experts=1: must be at least 2"),
        (replace(GPT, experts=2, capacity=-1.0), ALONE, r"^model.capacity=-1.0: must be above 0, or 0 for no limit"),
        (replace(GPT, context="ulysses"), ALONE, r"^model.context=ulysses: must be one of gathered, ring"),
    ],
)
def test_models_that_cannot_be_shared_are_named(model: ModelConfig, groups: ParallelGroups, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chunk(model, SEQ, 0, 1, groups=groups)
