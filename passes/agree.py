"""Agree: all ranks of a group would launch the same collectives in the same order, or say where they differ.

In: each rank's parts and the group they communicate in. Out: nothing, or a DisagreementError on every rank, within the
deadline, that names the first difference; without this check ranks whose orders differ hang in the middle of a step.
Every rank calls it, before the first step and whenever its graphs change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions

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
    orders differ or a rank does not answer within `deadline_s` of each of at most three exchanges.
    """
    name = getattr(group, "group_name", None)
    lines = [line for part in ([parts] if isinstance(parts, Part) else parts) for line in collective_order(part, name)]
    agree_on(lines, group, deadline_s=deadline_s, device=device)


def agree_on(lines: Sequence[str], group: Any, *, deadline_s: float = DEADLINE_S, device: torch.device | str = "cpu") -> None:
    """As `agree`, of an order already read off."""
    hashes = exchange(order_hash(lines), group, deadline_s, device)
    if len(set(hashes)) == 1:
        return
    mine = "\n".join(lines).encode()[:SHOWN_BYTES]
    sizes = exchange(len(mine).to_bytes(8, "little"), group, deadline_s, device)
    longest = min(max(int.from_bytes(size, "little") for size in sizes), SHOWN_BYTES)
    texts = exchange(mine.ljust(longest, b"\n"), group, deadline_s, device)
    orders = [text.rstrip(b"\n").decode(errors="replace").splitlines() for text in texts]
    raise DisagreementError(first_difference(orders))


def first_difference(orders: Sequence[Sequence[str]]) -> str:
    """Where ranks' orders of collectives part, in one message."""
    for index, row in enumerate(itertools.zip_longest(*orders)):
        other = next((rank for rank, line in enumerate(row) if line != row[0]), None)
        if other is not None:
            first, second = (line or "nothing more" for line in (row[0], row[other]))
            return (
                f"ranks would hang: collective {index} is {first!r} on rank 0 and {second!r} on rank {other}; "
                "all ranks of a group must run graphs captured from the same code with the same settings"
            )
    return f"ranks would hang: their orders of collectives differ after the first {SHOWN_BYTES} bytes of text"


def exchange(mine: bytes, group: Any, deadline_s: float, device: torch.device | str) -> list[bytes]:
    """Every rank's bytes, by rank; all must be as long as these."""
    deadline = timedelta(seconds=deadline_s)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    options = AllgatherOptions()
    options.timeout = deadline
    try:
        group.allgather([received], [sent], options).wait(deadline)
    except RuntimeError as error:
        raise DisagreementError(
            f"not every rank of the group compared its collective order within {deadline_s:g} s: {str(error).splitlines()[0]}"
        ) from error
    return [tensor.cpu().numpy().tobytes() for tensor in received]
