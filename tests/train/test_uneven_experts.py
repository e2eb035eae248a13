"""Experts without a limit: the outputs and gradients of one rank, however uneven the loads, and never in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.errors import ConfigError
from helixrt.parallel.group import Group
from helixrt.train.config import ModelConfig, ScheduleConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.models.moe import MixtureOfExperts
from helixrt.train.models.parallel import ALONE, ParallelGroups
from helixrt.train.models.uneven_experts import compute_all
from tests.train.model_ranks import (
    GPT,
    LLAMA,
    SEQ,
    batch,
    check_engine,
    close,
    engine_of,
    gradients,
    on_ranks,
    on_two_ranks,
    put_together,
)
from tests.train.whole_tensors import reduce_gradients

EXPERTS = 6  # of which the last two are never chosen
UNLIMITED = {"experts": EXPERTS, "moe_every": 2, "capacity": 0.0, "auxiliary": 0.5}


def skewed(module: nn.Module) -> nn.Module:
    """The module with routers that choose one of the experts 0 and 2 and one of 1 and 3."""
    for part in module.modules():
        if isinstance(part, MixtureOfExperts):
            rows = torch.randn(2, part.router.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
            with torch.no_grad():
                part.router.weight.copy_(torch.cat((rows, -rows, torch.zeros(EXPERTS - 4, rows.shape[1]))))
    return module


def build(model: ModelConfig, groups: ParallelGroups = ALONE, scale: float = 1.0, chunk: int = 0, chunks: int = 1) -> nn.Module:
    module = build_chunk(model, SEQ, chunk, chunks, seed=5, dtype=torch.float64, groups=groups, auxiliary_scale=scale)
    return skewed(module)


def alone(model: ModelConfig, batches: Sequence[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over `batches` and its gradients, on one rank."""
    return trained(build(model, scale=1 / len(batches)), batches)


def trained(module: nn.Module, batches: Sequence[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    losses = [token_loss(module(tokens[:, :-1]), tokens[:, 1:]) / len(batches) for tokens in batches]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses), gradients(module)


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """As `close`, and experts that nobody chose have a gradient of zeros."""
    close(got, expected)
    weight = got["layers.1.moe.ffn_in.weight"]
    assert [bool(expert.any()) for expert in weight] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda m: m.family)
def test_nothing_is_dropped(model: ModelConfig) -> None:
    """As if every expert had room for every choice."""
    loss, grads = alone(replace(model, **UNLIMITED), [batch()])
    roomy, expected = alone(replace(model, **UNLIMITED | {"capacity": float(EXPERTS)}), [batch()])
    assert loss == pytest.approx(roomy, rel=1e-14)
    same(grads, expected)
    tight, _ = alone(replace(model, **UNLIMITED | {"capacity": 1.0}), [batch()])
    assert tight != pytest.approx(roomy, rel=1e-9), "the loads are too even to tell"


LOADS = {
    "all to one expert": lambda rank: [4] * 9,
    "one rank has no rows": lambda rank: [0, 3, 3, 5] * rank,
    "no rows at all": lambda rank: [],
    "one rank gets none": lambda rank: [1, 0, 1][rank:],
    "every rank to every expert": lambda rank: [5, 4, 3, 2, 1, 0] * (1 + 2 * rank),
}


@pytest.mark.parametrize("name", LOADS)
def test_rows_come_back_from_their_experts(run_stages: Any, name: str) -> None:
    """For loads of all kinds on three ranks: outputs, and gradients of rows and weights."""
    weights = torch.randn(EXPERTS, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def rows_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        expert = torch.tensor(LOADS[name](rank), dtype=torch.int64)
        generator = torch.Generator().manual_seed(rank)
        rows, tangent = torch.randn(2, len(expert), 3, dtype=torch.float64, generator=generator)
        return rows.requires_grad_(), expert, tangent

    def work(ep: Group) -> tuple[torch.Tensor, ...]:
        mine = weights.chunk(ep.size)[ep.rank].clone().requires_grad_()
        rows, expert, tangent = rows_of(ep.rank)

        def network(rows: torch.Tensor, loads: Sequence[int]) -> torch.Tensor:
            assert sum(loads) == len(rows) and len(loads) == EXPERTS // ep.size
            return torch.cat([part @ weight for part, weight in zip(rows.split(list(loads)), mine, strict=True)])

        out = compute_all(rows, expert, EXPERTS, network, ep)
        out.backward(tangent)
        assert rows.grad is not None and mine.grad is not None
        return out.detach(), rows.grad, mine.grad

    whole = weights.clone().requires_grad_()
    results = on_ranks(run_stages, 3, work)
    for rank, (out, of_rows, _) in enumerate(results):
        rows, expert, tangent = rows_of(rank)
        expected = torch.einsum("ri,rio->ro", rows, whole[expert])
        expected.backward(tangent)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_rows, rows.grad, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([each for _, _, each in results]), whole.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda m: m.family)
@pytest.mark.parametrize("chunks", [1, 2])
def test_expert_parallel_ranks_are_one_rank_with_their_batches(run_stages: Any, model: ModelConfig, chunks: int) -> None:
    """Also where the model is cut into the chunks of a pipeline."""
    model = replace(model, **UNLIMITED)
    batches = [batch(3), batch(4)]
    expected, grads = alone(model, batches)

    def work(ep: Group) -> tuple[nn.Module, float]:
        groups = ParallelGroups(ep=ep)
        parts = nn.ModuleList(build(model, groups, chunk=chunk, chunks=chunks) for chunk in range(chunks))
        tokens = batches[ep.rank]
        hidden = tokens[:, :-1]
        for part in parts:
            hidden = part(hidden)
        loss = token_loss(hidden, tokens[:, 1:])
        loss.backward()
        for part in parts:
            reduce_gradients(part, groups)
        return parts, loss.item()

    ranks, losses = on_two_ranks(run_stages, work)
    assert sum(losses) / 2 == pytest.approx(expected, rel=1e-13)
    got: dict[str, torch.Tensor] = {}
    for parts in zip(*ranks, strict=True):
        got |= put_together([gradients(part) for part in parts], parts[0], "ep")
    same(got, grads)


def test_tensor_parallel_ranks_share_every_expert(run_stages: Any) -> None:
    model = replace(LLAMA, **UNLIMITED)
    expected, grads = alone(model, [batch()])

    def work(tp: Group) -> tuple[nn.Module, float]:
        groups = ParallelGroups(tp=tp, sequence=True)
        module = build(model, groups)
        loss = token_loss(module(batch()[:, :-1]), batch()[:, 1:])
        loss.backward()
        reduce_gradients(module, groups)
        return module, loss.item()

    modules, losses = on_two_ranks(run_stages, work)
    assert losses == pytest.approx([expected] * 2, rel=1e-13)
    same(put_together([gradients(m) for m in modules], modules[0], "tp"), grads)


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1"])
def test_a_pipeline_runs_them_by_autograd(run_stages: Any, policy: str) -> None:
    """The gradients of a plain loop over micro-batches."""
    model = replace(GPT, **UNLIMITED)
    whole = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64, auxiliary_scale=1 / 4)
    tokens = torch.cat((batch(3), batch(4)))
    expected, grads = trained(whole, tokens.chunk(4))

    def body(which: int, group: Any) -> None:
        check_engine(engine_of(model, ScheduleConfig(policy, 4, "never"), tokens, which, 2, group), expected, grads)

    run_stages(2, body)


def test_no_graph_has_them() -> None:
    model = replace(GPT, **UNLIMITED)
    with pytest.raises(ConfigError, match=r"^schedule.graphs=always: experts without a limit .*model.capacity=0") as always:
        engine_of(model, ScheduleConfig("1f1b", 4, "always"), batch())
    with pytest.raises(ConfigError, match=r"^schedule.graphs=auto: .*uneven_experts.py:\d+: cannot be captured: ") as auto:
        engine_of(model, ScheduleConfig("zb-h1", 4, "auto"), batch())
    assert "capacity" in str(auto.value) and str(auto.value).endswith("schedule.graphs=never runs whole backwards by autograd")
    assert not any("\n" in str(caught.value) for caught in (always, auto))
