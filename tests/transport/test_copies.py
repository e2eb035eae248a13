"""Memory for copies of short messages: never one piece for two, and used again."""

from __future__ import annotations

import random

from helixrt.transport.copies import FREE_BYTES, LEAST_BYTES, CopyMemory


def test_no_two_copies_share_memory_until_one_is_given_back() -> None:
    draw, memory = random.Random(3), CopyMemory()
    alive: list[tuple[memoryview, bytes]] = []
    for _ in range(2000):
        if alive and draw.random() < 0.5:
            copy, content = alive.pop(draw.randrange(len(alive)))
            assert copy == content
            memory.give(copy)
        else:
            content = draw.randbytes(draw.choice((0, 1, 100, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1, 3 * LEAST_BYTES)))
            alive.append((memory.copy(memoryview(content)), content))
    assert all(copy == content for copy, content in alive)


def test_memory_given_back_is_used_again() -> None:
    memory = CopyMemory()
    first = memory.take(LEAST_BYTES + 1)
    memory.give(first)
    again = memory.take(2 * LEAST_BYTES)
    assert again.obj is first.obj and len(again) == 2 * LEAST_BYTES
    assert memory.take(2 * LEAST_BYTES).obj is not first.obj


def test_no_more_is_kept_than_allowed() -> None:
    memory = CopyMemory()
    size = FREE_BYTES // 4
    taken = [memory.take(size) for _ in range(6)]
    for each in taken:
        memory.give(each)
    memory.give(CopyMemory().take(2 * FREE_BYTES))
    again = [memory.take(size).obj for _ in range(6)]
    assert sum(any(one is each.obj for each in taken) for one in again) == 4
