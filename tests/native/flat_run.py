"""Carries out the flat plans of all ranks on numpy arrays: what the native library does, in a few lines of Python.

In: the `Flat`, source and out of each rank (one may be a part of the other), a seed. Out: the arrays, written. Nodes run in a
seeded random order. A message is copied when its send and its receive have both begun, so memory that is written too early
gives a wrong result. A final reduction divides by the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from helixrt.native.flat import COPY, FIELDS, LAST, ON_ARRIVAL, RECEIVE, REDUCE, SEND, TWICE, Flat

Numbers = NDArray[np.float64]


def run_flat(plans: Sequence[Flat], sources: Sequence[Numbers], outs: Sequence[Numbers], seed: int) -> None:
    """Raises AssertionError if not every node of every rank can run."""
    chance = random.Random(seed)
    spaces = [
        (source, out, np.full(plan.scratch_bytes // out.itemsize + 1, np.nan))
        for plan, source, out in zip(plans, sources, outs, strict=True)
    ]
    waits = [[plan.after_begin[i + 1] - plan.after_begin[i] for i in range(plan.count)] for plan in plans]
    ready = [(rank, node) for rank, missing in enumerate(waits) for node, count in enumerate(missing) if not count]
    half: dict[tuple[int, int, int], int] = {}  # (from, to, index) of a message of which one end has begun -> that end's node
    left = sum(map(len, waits))

    def row(rank: int, node: int) -> Sequence[int]:
        return plans[rank].nodes[node * FIELDS : (node + 1) * FIELDS]

    def view(rank: int, node: int, place: int) -> Numbers:
        fields = row(rank, node)
        memory = spaces[rank][fields[5 + 2 * place]]
        first, count = fields[6 + 2 * place] // memory.itemsize, fields[4] // memory.itemsize
        found = memory[first : first + count]
        assert len(found) == count, f"rank {rank}, node {node}: outside of its memory"
        return found

    def store(rank: int, node: int, total: Numbers) -> None:
        flags = row(rank, node)[3]
        if flags & LAST:
            total = total / len(plans)
        view(rank, node, 0)[:] = total
        if flags & TWICE:
            view(rank, node, 3)[:] = total

    def done(rank: int, node: int) -> None:
        nonlocal left
        left -= 1
        plan = plans[rank]
        for later in range(node + 1, plan.count):
            found = plan.after[plan.after_begin[later] : plan.after_begin[later + 1]].count(node)
            waits[rank][later] -= found
            if found and not waits[rank][later]:
                ready.append((rank, later))

    while ready:
        rank, node = ready.pop(chance.randrange(len(ready)))
        kind, peer, index, flags = row(rank, node)[:4]
        if kind in (SEND, RECEIVE):
            name = (rank, peer, index) if kind == SEND else (peer, rank, index)
            if name not in half:
                half[name] = node
                continue
            other = half.pop(name)
            sender, receiver = (node, other) if kind == SEND else (other, node)
            content = view(name[0], sender, 0).copy()
            if row(name[1], receiver)[3] & ON_ARRIVAL:
                content = view(name[1], receiver, 1) + content
            store(name[1], receiver, content)
            done(name[0], sender)
            done(name[1], receiver)
        elif kind == REDUCE:
            store(rank, node, view(rank, node, 1) + view(rank, node, 2))
            done(rank, node)
        else:
            assert kind == COPY and not flags
            store(rank, node, view(rank, node, 2).copy())
            done(rank, node)
    assert not left and not half, f"{left} nodes did not run; messages with one end: {sorted(half)[:3]}"
