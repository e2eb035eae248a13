"""A mixture of experts in place of a block's feed-forward network.

In and out: hidden states [batch, seq, dim]. Each token goes to its two likeliest experts (GShard: Lepikhin et al.,
2021), weighted by their probabilities divided by their sum. An expert takes at most `capacity` times its even share of
a rank's micro-batch; choices beyond that are dropped, first choices served before second ones, earlier tokens before
later ones, and what is dropped adds nothing to the residual stream. All shapes follow from the input's, whatever
the router decides, so graphs can be captured. With `capacity` 0 there is no limit (`uneven_experts`): nothing is dropped, and
shapes follow from the router, so autograd must run it.

Ranks of ep each hold some of the experts, and tokens of their own, which two all-to-alls take there and back. Ranks of
tp each hold a part of every expert and route the same tokens in the same way.

The auxiliary loss for even load is experts * sum over experts of (share of choices) * (mean probability), 1 when
even (Fedus et al., Switch Transformers, 2022, equation 4, with both choices counted). It is not part of the model's
output: `attach` gives it its gradient in backward, so that it works in any stage of a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from helixrt.parallel.collective_functions import attach, exchange
from helixrt.train.config import ModelConfig
from helixrt.train.models.linears import StackedLinear, into_block, out_of_block
from helixrt.train.models.parallel import Layout, ParallelGroups
from helixrt.train.models.uneven_experts import compute_all

CHOICES = 2  # experts per token


@dataclass(frozen=True)
class Routing:
    """Where tokens go. Entry c * tokens + t of each vector is choice c of token t.

    `expert` and `place` [choices * tokens] int64: the expert and the place in its queue; `kept` bool: places below the
    capacity; `weight`: of the expert's output, not zeroed where dropped; `auxiliary_loss`: a scalar.
    """

    expert: torch.Tensor
    place: torch.Tensor
    kept: torch.Tensor
    weight: torch.Tensor
    auxiliary_loss: torch.Tensor


def expert_capacity(tokens: int, experts: int, factor: float) -> int:
    """How many choices one expert takes of `tokens` tokens of one rank's micro-batch."""
    return max(1, math.ceil(factor * CHOICES * tokens / experts))


def route(logits: torch.Tensor, capacity: int) -> Routing:
    """Choose for logits [tokens, experts]; of equal probabilities the expert of the lower number wins."""
    tokens, experts = logits.shape
    probability = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
    first = probability.argmax(dim=-1)  # the first of several maxima, which topk does not promise
    second = probability.masked_fill(F.one_hot(first, experts).bool(), -1.0).argmax(dim=-1)
    chosen = torch.stack((first, second))
    weight = probability.gather(1, chosen.T).T
    weight = weight / weight.sum(dim=0)
    expert = chosen.flatten()
    member = F.one_hot(expert, experts)
    place = (member.cumsum(dim=0) * member).sum(dim=1) - 1
    share = member.sum(dim=0).to(probability.dtype) / (CHOICES * tokens)
    balance = experts * (share * probability.mean(dim=0)).sum()
    return Routing(expert, place, place < capacity, weight.flatten().to(logits.dtype), balance)


class MixtureOfExperts(nn.Module):
    """Router and experts; GELU networks in a GPT, SwiGLU in a Llama.

    `auxiliary_scale` multiplies the auxiliary loss besides `config.auxiliary`: 1 / micro-batches where the model's
    loss is the mean over micro-batches.
    """

    def __init__(self, config: ModelConfig, groups: ParallelGroups, auxiliary_scale: float) -> None:
        super().__init__()
        self.experts, self.groups, self.gated = config.experts, groups, config.family == "llama"
        self.capacity_factor = config.capacity
        # Every rank of tp adds the router's whole auxiliary gradient to what is summed over tp.
        self.auxiliary = config.auxiliary * auxiliary_scale / groups.tp_size
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        wide = (config.ffn, config.ffn) if self.gated else (config.ffn,)
        self.ffn_in = StackedLinear(config.experts, config.dim, wide, groups, cut="outputs")
        self.ffn_out = StackedLinear(config.experts, config.ffn, (config.dim,), groups, cut="inputs")

    def layout(self) -> Mapping[str, Layout]:
        # A choice's weight multiplies each tp rank's summand of an expert's output, so its gradient comes in summands.
        return {"router.weight": Layout(partial=self.groups.tp is not None)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = into_block(x, self.groups)
        tokens = x.flatten(0, 1)
        if self.capacity_factor:
            capacity = expert_capacity(tokens.shape[0], self.experts, self.capacity_factor)
            routing = route(self.router(tokens), capacity)
            mixed = self._combine(self._compute(self._dispatch(tokens, routing, capacity)), routing, capacity)
        else:
            routing = route(self.router(tokens), CHOICES * tokens.shape[0])
            rows = tokens.repeat(CHOICES, 1)
            outputs = compute_all(rows, routing.expert, self.experts, self._network_of_rows, self.groups.ep)
            mixed = (outputs * routing.weight.unsqueeze(1)).unflatten(0, (CHOICES, -1)).sum(dim=0)
        if self.auxiliary and self.training:
            mixed = attach(mixed, self.auxiliary * routing.auxiliary_loss)
        return out_of_block(mixed.view_as(x), self.groups)

    def _dispatch(self, tokens: torch.Tensor, routing: Routing, capacity: int) -> torch.Tensor:
        """Tokens [tokens, dim] to the experts' queues [experts, capacity, dim], zeros where one is not full."""
        slots = self.experts * capacity
        slot = torch.where(routing.kept, routing.expert * capacity + routing.place, slots)  # dropped: one row too many
        queues = tokens.new_zeros(slots + 1, tokens.shape[1]).index_add(0, slot, tokens.repeat(CHOICES, 1))
        return queues[:slots].view(self.experts, capacity, -1)

    def _compute(self, queues: torch.Tensor) -> torch.Tensor:
        """Every expert's outputs for its queue, on the rank that has the queue."""
        ep = self.groups.ep
        if ep is None:
            return self._network(queues)
        experts, capacity, dim = queues.shape
        mine = experts // ep.size
        # Own experts' queues of all ranks, [ranks, mine, capacity, dim], side by side for one product per expert.
        arrived = exchange(queues, ep.name, ep.size).view(ep.size, mine, capacity, dim).transpose(0, 1)
        done = self._network(arrived.reshape(mine, ep.size * capacity, dim))
        back = done.view(mine, ep.size, capacity, dim).transpose(0, 1).reshape(experts, capacity, dim)
        return exchange(back, ep.name, ep.size)

    def _network(self, queues: torch.Tensor) -> torch.Tensor:
        return self.ffn_out(self._activated(self.ffn_in(queues)))

    def _network_of_rows(self, rows: torch.Tensor, loads: Sequence[int]) -> torch.Tensor:
        return self.ffn_out.of_rows(self._activated(self.ffn_in.of_rows(rows, loads)), loads)

    def _activated(self, wide: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return F.gelu(wide)
        gate, up = wide.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _combine(self, outputs: torch.Tensor, routing: Routing, capacity: int) -> torch.Tensor:
        """The experts' outputs [experts, capacity, dim], weighted, back at their tokens [tokens, dim]."""
        slot = routing.expert * capacity + routing.place.clamp(max=capacity - 1)
        weight = (routing.weight * routing.kept).unsqueeze(1)
        return (outputs.flatten(0, 1).index_select(0, slot) * weight).unflatten(0, (CHOICES, -1)).sum(dim=0)
