"""Unmodified models over stages and tp ranks, each rank a process: trained as a plain loop over the whole model trains them.

All ranks of a mesh train all models of a test in turn; each test looks at one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.errors import Fatal
from tests.engines import tensor_models
from tests.job.drawn import Divided, nowhere, over_heads
from tests.job.mesh_cells import answers_by_mesh, cells
from tests.job.test_captured import BATCH, STEPS, WIDTH, Batches, StageHost, plain, trained, vectors

pytestmark = pytest.mark.system  # each rank captures or builds large models

LAYERS, LENGTH = 4, 6
VOCABULARY = 21  # two ranks have 11 and 10 rows
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
}


def own() -> nn.Module:
    """Its plan cuts the hidden state along the sequence between the layers' parts."""
    return tensor_models.Own()


class Gained(nn.Module):
    """Its layers' gains are whole on every rank, which sees a part of what they are applied to."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
            self.gain = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)) * self.gain)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x * scale)


GAINED: dict[str, Any] = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
SUMMED = {"layers.*.gain": "replicated_with_grad_allreduce"}


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": LAYERS, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**small, **drops, bos_token_id=0, eos_token_id=0))


def llama(dropout: float = 0.0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=dropout))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 3, "output_router_logits": True, "experts_implementation": "batched_mm"}
    return MixtralForCausalLM(MixtralConfig(**SMALL, **experts, num_key_value_heads=2))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2))


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL))


def phi() -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(**SMALL))


def next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def labelled() -> Batches:
    return [((), {"input_ids": tokens, "labels": tokens}, None) for tokens in texts()]


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Any = None
    plan: Callable[[], Mapping[str, Any] | None] = lambda: None  # the model's own
    batches: Callable[[], Batches] = labelled
    dtype: torch.dtype = torch.float64  # of the parameters
    autocast: torch.dtype | None = None
    divided: Callable[[int], Divided] = lambda ranks: nowhere  # what is dropped from, over so many tp ranks

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return self.build().to(self.dtype)


CASES = {
    "own": Case(own, next_token, tensor_models.own_plan, lambda: [((tokens,), {}, tokens) for tokens in texts()]),
    "gained": Case(Gained, mse_loss, lambda: GAINED | SUMMED, vectors),
    "unsummed": Case(Gained, mse_loss, lambda: GAINED, vectors),
    "gpt2": Case(gpt2),
    "gpt2-bfloat16": Case(gpt2, dtype=torch.float32, autocast=torch.bfloat16),
    "gpt2-dropout": Case(lambda: gpt2(0.2)),  # over tp ranks its attention is whole on each
    "llama-dropout": Case(lambda: llama(0.2), divided=over_heads),
    "llama": Case(llama),
    "mixtral": Case(mixtral),
    "qwen2": Case(qwen2),
    "gpt_neox": Case(gpt_neox),
    "phi": Case(phi),
}


def whole(mesh: ReplicaMesh, name: str, part: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """What the tp ranks have parts of, put together; what all of them have whole is the same on each."""
    parts: list[Any] = [None] * mesh.size("tp")
    dist.all_gather_object(parts, part, group=mesh.group("tp"))
    cut = [dim for dim in range(part.dim()) if part.shape[dim] != size[dim]]
    if not cut:
        assert all(torch.equal(each, part) for each in parts), name
        return part
    (dim,) = cut
    blocks = 2 if name.endswith("gate_up_proj") else 1  # two matrices in one
    return torch.cat([each.chunk(blocks, dim)[block] for block in range(blocks) for each in parts], dim)


def check(said: str) -> None:
    name, schedule, *axes = said.split()
    case = CASES[name]
    mesh = ReplicaMesh({axis[:2]: int(axis[2:]) for axis in axes}, dist.get_rank(), timeout=timedelta(seconds=600))
    host = StageHost(mesh.rank("pp"), mesh.size("pp"), mesh.group("pp"), mesh)
    tp_plan = case.plan() if mesh.size("tp") > 1 else None
    if name == "unsummed":
        with pytest.raises(Fatal, match=r"the gradient of layers\.\d\.gain differs between rank tp 0 and rank tp 1"):
            trained(host, case.model(), case.loss, case.batches(), tp_plan, schedule=schedule)
        return
    state, found = trained(host, case.model(), case.loss, case.batches(), tp_plan, schedule=schedule, autocast=case.autocast)
    divided = case.divided(mesh.size("tp"))
    expected, figures, validated = plain(case.model(), case.loss, case.batches(), case.autocast, divided)
    rel = 1e-6 if case.autocast is None else 1e-2
    assert found == [(pytest.approx(a, rel=rel), pytest.approx(b, rel=3 * rel)) for a, b in figures]
    # sums in another order may be rounded another way where losses and routers take float32 of them
    atol = 1e-9 if case.batches is labelled and mesh.size("tp") > 1 else 1e-12
    atol = 2e-3 if case.autocast is not None else atol
    cuts = 0
    for key, part in state.items():
        cuts += part.shape != expected[key].shape
        together = part if mesh.size("tp") == 1 else whole(mesh, key, part, expected[key].shape)
        torch.testing.assert_close(together, expected[key], rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
    assert (cuts > 0) == (mesh.size("tp") > 1)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(state))
    assert set().union(*names) == set(expected)
    ((step, values),) = host.validated
    assert step == STEPS and values["value"] == pytest.approx(validated, rel=rel)


FAMILIES = ("gpt2", "llama", "mixtral", "qwen2", "gpt_neox", "phi")
MESHES = {  # the ranks, and what they train by which schedule
    "pp2 tp2": ["own 1f1b", "gained zb", "unsummed 1f1b"],
    "pp2 tp2 families": [f"{name} {schedule}" for name, schedule in zip(FAMILIES, ("1f1b", "zb") * 3, strict=True)],
    "pp2": ["qwen2 1f1b", "gpt_neox zb", "phi 1f1b"],
    "pp4": [*(f"{name} 1f1b" for name in FAMILIES), "gpt2-dropout 1f1b"],
    "tp2": [f"{name} auto" for name in FAMILIES],
    "tp2 dropout": ["gpt2-dropout auto", "llama-dropout auto"],
    "pp2 tp2 others": ["gpt2-bfloat16 zb", "llama-dropout 1f1b", "gpt2 zbv", "llama interleaved", "qwen2 dualpipev"],
}


def names_of(mesh: str) -> list[str]:
    axes = mesh.removesuffix(" families").removesuffix(" others").removesuffix(" dropout")
    return [f"{each} {axes}" for each in MESHES[mesh]]


@pytest.fixture(scope="module")
def worlds(ask_ranks: Any, request: pytest.FixtureRequest) -> Callable[[str], Any]:
    return answers_by_mesh(ask_ranks, check, request, test_ranks_train_as_a_plain_loop_does)


@pytest.mark.parametrize(("mesh", "name"), cells({mesh: names_of(mesh) for mesh in MESHES}, "pp2 tp2"))
def test_ranks_train_as_a_plain_loop_does(worlds: Callable[[str], Any], mesh: str, name: str) -> None:
    worlds(mesh).check(name)
