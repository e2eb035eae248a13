"""Causal attention over context-parallel ranks, keys and values travelling round the ring of them.

In: queries, keys and values of the two pieces of a sequence that this rank holds (`attention.context_part`). Out:
attention to the whole sequence before each query. Ring attention (Liu et al., 2023): every rank sends the keys and
values that it has to the next one while it attends to them, and merges what it finds by the logarithms of the softmax's
denominators. With n ranks there are n - 1 transfers; a rank has never more than two foreign parts of keys and values, one
that it attends to and one that arrives.

Of n ranks, rank r holds pieces r and 2n-1-r of 2n. To its own keys attention is causal, since its pieces are in order. Of
those of a rank before it all its queries see the early piece and none the late one; those of a rank after it are seen
whole, by its late queries alone. So each step is half of a square without a mask, on every rank.

Backward is a ring in the other direction: keys and values travel again, and the sum of their gradients follows them, one
step behind, until it is home. Of a step's transfers each is launched before the step's compute and waited for after it.

Ranks differ in the sizes of splits and in nothing else: those that plan together must have the same operators.
"""

from __future__ import annotations

from typing import Any

import torch

from helixrt.parallel.flash_private import attend, attend_backward
from helixrt.parallel.group import Group
from helixrt.parallel.ring_shift_private import ring_shift

_wait = torch.ops._c10d_functional.wait_tensor

FORWARD, BACKWARD = 1, -1  # directions: a compiler must not take the transfers of backward for those of forward
QUERIES, KEYS = 2, 3  # dimensions of positions: of q, and of keys and values in one tensor


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Group) -> torch.Tensor:
    """q [batch, heads, seq, head_dim]; k, v [batch, kv_heads, seq, head_dim]; gives q's shape.

    `seq`, a multiple of 2, is what this rank holds; query head h uses key-value head h // (heads / kv_heads). Sums over
    ranks are in float32 at least. Under autocast it computes in that dtype, as `scaled_dot_product_attention` does.
    """
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (each.to(torch.get_autocast_dtype(q.device.type)) for each in (q, k, v))
    return _Ring.apply(q, torch.stack((k, v)), cp.name, cp.rank, cp.size)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, mine: torch.Tensor, group: str, rank: int, size: int) -> torch.Tensor:
        """`mine` [2, batch, kv_heads, seq, head_dim] are keys and values."""
        arriving = ring_shift(mine, FORWARD, group)
        out, denominator = attend(q, *_per_head(mine, q), causal=True)
        out = out.to(denominator.dtype)
        for step in range(1, size):
            piece = _wait(arriving)
            if step < size - 1:
                arriving = ring_shift(piece, FORWARD, group)
            queries, keys = _seen(q.shape[QUERIES], before=(rank - step) % size < rank)
            asking = q.split(queries, QUERIES)[1]
            found = attend(asking, *_per_head(piece.split(keys, KEYS)[0], q), causal=False)
            out, denominator = _merge(out, denominator, *found, queries)
        ctx.group, ctx.rank, ctx.size = group, rank, size
        out = out.to(q.dtype)
        ctx.save_for_backward(q, mine, out, denominator)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, mine, out, denominator = ctx.saved_tensors
        group, rank, size, gradient = ctx.group, ctx.rank, ctx.size, grads[0].contiguous()
        arriving = ring_shift(mine, BACKWARD, group)
        of_q, of_piece = _gradients(gradient, q, mine, out, denominator, causal=True)
        following = ring_shift(of_piece, BACKWARD, group)
        for step in range(1, size):
            piece = _wait(arriving)
            if step < size - 1:
                arriving = ring_shift(piece, BACKWARD, group)
            queries, keys = _seen(q.shape[QUERIES], before=(rank + step) % size < rank)
            asking = [t.split(queries, QUERIES)[1] for t in (gradient, q, out, denominator)]
            more_of_q, more_of_piece = _gradients(
                asking[0], asking[1], piece.split(keys, KEYS)[0], asking[2], asking[3], causal=False
            )
            kept, rest = of_q.split(queries, QUERIES)
            of_q = torch.cat((kept, rest + more_of_q), QUERIES)
            rest, kept = _wait(following).split(keys, KEYS)
            following = ring_shift(torch.cat((rest + more_of_piece, kept), KEYS), BACKWARD, group)
        return of_q.to(q.dtype), _wait(following).to(mine.dtype), None, None, None


def _seen(length: int, before: bool) -> tuple[list[int], list[int]]:
    """How queries split into those that see nothing of another rank's keys and others, and these keys into seen and not.

    `before`: the other rank comes before this one, so all queries see the first half of its keys; else the second half of the
    queries sees all of them.
    """
    half = length // 2
    return ([0, length], [half, half]) if before else ([half, half], [length, 0])


def _per_head(piece: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [batch, heads, keys, head_dim], repeated where query heads share them."""
    k, v = piece.unbind(0)
    shared = q.shape[1] // k.shape[1]
    return (k, v) if shared == 1 else (k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1))


def _merge(
    out: torch.Tensor, denominator: torch.Tensor, more: torch.Tensor, more_denominator: torch.Tensor, queries: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to keys so far and, for the second part of the queries, to more of them."""
    kept, rest = out.split(queries, QUERIES)
    kept_denominator, rest_denominator = denominator.split(queries, QUERIES)
    total = torch.logaddexp(rest_denominator, more_denominator)
    share, more_share = ((each - total).exp().unsqueeze(-1) for each in (rest_denominator, more_denominator))
    merged = rest * share + more * more_share
    return torch.cat((kept, merged), QUERIES), torch.cat((kept_denominator, total), QUERIES)


def _gradients(
    gradient: torch.Tensor, q: torch.Tensor, piece: torch.Tensor, out: torch.Tensor, denominator: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of q by these keys and values, and of these, in the denominators' dtype."""
    of_q, of_k, of_v = attend_backward(gradient, q, *_per_head(piece, q), out, denominator, causal)
    of_piece = torch.stack((of_k, of_v)).to(denominator.dtype)
    shared = q.shape[1] // piece.shape[2]
    if shared > 1:
        of_piece = of_piece.unflatten(2, (piece.shape[2], shared)).sum(3)
    return of_q.to(denominator.dtype), of_piece
