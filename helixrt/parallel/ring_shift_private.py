"""The operator `helixrt_ring_shift`: every rank of a group sends a tensor to one neighbour and gets the other one's.

In: a tensor, how many ranks forward it goes, and the group's name. Out: a new tensor of the same shape, which may be used
after `_c10d_functional.wait_tensor`, as the result of a functional collective. One send and one receive for each rank
(`torch.distributed.P2POp`'s, grouped where the backend groups them, as NCCL does); nothing else is on the wire.

torch's own functional `isend`, `irecv` and `batch_p2p_ops` have the neighbours' numbers among their arguments, so that
ranks would have different graphs; here these follow from the group. The operator is in the namespace of torch's functional
collectives, because torch's compiler knows by the namespace what it may neither compute twice nor keep where it is not
needed: it put an operator of another namespace into the graphs of forward and backward both.

Private in torch 2.13 to 2.15: that namespace, how a group is found by its name, how a wait finds what it waits for, and how
sends and receives are grouped. What is sent must stay in memory until the wait. Eager execution, captured graphs and
`aot_eager` see to that; whole graphs compiled by Inductor do not, since it knows it of torch's own collectives alone.

Where torch has no such wait or grouping, the operator waits for the messages itself (`torch.distributed.batch_isend_irecv`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from helixrt.private_api import NAMED_GROUPS, RING_SHIFT, require, usable

_NAME = "helixrt_ring_shift"
_LIBRARY = torch.library.Library("_c10d_functional", "FRAGMENT")
_LIBRARY.define(f"{_NAME}(Tensor x, int by, str group_name) -> Tensor")


def _ring_shift(x: torch.Tensor, by: int, group_name: str) -> torch.Tensor:
    require(NAMED_GROUPS)
    group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type, unused-ignore]
    rank, size = group.rank(), group.size()
    sent, received = x.contiguous(), _like(x, by, group_name)
    to, source = (rank + by) % size, (rank - by) % size
    if not usable(RING_SHIFT):
        messages = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=group, group_peer=source),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        return received
    if type(group) is dist.ProcessGroup and group._get_backend(x.device).supports_coalescing:
        group._start_coalescing(x.device)
        group.send([sent], to, 0)
        group.recv([received], source, 0)
        works = [group._end_coalescing(x.device)]
    else:
        works = [group.send([sent], to, 0), group.recv([received], source, 0)]
    for work in works:
        torch._C._distributed_c10d._register_work(received, work)
    return received


def _like(x: torch.Tensor, by: int, group_name: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_LIBRARY.impl(_NAME, _ring_shift, "CompositeExplicitAutograd")
torch.library.register_fake(f"_c10d_functional::{_NAME}", _like, lib=_LIBRARY)


def ring_shift(x: torch.Tensor, by: int, group: str) -> torch.Tensor:
    """The tensor of the rank `by` places before this one in the group called `group`, which gets `x`'s `by` places after.

    Every rank calls it, in the same order, with equal shapes. It returns at once: the result may be used after
    `_c10d_functional.wait_tensor`, and `x` must not be changed before. No gradient of its own.
    """
    return torch.ops._c10d_functional.helixrt_ring_shift(x, by, group)
