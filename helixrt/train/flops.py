"""Floating-point operations of the built-in models, for model FLOPs utilisation.

In: a model's settings and the length of its sequences. Out: operations of forward and backward for one token. Matrix products
alone count (two operations for each multiplication and addition), attention over the whole sequence as if there were no mask,
and backward as twice forward (Chowdhery et al., PaLM, 2022, appendix B). A token counts with the experts that it chooses.
"""

from __future__ import annotations

from helixrt.train.config import ModelConfig
from helixrt.train.models.moe import CHOICES


def forward_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Of one forward."""
    dim, gated = model.dim, model.family == "llama"
    narrow = dim // model.heads * model.kv_heads if gated else dim  # keys, and values
    attention = 2 * dim * dim + 2 * dim * narrow + 2 * seq_len * dim
    dense = (3 if gated else 2) * dim * model.ffn
    products = dim * model.vocab
    for layer in range(model.layers):
        network = CHOICES * dense + dim * model.experts if model.has_experts(layer) else dense
        products += attention + network
    return 2.0 * products


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Of forward and backward."""
    return 3.0 * forward_flops_per_token(model, seq_len)
