"""A GPT: pre-norm blocks, learned positions, GELU (Radford et al., 2019).

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
from helixrt.train.models.linears import ColumnLinear, RowLinear, cut_sequence, embedding, norm_layout, whole_sequence
from helixrt.train.models.moe import MixtureOfExperts
from helixrt.train.models.parallel import ALONE, Layout, ParallelGroups


class GPTBlock(nn.Module):
    """Causal self-attention and a two-layer GELU network, each normed before and added after."""

    def __init__(self, config: ModelConfig, groups: ParallelGroups, experts: bool, auxiliary_scale: float) -> None:
        super().__init__()
        self.groups, self.context, self.head_dim = groups, config.context, config.dim // config.heads
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = ColumnLinear(config.dim, (config.dim,) * 3, groups)
        self.attention_out = RowLinear(config.dim, config.dim, groups)
        self.ffn_norm = nn.LayerNorm(config.dim)
        self.moe = MixtureOfExperts(config, groups, auxiliary_scale) if experts else None
        if not experts:
            self.ffn_in = ColumnLinear(config.dim, (config.ffn,), groups)
            self.ffn_out = RowLinear(config.ffn, config.dim, groups)

    def layout(self) -> Mapping[str, Layout]:
        return norm_layout(self, ("attention_norm", "ffn_norm"), self.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (3, -1, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = causal_attention(q, k, v, self.groups.cp, self.context)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + (self.ffn_out(F.gelu(self.ffn_in(h))) if self.moe is None else self.moe(h))


class GPT(nn.Module):
    """The blocks `layers` of a GPT, with the embeddings if `first` and the head if `last`."""

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
        if first:
            self.positions = embedding(seq_len, config.dim)
        self.layers = nn.ModuleDict({str(i): GPTBlock(config, groups, config.has_experts(i), auxiliary_scale) for i in layers})
        if last:
            self.norm = nn.LayerNorm(config.dim)
            self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)

    def layout(self) -> Mapping[str, Layout]:
        return norm_layout(self, ("norm",), self.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embedding(x) + position_rows(self.positions.weight, x.shape[1], self.groups.cp)
            x = cut_sequence(x, self.groups)
        for layer in self.layers.values():
            x = layer(x)
        if self.last:
            x = whole_sequence(self.norm(x), self.groups)
            x = F.linear(x, self.embedding.weight if self.head is None else self.head.weight)
        return x
