"""Mixtures of experts: who is chosen, who is dropped, what comes out, and the loss for even load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helixrt.train.config import ModelConfig, ScheduleConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.models.moe import CHOICES, MixtureOfExperts, expert_capacity, route
from helixrt.train.models.parallel import ALONE
from tests.train.model_ranks import check_engine, engine_of

SEQ = 12
MODEL = ModelConfig(
    layers=4, dim=16, heads=4, kv_heads=2, ffn=24, vocab=32, experts=5, moe_every=2, capacity=0.9, auxiliary=0.5
)


def logits(seed: int, tokens: int = 40, experts: int = 5) -> torch.Tensor:
    return torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mixture(config: ModelConfig) -> MixtureOfExperts:
    """With weights large enough to route unevenly."""
    module = MixtureOfExperts(config, ALONE, 1.0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module


def hidden(seed: int = 2) -> torch.Tensor:
    return torch.randn(3, SEQ, MODEL.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_two_likeliest_are_chosen_with_weights_that_sum_to_one() -> None:
    for seed in range(20):
        scores = logits(seed)
        routing = route(scores, 7)
        chosen = routing.expert.view(CHOICES, -1)
        assert torch.equal(chosen.T, scores.topk(CHOICES).indices)
        weights = routing.weight.view(CHOICES, -1)
        torch.testing.assert_close(weights.sum(0), torch.ones(40, dtype=torch.float64), rtol=1e-14, atol=0)
        torch.testing.assert_close(weights[0] / weights[1], (scores.gather(1, chosen.T) @ scores.new_tensor([1.0, -1.0])).exp())


def test_of_equal_experts_the_lower_number_wins() -> None:
    tied = torch.tensor([[0.0, 0, 0, 0], [1, 2, 2, 2], [3, 1, 1, 3], [-1, 5, 0, 0]])
    assert route(tied, 9).expert.view(CHOICES, -1).T.tolist() == [[0, 1], [1, 2], [0, 3], [1, 2]]


def test_no_expert_takes_more_than_its_capacity_and_first_choices_come_first() -> None:
    for seed in range(20):
        scores = logits(seed)
        scores[:, seed % 5] += 1.5
        for capacity in (1, 3, 16, 80):
            routing = route(scores, capacity)
            served: dict[int, list[int]] = {}
            for entry, expert in enumerate(routing.expert.tolist()):  # in order of choice, then of token
                queue = served.setdefault(expert, [])
                assert routing.place[entry] == len(queue) and bool(routing.kept[entry]) == (len(queue) < capacity)
                queue.append(entry)
            assert routing.kept.sum() == sum(min(capacity, len(queue)) for queue in served.values())


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("capacity", [0.4, 5.0])
def test_output_is_each_tokens_experts_one_by_one(family: str, capacity: float) -> None:
    config = replace(MODEL, family=family, capacity=capacity)
    module, x = mixture(config), hidden()
    tokens = x.flatten(0, 1)
    room = expert_capacity(len(tokens), config.experts, capacity)
    taken = [0] * config.experts
    expected = torch.zeros_like(tokens)
    probability = (tokens @ module.router.weight.T).softmax(-1)
    best = probability.topk(CHOICES)
    dropped = torch.zeros(len(tokens), dtype=torch.int64)
    for choice in range(CHOICES):
        for token, vector in enumerate(tokens):
            expert = int(best.indices[token, choice])
            if taken[expert] == room:
                dropped[token] += 1
                continue
            taken[expert] += 1
            wide = module.ffn_in.weight[expert] @ vector
            inner = F.gelu(wide) if family == "gpt" else F.silu(wide[: config.ffn]) * wide[config.ffn :]
            share = best.values[token, choice] / best.values[token].sum()
            expected[token] += share * (module.ffn_out.weight[expert] @ inner)
    got = module(x).flatten(0, 1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert (dropped.sum() > 0) == (capacity < 1)
    # Who lost both choices adds exactly nothing to the residual stream.
    assert capacity > 1 or (dropped == CHOICES).any()
    assert (got[dropped == CHOICES] == 0).all()


def test_capacity_is_the_even_share_times_its_factor_and_never_nothing() -> None:
    assert expert_capacity(64, 4, 1.0) == 32 and expert_capacity(64, 4, 1.25) == 40
    assert expert_capacity(10, 4, 1.01) == 6 and expert_capacity(1, 8, 0.1) == 1


def test_auxiliary_loss_is_one_when_even_and_falls_when_followed() -> None:
    even = torch.eye(4, dtype=torch.float64) + torch.eye(4, dtype=torch.float64).roll(1, 0)
    assert route(even, 9).auxiliary_loss.item() == pytest.approx(1.0, rel=1e-12)
    skewed = logits(0)
    skewed[:, 2] += 2
    skewed.requires_grad_()
    before = route(skewed, 9).auxiliary_loss
    (gradient,) = torch.autograd.grad(before, skewed)
    assert before > 1.2 and gradient[:, 2].mean() > 0  # descent makes the favourite less likely
    assert route(skewed - 50 * gradient, 9).auxiliary_loss < before


def test_auxiliary_gradient_is_that_of_the_loss_written_out() -> None:
    """Given in backward, unseen in the output; nothing of it in evaluation."""
    module, x = mixture(MODEL), hidden().requires_grad_()
    target = hidden(5)

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, [x, *module.parameters()]))

    out = module(x)
    implied = gradients((out * target).sum())
    module.eval()
    assert torch.equal(module(x), out)
    without = gradients((module(x) * target).sum())
    balance = route(module.router(x.flatten(0, 1)), 9).auxiliary_loss
    written = gradients((module(x) * target).sum() + MODEL.auxiliary * balance + 0 * sum(p.sum() for p in module.parameters()))
    for one, other in zip(implied, written, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(without[1], implied[1])


@pytest.mark.system
@pytest.mark.parametrize("policy", ["1f1b", "zb-h1", "w"])
def test_pipeline_gives_the_gradients_of_a_plain_loop_over_micro_batches(run_stages: Any, policy: str) -> None:
    """Experts drop choices micro-batch by micro-batch, and their own loss gets its gradient in the middle of the model.

    By autograd, and by graphs with W apart or with pairs.
    """
    tokens = torch.randint(0, MODEL.vocab, (8, SEQ + 1), generator=torch.Generator().manual_seed(9))
    whole = build_chunk(replace(MODEL, family="llama"), SEQ, 0, 1, seed=5, dtype=torch.float64, auxiliary_scale=1 / 4)
    total = 0.0
    for part in tokens.chunk(4):
        loss = token_loss(whole(part[:, :-1]), part[:, 1:]) / 4
        loss.backward()
        total += loss.item()
    expected = {name: p.grad for name, p in whole.named_parameters()}

    def body(stage: int, group: Any) -> None:
        engine = engine_of(replace(MODEL, family="llama"), ScheduleConfig(policy, 4), tokens, stage, 2, group)
        check_engine(engine, total, expected)

    run_stages(2, body)
