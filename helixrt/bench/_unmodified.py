"""Unmodified transformers models with random weights, of a given size, for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from helixrt.bench._arguments import check_least
from helixrt.errors import ConfigError

FAMILIES = ("gpt2", "llama")
HEAD_DIM = 64


@dataclass(frozen=True)
class Shape:
    """`batch` sequences of `seq_len` tokens are a micro-batch. Raises ConfigError for sizes that no model can have."""

    family: str
    layers: int
    dim: int
    vocab: int
    seq_len: int
    batch: int

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError("--family", self.family, f"must be one of {', '.join(FAMILIES)}")
        check_least(self, layers=2, dim=1, vocab=1, seq_len=2, batch=1)
        if self.dim % (2 * HEAD_DIM):
            raise ConfigError("--dim", self.dim, f"must be a multiple of {2 * HEAD_DIM}")

    def __str__(self) -> str:
        size = f"{self.layers} layers of width {self.dim}, {self.vocab} words"
        return f"{self.family}, {size}, micro-batches of {self.batch} x {self.seq_len}"

    def model(self) -> nn.Module:
        """On the meta device, without dropout; it returns its loss. Llama has SwiGLU of 8/3 of the width, and half as many
        heads of keys as of queries."""
        import transformers

        heads = self.dim // HEAD_DIM
        with torch.device("meta"):
            if self.family == "gpt2":
                size = {"n_positions": self.seq_len, "n_embd": self.dim, "n_layer": self.layers, "n_head": heads}
                settings: dict[str, Any] = {**size, "vocab_size": self.vocab, "bos_token_id": 0, "eos_token_id": 0}
                settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
                return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
            config = transformers.LlamaConfig(
                vocab_size=self.vocab,
                hidden_size=self.dim,
                intermediate_size=-(-self.dim * 8 // 3 // HEAD_DIM) * HEAD_DIM,
                num_hidden_layers=self.layers,
                num_attention_heads=heads,
                num_key_value_heads=heads // 2,
                max_position_embeddings=self.seq_len,
                bos_token_id=0,
                eos_token_id=0,
            )
            return transformers.LlamaForCausalLM(config)

    def tokens(self, sequences: int, seed: int = 0) -> dict[str, Any]:
        """Keywords of a call."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.vocab, (sequences, self.seq_len), generator=generator)
        return {"input_ids": drawn, "labels": drawn}
