"""Causal attention, over one rank's sequence or one that is spread over context-parallel ranks.

With n context ranks a sequence is cut into 2n pieces and rank r holds pieces r and 2n-1-r: under a causal mask the
early piece has little to attend to and the late one much, so that all ranks have equal work. There are two variants
(`CONTEXTS`):

- "gathered": keys and values are gathered, in one collective, before attention (Dubey et al., The Llama 3 Herd of Models,
  2024, section 3.3.2): with grouped queries they are small. Their gradients are reduce-scattered.
- "ring": they travel round the ring of ranks by send and receive, behind attention to those that are there
  (`ring_attention`), the variant that DHelix evaluates; no rank holds all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from helixrt.parallel import CONTEXTS
from helixrt.parallel.collective_functions import gather
from helixrt.parallel.group import Group
from helixrt.parallel.ring_attention import ring_attention


def context_part(x: torch.Tensor, dim: int, cp: Group | None) -> torch.Tensor:
    """This rank's two pieces along `dim` of a whole sequence (tokens, targets or a table of positions).

    The size of `dim` must be a multiple of twice the number of ranks.
    """
    if cp is None:
        return x
    pieces = x.chunk(2 * cp.size, dim)
    assert len(pieces) == 2 * cp.size and pieces[0].shape == pieces[-1].shape
    return torch.cat((pieces[cp.rank], pieces[2 * cp.size - 1 - cp.rank]), dim)


def position_rows(table: torch.Tensor, count: int, cp: Group | None) -> torch.Tensor:
    """Rows of a table of positions for the `count` positions that this rank holds."""
    return context_part(table[: count * (cp.size if cp else 1)], 0, cp)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Group | None, context: str) -> torch.Tensor:
    """q [batch, heads, seq, head_dim]; k, v [batch, kv_heads, seq, head_dim]; gives q's shape.

    `seq` is what this rank holds; query head h uses key-value head h // (heads / kv_heads). `context`, one of CONTEXTS, says
    how ranks of `cp` come by the others' keys and values.
    """
    assert context in CONTEXTS, context
    if cp is not None and context == "ring":
        return ring_attention(q, k, v, cp)
    shared = q.shape[1] // k.shape[1]
    if cp is not None:
        k, v = _whole(k, v, cp)
    if shared > 1:
        k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
    if cp is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    early, late = q.chunk(2, dim=2)
    length = early.shape[2]
    parts = []
    for piece, queries in ((cp.rank, early), (2 * cp.size - 1 - cp.rank, late)):
        seen = (piece + 1) * length
        mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(piece * length)
        # Split, not sliced: a slice of all would be no operator, and ranks make the same plan only with the same operators.
        keys, values = (t.split((seen, t.shape[2] - seen), dim=2)[0] for t in (k, v))
        parts.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask))
    return torch.cat(parts, dim=2)


def _whole(k: torch.Tensor, v: torch.Tensor, cp: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole sequence, in its order."""
    batch, heads, seq, size = k.shape
    pairs = gather(torch.stack((k, v)), 0, cp.name, cp.size).view(cp.size, 2, batch, heads, 2, seq // 2, size)
    early, late = pairs.unbind(4)
    pieces = torch.cat((early, late.flip(0)))
    whole = pieces.movedim(0, 3).reshape(2, batch, heads, cp.size * seq, size)
    return whole[0], whole[1]
