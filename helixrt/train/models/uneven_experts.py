"""Experts that take every token they are chosen for, however uneven that is.

In: rows, the expert of each, and what computes the experts of this rank. Out: each row's output of its expert. Rows are
sorted by expert, so that an expert's are one piece; ranks of ep tell each other how many rows go to each expert and then
send them, by an all-to-all with pieces of these sizes, and the outputs back. Nothing is padded and nothing dropped, as in
MegaBlocks (Gale et al., 2023).

How many rows there are is read from tensors by the processor, once per mixture and forward, so no graph can be captured of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from helixrt.parallel.collective_functions import all_to_all, exchange_uneven
from helixrt.parallel.group import Group

Network = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def compute_all(rows: torch.Tensor, expert: torch.Tensor, experts: int, network: Network, ep: Group | None) -> torch.Tensor:
    """Outputs for `rows` [rows, dim], row i's of the expert number `expert[i]` (int64) of `experts`.

    `network(rows, loads)` computes this rank's experts, `loads[i]` rows of its i-th one after those of the ones before.
    Ranks of `ep` hold equally many experts, in the order of ranks; each calls with rows of its own, none perhaps.
    """
    order = expert.argsort(stable=True)
    sorted_rows = rows.index_select(0, order)
    counts = torch.bincount(expert, minlength=experts)
    done = network(sorted_rows, counts.tolist()) if ep is None else _elsewhere(sorted_rows, counts, network, ep)
    return done.index_select(0, order.argsort())


def _elsewhere(rows: torch.Tensor, counts: torch.Tensor, network: Network, ep: Group) -> torch.Tensor:
    """Outputs for rows sorted by expert, `counts` [experts] of each expert, by the ranks of `ep`."""
    mine = counts.shape[0] // ep.size
    even = [mine] * ep.size
    arriving = all_to_all(counts, ep.name, even, even)  # for each rank how many rows it has for each expert of this one
    going, coming = torch.stack((counts, arriving)).view(2, ep.size, mine).tolist()
    sent, received = [sum(loads) for loads in going], [sum(loads) for loads in coming]
    arrived = exchange_uneven(rows, ep.name, sent, received)
    expert = torch.arange(mine, device=rows.device).repeat(ep.size).repeat_interleave(arriving, output_size=sum(received))
    order = expert.argsort(stable=True)
    done = network(arrived.index_select(0, order), [sum(loads) for loads in zip(*coming, strict=True)])
    return exchange_uneven(done.index_select(0, order.argsort()), ep.name, received, sent)
