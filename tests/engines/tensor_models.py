"""The models that the tests of tensor-parallel replicas train: tiny ones of Hugging Face transformers, and one of our own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, SEQUENCE = 64, 16, 16
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQUENCE,
    "use_cache": False,
}
_GATED = {**_COMMON, "intermediate_size": 24, "num_key_value_heads": 2}


def loss_sum(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of the next token at all positions; the sequence is closed to a ring."""
    logits = model(input_ids=tokens)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum")


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(_GATED | settings)))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_GATED, num_local_experts=4, num_experts_per_tok=2, output_router_logits=False)
    config._experts_implementation = "eager"  # the others have no float64 on every machine
    return MixtralForCausalLM(config)


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_GATED))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_GATED, head_dim=8, tie_word_embeddings=True))


def phi() -> Any:
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(**_COMMON, intermediate_size=24, resid_pdrop=0.2, embd_pdrop=0.1, qk_layernorm=False))


def gpt_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**_COMMON, intermediate_size=24, hidden_dropout=0.1))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.1,
    )
    config.use_cache = False
    return GPT2LMHeadModel(config)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Own(nn.Module):
    """A model whose plan has torch's own styles, with the hidden state cut along the sequence between the layers' parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def own_plan() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
