"""A GPT: pre-norm blocks, learned positions, GELU (Radford et al., 2019).

In: tokens [batch, seq] int64 in the first chunk, hidden states [batch, seq, dim] after it. Out: hidden
states, or logits [batch, seq, vocab] from the last chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from helixrt.train.config import ModelConfig


class GPTBlock(nn.Module):
    """Causal self-attention and a two-layer GELU network, each normed before and added after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.attention_out = nn.Linear(config.dim, config.dim)
        self.ffn_norm = nn.LayerNorm(config.dim)
        self.ffn_in = nn.Linear(config.dim, config.ffn)
        self.ffn_out = nn.Linear(config.ffn, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(x))))


class GPT(nn.Module):
    """The blocks `layers` of a GPT, with the embeddings if `first` and the head if `last`."""

    def __init__(self, config: ModelConfig, seq_len: int, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        if first or (last and config.tied):
            self.embedding = nn.Embedding(config.vocab, config.dim)
        if first:
            self.positions = nn.Embedding(seq_len, config.dim)
        self.layers = nn.ModuleDict({str(i): GPTBlock(config) for i in layers})
        if last:
            self.norm = nn.LayerNorm(config.dim)
            self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embedding(x) + self.positions.weight[: x.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        if self.last:
            x = F.linear(self.norm(x), self.embedding.weight if self.head is None else self.head.weight)
        return x
