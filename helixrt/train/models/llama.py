"""A Llama-style model: RMSNorm, rotary positions, SwiGLU, grouped-query attention (Touvron et al., 2023).

In: tokens [batch, seq] int64 in the first chunk, hidden states [batch, seq, dim] after it. Out: hidden
states, or logits [batch, seq, vocab] from the last chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from helixrt.train.config import ModelConfig

NORM_EPS = 1e-5
ROTARY_BASE = 10_000.0


def rotary_tables(seq_len: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [seq_len, head_dim] of position times frequency, halves repeated."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs (i, i + head_dim / 2) of x [..., seq, head_dim] by their angles (Su et al., 2021)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and SwiGLU, each normed before and added after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.dim // config.heads
        self.attention_norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.qkv = nn.Linear(config.dim, (config.heads + 2 * config.kv_heads) * self.head_dim, bias=False)
        self.attention_out = nn.Linear(config.dim, config.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.ffn_gate_up = nn.Linear(config.dim, 2 * config.ffn, bias=False)
        self.ffn_out = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        gate, up = self.ffn_gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.ffn_out(F.silu(gate) * up)


class Llama(nn.Module):
    """The blocks `layers` of a Llama, with the embedding if `first` and the head if `last`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, seq_len: int, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        if first or (last and config.tied):
            self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleDict({str(i): LlamaBlock(config) for i in layers})
        if last:
            self.norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
            self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary_tables(seq_len, config.dim // config.heads, torch.get_default_dtype())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embedding(x)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if self.last:
            x = F.linear(self.norm(x), self.embedding.weight if self.head is None else self.head.weight)
        return x
