"""Agree: all ranks of a group would launch the same collectives in the same order, or say where they differ.

In: each rank's parts and the group they communicate in. Out: nothing, or a DisagreementError on every rank that names the
first difference; without this check ranks whose orders differ hang in the middle of a step. Every rank calls it, before the
first step and whenever its graphs change. Ranks come from capture and compilation, which take their time, so for all to
arrive it waits as long as the group's own timeout; the deadline is for the exchanges after that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from helixrt.passes.errors import DisagreementError
from helixrt.passes.parts import Part
from helixrt.passes.verify import collective_order, order_hash

DEADLINE_S = 10.0
SHOWN_BYTES = 1 << 20  # of each rank's order, when orders differ


def agree(
    parts: Part | Iterable[Part], group: Any, *, deadline_s: float = DEADLINE_S, device: torch.device | str = "cpu"
) -> None:
    """Compare the collective orders of `parts` (one part, or several in the order they run) over `group`.

    `group` is a c10d process group or backend; `device` is where it takes tensors from. Raises DisagreementError when
    orders differ, a rank does not come within the group's timeout (or `arrival_s`), or does not answer within `deadline_s` of
    each of at most three exchanges.
    """
    name = getattr(group, "group_name", None)
    lines = [line for part in ([parts] if isinstance(parts, Part) else parts) for line in collective_order(part, name)]
    agree_on(lines, group, deadline_s=deadline_s, device=device)


def agree_on(
    lines: Sequence[str],
    group: Any,
    *,
    deadline_s: float = DEADLINE_S,
    arrival_s: float | None = None,
    device: torch.device | str = "cpu",
    what: str = "collective",
    otherwise: str = "would hang",
) -> None:
    """As `agree`, of an order already read off. `what` a line of it is, and what ranks with other ones would do, are for the
    message."""
    exchange(b"\0", group, arrival_s, device)
    hashes = exchange(order_hash(lines), group, deadline_s, device)
    if len(set(hashes)) == 1:
        return
    mine = "\n".join(lines).encode()[:SHOWN_BYTES]
    sizes = exchange(len(mine).to_bytes(8, "little"), group, deadline_s, device)
    longest = min(max(int.from_bytes(size, "little") for size in sizes), SHOWN_BYTES)
    texts = exchange(mine.ljust(longest, b"\n"), group, deadline_s, device)
    orders = [text.rstrip(b"\n").decode(errors="replace").splitlines() for text in texts]
    raise DisagreementError(first_difference(orders, what, otherwise))


def first_difference(orders: Sequence[Sequence[str]], what: str = "collective", otherwise: str = "would hang") -> str:
    """Where ranks' orders part, in one message."""
    for index, row in enumerate(itertools.zip_longest(*orders)):
        other = next((rank for rank, line in enumerate(row) if line != row[0]), None)
        if other is not None:
            first, second = (line or "nothing more" for line in (row[0], row[other]))
            return (
                f"ranks {otherwise}: {what} {index} is {first!r} on rank 0 and {second!r} on rank {other}; "
                "all ranks of a group must run graphs captured from the same code with the same settings"
            )
    return f"ranks {otherwise}: their orders ({what}s) differ after the first {SHOWN_BYTES} bytes of text"


def exchange(mine: bytes, group: Any, deadline_s: float | None, device: torch.device | str) -> list[bytes]:
    """Every rank's bytes, by rank; all must be as long as these. Without a deadline it waits for the group's timeout.

    Raises DisagreementError when a rank does not answer in time.
    """
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    options = AllgatherOptions()
    if deadline_s is not None:
        options.timeout = timedelta(seconds=deadline_s)
    try:
        work = group.allgather([received], [sent], options)
        work.wait() if deadline_s is None else work.wait(timedelta(seconds=deadline_s))
    except RuntimeError as error:
        patience = "the group's timeout" if deadline_s is None else f"{deadline_s:g} s"
        raise DisagreementError(
            f"not every rank of the group compared its collective order within {patience}: {str(error).splitlines()[0]}"
        ) from error
    return [tensor.cpu().numpy().tobytes() for tensor in received]


def broadcast(mine: bytes, group: Any, deadline_s: float, device: torch.device | str) -> bytes:
    """The first rank's bytes, on every rank. Others' `mine` is not sent. Raises DisagreementError after `deadline_s`."""
    first = group.rank() == 0
    size = torch.tensor([len(mine) if first else 0], dtype=torch.int64, device=device)
    _from_first(size, group, deadline_s)
    text = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if first and mine:
        text.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    if text.numel():
        _from_first(text, group, deadline_s)
    return text.cpu().numpy().tobytes()


def _from_first(tensor: torch.Tensor, group: Any, deadline_s: float) -> None:
    deadline = timedelta(seconds=deadline_s)
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, deadline
    try:
        group.broadcast([tensor], options).wait(deadline)
    except RuntimeError as error:
        raise DisagreementError(
            f"the first rank of the group did not say its part within {deadline_s:g} s: {str(error).splitlines()[0]}"
        ) from error
