"""Attention of some queries to some keys, with what it takes to merge it with attention to others.

In: q [batch, heads, queries, head_dim], k and v [batch, heads, keys, head_dim]. Out: softmax(q k^T / sqrt(head_dim)) v,
the logarithm of each softmax's denominator, and gradients, of these keys' part of a softmax over more keys (Dao et al.,
FlashAttention, 2022, algorithms 2 and 4).

By torch's fused operators on the processor and, in half precision, on CUDA; they are private in torch 2.13 to 2.15, since
`scaled_dot_product_attention` gives no denominators. Elsewhere, and where these operators have another shape, by matrix
products that hold all scores at once.
"""

from __future__ import annotations

import math

import torch

from helixrt.private_api import FLASH, FLASH_CUDA, usable

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FUSED_MULTIPLE = 8  # of head_dim, for the fused operators of CUDA


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, like q, and the logarithms of the denominators [batch, heads, queries], in float32 or wider.

    `causal`: query i sees keys 0 to i.
    """
    if _fused_on_cpu(q):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if _fused_on_cuda(q):
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return products(q, k, v, causal)


def attend_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    denominator: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, those of q by these keys alone.

    `out` and `denominator` are as of `attend` over all keys that the queries see, `gradient` is that of this output.
    """
    if _fused_on_cpu(q):
        saved = (gradient, q, k, v, out, denominator)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, causal)
    if _fused_on_cuda(q):
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout
        sizes = (None, None, q.shape[2], k.shape[2])  # None: sequences of one length
        saved = (gradient, q, k, v, out, denominator)
        return _aten._scaled_dot_product_flash_attention_backward(*saved, *sizes, 0.0, causal, unused, unused)
    return products_backward(gradient, q, k, v, out, denominator, causal)


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, by matrix products."""
    scores = _scores(q, k, causal)
    denominator = scores.logsumexp(-1)
    return ((scores - denominator.unsqueeze(-1)).exp().to(q.dtype) @ v), denominator


def products_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    denominator: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `attend_backward`, by matrix products."""
    share = (_scores(q, k, causal) - denominator.unsqueeze(-1)).exp()
    lost = (gradient * out).sum(-1, keepdim=True, dtype=share.dtype)
    of_scores = (share * (gradient @ v.transpose(-2, -1) - lost) / math.sqrt(q.shape[-1])).to(q.dtype)
    return of_scores @ k, of_scores.transpose(-2, -1) @ q, share.to(q.dtype).transpose(-2, -1) @ gradient


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _usable_on(device: str) -> bool:
    return usable(FLASH if device == "cpu" else FLASH_CUDA)


def _fused_on_cpu(q: torch.Tensor) -> bool:
    return q.device.type == "cpu" and _usable_on("cpu")


def _fused_on_cuda(q: torch.Tensor) -> bool:
    fits = q.device.type == "cuda" and q.dtype in _HALF and q.shape[-1] % _FUSED_MULTIPLE == 0 and q.shape[-1] <= 256
    return fits and _usable_on("cuda")
