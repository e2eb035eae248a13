"""Unmodified transformers models over cp ranks, each rank a process: trained as a plain loop over whole sequences trains them.

All ranks of a mesh train all models of a test in turn; each test looks at one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import helixrt
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.mesh import Mesh
from helixrt.passes.errors import CaptureError
from tests.job.drawn import over_positions
from tests.job.mesh_cells import answers_by_mesh, cells
from tests.job.session_world import session_with
from tests.job.test_captured import BATCH, MICROBATCHES, STEPS, Batches, StageHost, plain, trained
from tests.job.test_captured_ranks import SMALL, VOCABULARY, whole

pytestmark = pytest.mark.system  # each rank captures or builds large models

LENGTH, WINDOW = 8, 3
LONG = SMALL | {"max_position_embeddings": LENGTH}


def next_token(output: Any, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def sum_of_tokens(output: Any, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits.flatten(0, 1), target.flatten(), reduction="sum")


def gpt2(**others: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    calm = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    small = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**(small | calm | others), bos_token_id=0, eos_token_id=0))


def llama(**others: Any) -> nn.Module:
    """With a key head for two query heads; over tp ranks each has one of both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**(LONG | heads | others)))


def mixtral(**others: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 3, "experts_implementation": "batched_mm", "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**(LONG | experts | others)))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, state_size=4))


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=8, n_layer=2, n_head=2))


def without_attention_in_a_layer() -> nn.Module:
    class Along(nn.Module):
        """Each position gets the values of all before it, on its own rank alone."""

        def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
            return hidden_states.cumsum(1), None

    model: Any = llama()
    model.model.layers[1].self_attn = Along()
    return model


def without_positions() -> nn.Module:
    from transformers import GPT2LMHeadModel

    class Ignoring(GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, position_ids: Any = None, **others: Any) -> Any:  # type: ignore[override]
            return super().forward(input_ids, **others)

    return Ignoring(gpt2().config)


def counting() -> nn.Module:
    """Its forward changes a buffer."""
    from transformers import GPT2LMHeadModel

    class Counting(GPT2LMHeadModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, input_ids: Any = None, position_ids: Any = None, **others: Any) -> Any:  # type: ignore[override]
            self.seen.add_(input_ids.sum())
            return super().forward(input_ids, position_ids=position_ids, **others)

    return Counting(gpt2().config)


FAMILIES: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral}


def model_of(build: Callable[..., nn.Module], **others: Any) -> nn.Module:
    torch.manual_seed(3)
    return build(**others).double()


def batches() -> Batches:
    """Tokens, and the next ones."""
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    return [((), {"input_ids": text[:, :-1]}, text[:, 1:]) for text in texts]


def host_of(axes: list[str]) -> StageHost:
    mesh = ReplicaMesh({axis[:2]: int(axis[2:]) for axis in axes}, dist.get_rank(), timeout=timedelta(seconds=600))
    return StageHost(mesh.rank("pp"), mesh.size("pp"), mesh.group("pp"), mesh)


def check(said: str) -> None:
    name, *others = said.split()
    if name in SCENARIOS:
        SCENARIOS[name](host_of(others))
        return
    schedule, context, *axes = others
    host = host_of(axes)
    mesh = host.place.mesh
    build = FAMILIES[name]
    state, found = trained(host, model_of(build), next_token, batches(), schedule=schedule, context=context)
    expected, figures, validated = plain(model_of(build), next_token, batches())
    rel = 1e-6 if mesh.size("tp") > 1 or name == "mixtral" else 1e-10  # rotary tables and routers are in float32
    assert found == [(pytest.approx(a, rel=rel), pytest.approx(b, rel=3 * rel)) for a, b in figures]
    for key, part in state.items():
        together = part if mesh.size("tp") == 1 else whole(mesh, key, part, expected[key].shape)
        torch.testing.assert_close(together, expected[key], rtol=0, atol=rel, msg=lambda text, key=key: f"{key}: {text}")
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(state))
    assert set().union(*names) == set(expected)
    ((step, values),) = host.validated
    assert step == STEPS and values["value"] == pytest.approx(validated, rel=rel)


# ---------------------------------------------------------------- scenarios


def part_of(host: StageHost, model: nn.Module, example: helixrt.ExampleBatch, **options: Any) -> Any:
    session = session_with(host, seed=5, mesh=Mesh(cp=2))
    compiled = helixrt.compile(model, **({"loss": next_token, "microbatches": MICROBATCHES} | options))
    return session, session.parallelize(compiled, example=example)


def weights(host: StageHost) -> None:
    """With sums and weights the ranks may have targets of other numbers; without, ignored targets are refused."""
    ((_, named, target),) = batches()[:1]
    target = target.clone()
    target[:, 5:] = -100
    target[0] = -100
    session, part = part_of(host, model_of(gpt2), helixrt.ExampleBatch(**named, target=target), loss=sum_of_tokens)
    session.register(model=part, optimizers=[torch.optim.SGD(part.parameters(), lr=0.1)])
    shorter: Any = {"input_ids": named["input_ids"][:, :4], "target": target[:, :4]}
    session.evaluate(lambda: part.evaluate(**shorter, weight=int((shorter["target"] != -100).sum())), every=1)
    model = model_of(gpt2)
    loss = sum_of_tokens(model(**named), target) / (items := int((target != -100).sum()))
    loss.backward()
    for step in session.steps([(named["input_ids"], target)], until=1):
        for tokens, goal in step:
            with pytest.raises(MisuseError, match=r"target has ignored positions \(-100\); .*weight="):
                step.train(part, input_ids=tokens, target=goal)
            mean = step.train(part, input_ids=tokens, target=goal, weight=items)
        step.commit()
    assert mean == pytest.approx(loss.item(), rel=1e-10)
    for (name, mine), other in zip(part.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach() - 0.1 * other.grad, rtol=0, atol=1e-12, msg=name)
    with torch.no_grad():
        for other in model.parameters():
            other -= 0.1 * other.grad
        validated = next_token(model(input_ids=shorter["input_ids"]), shorter["target"])
    assert host.validated[-1][1]["value"] == pytest.approx(float(validated), rel=1e-10)


def dropout(host: StageHost) -> None:
    """Of hidden states: each rank drops its own of its positions, as the oracle does of whole sequences."""
    cp = host.place.mesh.size("cp")
    state, found = trained(host, model_of(gpt2, resid_pdrop=0.2, embd_pdrop=0.1), next_token, batches())
    model = model_of(gpt2, resid_pdrop=0.2, embd_pdrop=0.1)
    expected, figures, _ = plain(model, next_token, batches(), divided=over_positions(cp))
    assert found == [(pytest.approx(a, rel=1e-10), pytest.approx(b, rel=1e-10)) for a, b in figures]
    for key, part in state.items():
        torch.testing.assert_close(part, expected[key], rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


def bfloat16(host: StageHost) -> None:
    for context in ("gathered", "ring"):
        options: Any = {"context": context, "autocast": torch.bfloat16}
        state, found = trained(host, model_of(llama).float(), next_token, batches(), **options)
        expected, figures, _ = plain(model_of(llama).float(), next_token, batches(), torch.bfloat16)
        assert found == [(pytest.approx(a, rel=1e-2), pytest.approx(b, rel=3e-2)) for a, b in figures]
        for key, part in state.items():
            torch.testing.assert_close(part, expected[key], rtol=0, atol=2e-3, msg=lambda text, key=key: f"{key}: {text}")


def models_that_are_refused(host: StageHost) -> None:
    ((_, named, target),) = batches()[:1]
    example = helixrt.ExampleBatch(**named, target=target)
    for build, error, message in (
        (lambda: nn.Linear(2, 2), ConfigError, "mesh.cp=2: Linear.*it is no model of transformers"),
        (bloom, ConfigError, "mesh.cp=2: BloomForCausalLM .*AttentionInterface"),
        (mamba, ConfigError, "mesh.cp=2: MambaForCausalLM.*go along the sequence besides attention"),
        (lambda: mixtral(output_router_logits=True), ConfigError, "mesh.cp=2:.*output_router_logits"),
        (lambda: mixtral(sliding_window=WINDOW), CaptureError, "sliding window.*mesh.cp above 1"),
        (lambda: gpt2(attn_pdrop=0.1), CaptureError, "attention dropout of 0.1 cannot be with mesh.cp above 1"),
        (lambda: llama(is_causal=False), CaptureError, "not causal cannot be with mesh.cp above 1"),
        (without_attention_in_a_layer, ConfigError, "mesh.cp=2:.*not each of its 4 layers has the attention"),
        (without_positions, ConfigError, "mesh.cp=2:.*its forward does not use position_ids"),
        (counting, ConfigError, "mesh.cp=2:.*its forward changes the buffer seen"),
    ):
        with pytest.raises(error, match=message):
            part_of(host, model_of(build), example)
    with pytest.raises(ConfigError, match="not each of its 4 layers has the attention"):
        part_of(host, model_of(without_attention_in_a_layer), example, context="ring")
    checkpointed = model_of(without_attention_in_a_layer)
    checkpointed.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="not each of its 4 layers has the attention"):
        part_of(host, checkpointed, example)


def calls_that_are_refused(host: StageHost) -> None:
    ((_, named, target),) = batches()[:1]
    tokens = named["input_ids"]
    for inputs, goal, options, message in (
        ({"input_ids": tokens, "labels": tokens}, None, {}, "labels=.*give helixrt.compile.loss=.*target="),
        ({"input_ids": tokens}, None, {"loss": None}, "loss=None: .*shifts labels within each rank's positions"),
        ({"input_ids": tokens, "attention_mask": tokens}, target, {}, "attention_mask=.* cannot be split over the cp ranks"),
        ({"input_ids": tokens, "position_ids": tokens}, target, {}, "position_ids=.* are made by the session"),
        ({"input_ids": tokens[:, :6]}, target[:, :6], {}, "input_ids=6 positions: positions must be a multiple of 4"),
        ({"input_ids": tokens}, target[:, 0], {}, r"target=\[8\]: must be \[rows, 8, ...\] with mesh.cp above 1"),
        ({"input_ids": tokens}, target, {"chunk_dims": {"input_ids": 1}}, "chunk_dims=.* cannot be with mesh.cp above 1"),
        ({}, target, {}, "input_ids=None: with mesh.cp above 1 a batch has input_ids"),
    ):
        with pytest.raises(ConfigError, match=message):
            part_of(host, model_of(gpt2), helixrt.ExampleBatch(**inputs, target=goal), **options)
    with pytest.raises(ConfigError, match="inputs=1 by position: are no arguments of GPT2LMHeadModel: multiple values"):
        part_of(host, model_of(gpt2), helixrt.ExampleBatch(tokens, input_ids=tokens, target=target))


def own_model_is_left(host: StageHost) -> None:
    """The user's configuration, which another model may share, keeps its attention."""
    ((_, named, target),) = batches()[:1]
    model = model_of(gpt2)
    before = model.config._attn_implementation
    part_of(host, model, helixrt.ExampleBatch(named["input_ids"], target=target))
    assert model.config._attn_implementation == before


SCENARIOS: dict[str, Callable[[StageHost], None]] = {
    each.__name__: each
    for each in (weights, dropout, bfloat16, models_that_are_refused, calls_that_are_refused, own_model_is_left)
}
MESHES = {  # the ranks, and what they train, by which schedule and variant
    "cp2": ["gpt2 auto gathered", "llama auto ring", "mixtral auto gathered", *SCENARIOS],
    "pp2 cp2": ["gpt2 1f1b ring", "llama zb gathered", "mixtral 1f1b gathered"],
    "cp2 tp2": ["gpt2 auto gathered", "llama auto gathered"],
    "pp2 cp2 tp2": ["gpt2 1f1b ring", "llama zb gathered"],
    "cp4": ["llama auto gathered", "gpt2 auto ring"],
}


@pytest.fixture(scope="module")
def worlds(ask_ranks: Any, request: pytest.FixtureRequest) -> Callable[[str], Any]:
    return answers_by_mesh(ask_ranks, check, request, test_ranks_train_as_a_plain_loop_does)


@pytest.mark.parametrize(("mesh", "name"), cells({mesh: [f"{each} {mesh}" for each in MESHES[mesh]] for mesh in MESHES}, "cp2"))
def test_ranks_train_as_a_plain_loop_does(worlds: Callable[[str], Any], mesh: str, name: str) -> None:
    worlds(mesh).check(name)
