"""Messages that are used as they come: each byte once and in order, however often and wherever copies of it break off."""

from __future__ import annotations

import random

from helixrt.transport.intake import PIECE_UNIT, Intake, Stage
from tests.transport.worlds import Taker


def test_copies_that_break_off_anywhere_give_each_byte_once(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(rng.choice([4, 32]) * PIECE_UNIT)
    for _ in range(300):
        content = rng.randbytes(rng.choice([0, 1, 63, 64, 65, rng.randrange(2000)]))
        taker = Taker(len(content))
        intake = Intake(taker, stage)
        assert len(intake) == len(content)
        for _ in range(rng.randrange(4)):
            intake.restart()
            send(intake, content[: rng.randrange(len(content) + 1)], rng)
        intake.restart()
        send(intake, content, rng)
        taker.check(content)


def send(intake: Intake, content: bytes, rng: random.Random) -> None:
    """As a socket or a ring does: into the room there is, or out of memory of its own, in pieces of any size."""
    at = 0
    while at < len(content):
        if rng.random() < 0.5:
            room = intake.room()
            count = min(len(room), len(content) - at, rng.choice([1, 7, 64, 1000]))
            room[:count] = content[at : at + count]
            intake.came(count)
        else:
            count = min(len(content) - at, rng.choice([1, 7, 64, 1000]))
            intake.put(content[at : at + count])
        at += count


def test_a_stage_serves_messages_that_come_in_turns() -> None:
    stage, contents = Stage(4 * PIECE_UNIT), [random.Random(n).randbytes(1000) for n in range(3)]
    takers = [Taker(1000) for _ in contents]
    intakes = [Intake(taker, stage) for taker in takers]
    for at in range(0, 1000, 100):
        for intake, content in zip(intakes, contents, strict=True):
            intake.put(content[at : at + 100])
    for taker, content in zip(takers, contents, strict=True):
        taker.check(content)
