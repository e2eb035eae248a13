"""What the ranks of a simulated world do: collectives and single messages of small numbers, and what must come of them.

In: a task, a rank, how many ranks. Out: its plan, its numbers, and the numbers it must end with.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from helixrt.emulate.plans import ELEMENT
from helixrt.protocol.collective.algorithms import choice, direct
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.plan import Plan

TUNING = Tuning(chunk_bytes=128, chunks=2, least_chunk_bytes=64, direct_bytes=128, two_step_bytes=256, halving_bytes=512)
COLLECTIVES = ("all_reduce", "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather")  # all ranks' OUT has the same bits


@dataclass(frozen=True)
class Task:
    """One collective of the list: what, and how many elements (of each rank, or in all)."""

    what: str
    count: int
    in_place: bool


@dataclass(frozen=True)
class Point:
    """One point-to-point message of the list, between two ranks of the world; where one of them is missing it is left out."""

    sender: int
    receiver: int
    count: int


@functools.lru_cache(maxsize=1000)
def point_plan(point: Point, sends: bool, peer: int) -> Plan:
    """What one of the two does; the other is `peer` to it."""
    plan = direct.send_to if sends else direct.receive_from
    return plan(peer, point.count * ELEMENT, ELEMENT, TUNING)


@functools.lru_cache(maxsize=20_000)
def plan_of(task: Task, rank: int, size: int) -> Plan:
    length, lengths = task.count * ELEMENT, [task.count * ELEMENT] * size
    on_arrival = (task.count + rank) % 2 == 0
    match task.what:
        case "all_reduce":
            return choice.all_reduce(rank, size, length, ELEMENT, TUNING, task.in_place, on_arrival)
        case "reduce_scatter":
            return choice.reduce_scatter(rank, lengths, ELEMENT, TUNING, on_arrival=on_arrival)
        case "all_gather":
            return choice.all_gather(rank, lengths, ELEMENT, TUNING)
        case "broadcast":
            return choice.broadcast(rank, size, size - 1, length, ELEMENT, TUNING, task.in_place)
        case "all_to_all":
            return direct.all_to_all(rank, lengths, lengths, ELEMENT, TUNING)
        case _:
            return direct.barrier(rank, size)


def sizes_of(task: Task, size: int) -> tuple[int, int]:
    """Elements of SOURCE and OUT of one rank."""
    n = task.count
    match task.what:
        case "barrier":
            return 0, 0
        case "reduce_scatter":
            return n * size, n
        case "all_gather":
            return n, n * size
        case "all_to_all":
            return n * size, n * size
        case _:
            return n, n


@functools.lru_cache(maxsize=500)
def given(generation: int, op: int, rank: int, count: int) -> tuple[float, ...]:
    """What `rank` gives; thirds, so that the order of a sum shows in its bits."""
    start = generation * 7919 + op * 104729 + rank * 1299709
    return tuple(((start + i * 31) % 9973) / 3.0 for i in range(count))


def expected(task: Task, generation: int, op: int, rank: int, size: int) -> list[float]:
    source, _ = sizes_of(task, size)
    everyone = [given(generation, op, r, source) for r in range(size)]
    n = task.count
    match task.what:
        case "barrier":
            return []
        case "all_reduce":
            return [math.fsum(column) for column in zip(*everyone, strict=True)]
        case "reduce_scatter":
            return [math.fsum(column) for column in zip(*everyone, strict=True)][rank * n : (rank + 1) * n]
        case "all_gather":
            return [x for numbers in everyone for x in numbers]
        case "broadcast":
            return list(everyone[size - 1])
        case _:
            return [x for numbers in everyone for x in numbers[rank * n : (rank + 1) * n]]
