"""A Llama-style model: RMSNorm, rotary positions, SwiGLU, grouped-query attention (Touvron et al., 2023).

In: tokens [batch, seq] int64 in the first chunk, hidden states [batch, seq, dim] after it. Out: hidden
states, or logits [batch, seq, vocab] from the last chunk. `seq` is what this rank holds: a context-parallel rank's
part of the sequence; between chunks a sequence-parallel rank's part of that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from helixrt.parallel.attention import causal_attention, position_rows
from helixrt.train.config import ModelConfig
from helixrt.train.models.linears import (
    ColumnLinear,
    RowLinear,
    cut_sequence,
    embedding,
    norm_layout,
    sequence_length,
    whole_sequence,
)
from helixrt.train.models.moe import MixtureOfExperts
from helixrt.train.models.parallel import ALONE, Layout, ParallelGroups

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

    def __init__(self, config: ModelConfig, groups: ParallelGroups, experts: bool, auxiliary_scale: float) -> None:
        super().__init__()
        self.groups, self.context, self.head_dim = groups, config.context, config.dim // config.heads
        self.heads, self.kv_heads = config.heads // groups.tp_size, config.kv_heads // groups.tp_size
        shared = config.kv_heads * self.head_dim
        self.attention_norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.qkv = ColumnLinear(config.dim, (config.dim, shared, shared), groups, bias=False)
        self.attention_out = RowLinear(config.dim, config.dim, groups, bias=False)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.moe = MixtureOfExperts(config, groups, auxiliary_scale) if experts else None
        if not experts:
            self.ffn_gate_up = ColumnLinear(config.dim, (config.ffn, config.ffn), groups, bias=False)
            self.ffn_out = RowLinear(config.ffn, config.dim, groups, bias=False)

    def layout(self) -> Mapping[str, Layout]:
        return norm_layout(self, ("attention_norm", "ffn_norm"), self.groups)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        mixed = causal_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, self.groups.cp, self.context)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        if self.moe is not None:
            return x + self.moe(h)
        gate, up = self.ffn_gate_up(h).chunk(2, dim=-1)
        return x + self.ffn_out(F.silu(gate) * up)


class Llama(nn.Module):
    """The blocks `layers` of a Llama, with the embedding if `first` and the head if `last`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        layers: range,
        first: bool,
        last: bool,
        groups: ParallelGroups = ALONE,
        auxiliary_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.first, self.last, self.groups = first, last, groups
        if first or (last and config.tied):
            self.embedding = embedding(config.vocab, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): LlamaBlock(config, groups, config.has_experts(i), auxiliary_scale) for i in layers}
        )
        if last:
            self.norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
            self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary_tables(seq_len, config.dim // config.heads, torch.get_default_dtype())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def layout(self) -> Mapping[str, Layout]:
        return norm_layout(self, ("norm",), self.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = cut_sequence(self.embedding(x), self.groups)
        length = sequence_length(x, self.groups)
        cos, sin = (position_rows(table, length, self.groups.cp) for table in (self.cos, self.sin))
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if self.last:
            x = whole_sequence(self.norm(x), self.groups)
            x = F.linear(x, self.embedding.weight if self.head is None else self.head.weight)
        return x
