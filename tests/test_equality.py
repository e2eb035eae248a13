"""Woven, one strand and plain eager PyTorch train alike: bit by bit among graphs, to rounding beside eager.

Every case takes three steps, whose gradients accumulate, with several numbers of micro-batches, from equal states of the
random generator. The cases are the product of models, the ranks that share them, dropout, tied embeddings and code
generation; some of each run by default with 1 to 3 micro-batches, all of them in `make test-slow` with 1 to 8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import helixrt
from helixrt.parallel.group import Group
from helixrt.pipeline.strands import build
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import ParallelGroups
from tests.ranks_context import names_drawn

FEW, MANY, STEPS = (2, 1, 3), (2, 1, 3, 4, 8), 3
ROWS, SEQ, VOCAB = 2, 8, 17  # of a micro-batch
Batch = tuple[dict[str, torch.Tensor], torch.Tensor | None]  # inputs by keyword, target


@dataclass(frozen=True)
class Case:
    """`model`: gpt, llama, moe or hf-NAME; `shared`: alone, tp, sp, cp, ep; `codegen`: also "backend", of torch.compile."""

    model: str
    shared: str = "alone"
    dropout: bool = True
    tied: bool = True
    codegen: str = "eager"

    def __str__(self) -> str:
        words = {"dropout": self.dropout, "tied": self.tied}
        return "-".join([self.model, self.shared, *(word for word, on in words.items() if on), self.codegen])


# ------------------------------------------------------------------------------------------------ models


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def own_model(case: Case) -> nn.Module:
    """A model of helixrt.train in float64; parameters follow from their names, so that all copies are equal."""
    world = Group.of(dist.group.WORLD) if case.shared != "alone" else None
    gpt = case.model == "gpt" or (case.model == "moe" and case.tied)
    config = ModelConfig(family="gpt" if gpt else "llama", layers=2, dim=8, heads=2, kv_heads=2, ffn=12, vocab=VOCAB)
    config = replace(config, tied=case.tied, experts=4 if case.model == "moe" else 0, capacity=0.9, auxiliary=0.5)
    axis = "tp" if case.shared == "sp" else case.shared
    groups = ParallelGroups(**({axis: world} if world else {}), sequence=case.shared == "sp")
    whole = SEQ * 2 if case.shared == "cp" else SEQ
    module = build_chunk(config, whole, 0, 1, dtype=torch.float64, groups=groups, auxiliary_scale=0.5)
    if case.dropout:
        for block in module.layers.values():
            block.register_forward_hook(lambda m, args, out: F.dropout(out, 0.3, m.training))
    return module


def transformers_model(case: Case) -> nn.Module:
    """A model of transformers as it comes, `use_cache` and all; Mixtral's experts multiply in float32 only."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    small = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": case.tied}
    p = 0.2 if case.dropout else 0.0
    if case.model == "hf-gpt2":
        drops = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}
        config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=SEQ, **drops, **small)
        return transformers.GPT2LMHeadModel(config).double().train()
    small |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "max_position_embeddings": SEQ, "attention_dropout": p}
    if case.model == "hf-llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).double().train()
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **small)).train()


def batch(case: Case, microbatches: int) -> Batch:
    """Ranks that share a model's matrices have the same tokens, others tokens of their own."""
    own = dist.get_rank() if case.shared in ("cp", "ep") else 0
    generator = torch.Generator().manual_seed(own)
    tokens, targets = torch.randint(0, VOCAB, (2, ROWS * microbatches, SEQ), generator=generator)
    if case.model.startswith("hf-"):
        return {"input_ids": tokens, "labels": tokens}, None
    return {"x": tokens}, targets


# ------------------------------------------------------------------------------------------------ three ways to train

Trained = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]  # losses, gradients, the generator's state


def trained(model: nn.Module, step: Callable[[], torch.Tensor]) -> Trained:
    torch.manual_seed(7)
    losses = torch.stack([step() for _ in range(STEPS)])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return losses, gradients, torch.get_rng_state()


def plain_loop(model: nn.Module, case: Case, microbatches: int) -> torch.Tensor:
    inputs, target = batch(case, microbatches)
    losses = []
    for index in range(microbatches):
        output = model(**{name: value.chunk(microbatches)[index] for name, value in inputs.items()})
        loss = output.loss if target is None else token_loss(output, target.chunk(microbatches)[index])
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def assert_alike(one: Trained, other: Trained, *, bitwise: bool) -> None:
    assert torch.equal(one[2], other[2]), "other random numbers were drawn"
    assert one[1].keys() == other[1].keys() != set()
    exact = one[0].dtype == torch.float64
    if bitwise:
        assert torch.equal(one[0], other[0])
    torch.testing.assert_close(one[0], other[0], rtol=1e-12 if exact else 1e-5, atol=0)
    for name, gradient in one[1].items():
        if bitwise:
            assert torch.equal(gradient, other[1][name]), name
        near = {"rtol": 1e-10, "atol": 1e-13} if exact else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(gradient, other[1][name], **near, msg=lambda m, n=name: f"{n}: {m}")


def check(case: Case, counts: tuple[int, ...]) -> None:
    """Fails unless all ways train alike, and `explain` says that two strands are woven."""
    make = transformers_model if case.model.startswith("hf-") else own_model
    model, plain = make(case), make(case)
    if case.codegen == "backend":
        compiled = torch.compile(model, backend="helixrt", dynamic=False)
        one = trained(model, partial(plain_loop, compiled, case, 2))
        assert_alike(one, trained(plain, partial(plain_loop, plain, case, 2)), bitwise=False)
        return
    loss = None if case.model.startswith("hf-") else token_loss
    helixrt.compile(model, loss=loss, codegen=case.codegen, profile="estimate", microbatches=counts[0])
    step = model.train_step
    for count in counts:
        inputs, target = batch(case, count)
        step.options = replace(step.options, microbatches=count)
        run = partial(step, **inputs, target=target)
        woven = trained(model, run)
        explanation = model.explain()
        assert (explanation.state, explanation.reason) == ("woven", "")
        assert explanation.plan is not None and (explanation.plan.pairing is None) == (case.shared == "alone")
        if count == counts[0]:  # what was captured, as graphs that are built for one strand
            (kept,) = step.captured._kept
            both, one = kept.graphs, replace(kept.graphs, strands=build(kept.graphs.joint, strands=1, codegen=case.codegen))
        kept.graphs = one
        assert_alike(woven, trained(model, run), bitwise=True)
        kept.graphs = both
        assert_alike(woven, trained(plain, partial(plain_loop, plain, case, count)), bitwise=False)
    assert len(step.captured) == 1


# ------------------------------------------------------------------------------------------------ cases


OWN, FAMILIES, SHARED = ("gpt", "llama", "moe"), ("hf-gpt2", "hf-llama", "hf-mixtral"), ("tp", "sp", "cp", "ep")
EVERY_MODEL = [
    *((model, "alone") for model in (*OWN, *FAMILIES)),
    *((model, shared) for model in OWN for shared in SHARED if shared != "ep" or model == "moe"),
]
INDUCTOR = [*((model, "alone") for model in (*OWN, *FAMILIES)), ("gpt", "tp"), ("llama", "sp"), ("moe", "ep")]
EVERY = {
    str(case): case
    for case in (
        *(Case(*model, *kind) for model in EVERY_MODEL for kind in itertools.product((True, False), (True, False))),
        *(Case(*model, codegen="backend") for model in EVERY_MODEL),
        *(Case(*model, codegen="inductor") for model in INDUCTOR),
    )
}
BY_DEFAULT = {
    str(case): case
    for case in (
        Case("gpt"),
        Case("llama", tied=False),
        Case("moe", dropout=False),
        *(Case(family) for family in FAMILIES),
        Case("hf-gpt2", codegen="backend"),
        Case("gpt", "tp"),
        Case("llama", "sp", dropout=False, tied=False),
        Case("moe", "ep", tied=False),
        Case("gpt", "cp", dropout=False),
    )
}


def names(cases: dict[str, Case], *, alone: bool) -> list[str]:
    return [name for name, case in cases.items() if (case.shared == "alone") == alone]


def check_few(name: str) -> None:
    check(EVERY[name], FEW)


def check_many(name: str) -> None:
    check(EVERY[name], MANY)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.system
@pytest.mark.parametrize("name", names(BY_DEFAULT, alone=True))
def test_one_rank(name: str) -> None:
    check_few(name)


@pytest.fixture(scope="module")
def two_ranks(ask_ranks: Any) -> Any:
    return ask_ranks(check_few, names(BY_DEFAULT, alone=False))


@pytest.mark.system
@pytest.mark.parametrize("name", names(BY_DEFAULT, alone=False))
def test_two_ranks(name: str, two_ranks: Any) -> None:
    two_ranks.check(name)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("name", names(EVERY, alone=True))
def test_one_rank_all(name: str) -> None:
    check_many(name)


@pytest.fixture(scope="module")
def two_ranks_all(ask_ranks: Any, request: pytest.FixtureRequest) -> Any:
    """Of the cases that this run has drawn."""
    return ask_ranks(check_many, names_drawn(request, test_two_ranks_all))


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", names(EVERY, alone=False))
def test_two_ranks_all(name: str, two_ranks_all: Any) -> None:
    two_ranks_all.check(name)


@pytest.mark.system
def test_every_default_case_is_one_of_all() -> None:
    assert BY_DEFAULT.keys() <= EVERY.keys() and len({astuple(case) for case in EVERY.values()}) == len(EVERY)
