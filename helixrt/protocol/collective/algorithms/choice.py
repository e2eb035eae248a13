"""Which algorithm serves a collective: a pure function of sizes, so all ranks decide the same without messages.

In: rank, number of ranks, bytes, element size, `Tuning`. Out: a plan. The thresholds:

- all-reduce: direct while a rank sends at most `direct_bytes` in all, (N-1) x bytes; two-step while the message
  has at most `two_step_bytes` and there are more than two ranks (with two the ring has no more steps); halving and doubling
  up to `halving_bytes` where the ranks are a power of two; else the ring, which alone sends to neighbours only.
- reduce-scatter, all-gather: direct while a rank sends or receives at most `direct_bytes` in all; of more
  than two ranks up to `two_step_bytes`; else the ring.
- broadcast, reduce: direct while the root sends or receives at most `direct_bytes` in all, or with two ranks
  (broadcast) where a chain is the same; else the chain.
- gather, scatter, all-to-all, barrier and send/receive have one algorithm each (`direct`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from helixrt.protocol.collective.algorithms.chain import chain_broadcast, chain_reduce
from helixrt.protocol.collective.algorithms.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_broadcast,
    direct_reduce,
    direct_reduce_scatter,
    two_step_all_reduce,
)
from helixrt.protocol.collective.algorithms.halving import halving_all_reduce
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from helixrt.protocol.collective.plan import Plan


class Algorithm(Enum):
    DIRECT = "direct"
    TWO_STEP = "two-step"
    HALVING = "halving"
    RING = "ring"


def choose(size: int, length: int, tuning: Tuning) -> Algorithm:
    """The algorithm for an all-reduce of `length` bytes over `size` ranks."""
    if (size - 1) * length <= tuning.direct_bytes:
        return Algorithm.DIRECT
    if size > 2 and length <= tuning.two_step_bytes:
        return Algorithm.TWO_STEP
    if size > 2 and size & (size - 1) == 0 and length <= tuning.halving_bytes:
        return Algorithm.HALVING
    return Algorithm.RING


def _one_step(lengths: Sequence[int], tuning: Tuning) -> bool:
    total = sum(lengths)
    return total <= tuning.direct_bytes or (len(lengths) > 2 and total <= tuning.two_step_bytes)


def all_reduce(
    rank: int,
    size: int,
    length: int,
    element_bytes: int,
    tuning: Tuning,
    in_place: bool = False,
    on_arrival: bool = False,
) -> Plan:
    """OUT = the reduction over all ranks' SOURCE, `length` bytes, the same bits everywhere.

    `on_arrival`: the algorithms for long messages sum what they receive as it comes. Each rank may choose that for itself.
    """
    match choose(size, length, tuning):
        case Algorithm.DIRECT:
            return direct_all_reduce(rank, size, length, element_bytes, tuning, in_place)
        case Algorithm.TWO_STEP:
            return two_step_all_reduce(rank, size, length, element_bytes, tuning, in_place)
        case Algorithm.HALVING:
            return halving_all_reduce(rank, size, length, element_bytes, tuning, in_place, on_arrival)
        case Algorithm.RING:
            return ring_all_reduce(rank, size, length, element_bytes, tuning, in_place, on_arrival)


def reduce_scatter(
    rank: int,
    lengths: Sequence[int],
    element_bytes: int,
    tuning: Tuning,
    in_place: bool = False,
    on_arrival: bool = False,
) -> Plan:
    """SOURCE: a block of `lengths[r]` bytes for each rank r. OUT: the reduced block of `rank`."""
    if _one_step(lengths, tuning):
        return direct_reduce_scatter(rank, lengths, element_bytes, tuning, in_place)
    return ring_reduce_scatter(rank, lengths, element_bytes, tuning, in_place, on_arrival)


def all_gather(rank: int, lengths: Sequence[int], element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    """SOURCE: the block of `rank`. OUT: the blocks of all ranks, `lengths[r]` bytes of rank r, one behind the other."""
    build = direct_all_gather if _one_step(lengths, tuning) else ring_all_gather
    return build(rank, lengths, element_bytes, tuning, in_place)


def broadcast(rank: int, size: int, root: int, length: int, element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    """OUT = `root`'s SOURCE."""
    direct = size <= 2 or (size - 1) * length <= tuning.direct_bytes
    return (direct_broadcast if direct else chain_broadcast)(rank, size, root, length, element_bytes, tuning, in_place)


def reduce(rank: int, size: int, root: int, length: int, element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    """`root`'s OUT = the reduction over all ranks' SOURCE."""
    direct = (size - 1) * length <= tuning.direct_bytes
    return (direct_reduce if direct else chain_reduce)(rank, size, root, length, element_bytes, tuning, in_place)
