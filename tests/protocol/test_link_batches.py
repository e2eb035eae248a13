"""A link that hears of messages in batches: fewer frames, the same outcomes; which short messages are copied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixrt.emulate.link_pair import LONG, OPTIONS, Pair
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Kind

MANY = 5


def settle(pair: Pair, me: int) -> list[m.Action]:
    assert pair.links[me].unsettled
    said = pair.tell(me, m.Settle())
    assert not pair.links[me].unsettled
    return said


@pytest.mark.parametrize(("batched", "credits"), [(True, 1), (False, MANY)])
def test_one_frame_carries_the_credits_of_a_batch(batched: bool, credits: int) -> None:
    pair = Pair(options=replace(OPTIONS, batched=batched))
    for index in range(MANY):
        pair.post(1, 1, index)
    if batched:
        assert not pair.said(1, m.SendFrame)
        settle(pair, 1)
    assert pair.kinds(1).count(Kind.CREDIT) == credits
    pair.flow()
    for index in range(MANY):
        pair.submit(0, 1, index)
    if batched:
        settle(pair, 0)
    pair.flow()
    assert [each.index for each in pair.said(1, m.Received)] == list(range(MANY))


def test_what_answers_a_long_message_acknowledges_it() -> None:
    """Two ends of a ring: each sends on what it has just received, and no frame of its own says that it came."""
    pair = Pair(options=replace(OPTIONS, batched=True))
    pair.post(1, 1)
    settle(pair, 1)
    pair.post(0, 1)
    settle(pair, 0)
    pair.flow()
    pair.submit(0, 1)
    settle(pair, 0)
    pair.flow()
    assert pair.said(1, m.Received) and not pair.said(0, m.Sent)
    pair.submit(1, 1)
    settle(pair, 1)
    assert Kind.ACK not in pair.kinds(1)
    pair.flow()
    assert pair.said(0, m.Sent) == [m.Sent(1, 0)]


def test_a_long_message_that_nothing_answers_is_acknowledged_when_the_batch_is_over() -> None:
    pair = Pair(options=replace(OPTIONS, batched=True))
    pair.post(1, 1)
    settle(pair, 1)
    pair.flow()
    pair.submit(0, 1)
    settle(pair, 0)
    pair.flow()
    settle(pair, 1)
    pair.flow()
    assert pair.said(0, m.Sent) == [m.Sent(1, 0)]


def test_a_short_message_above_the_limit_is_sent_from_its_memory_and_acknowledged_at_once() -> None:
    pair = Pair(options=replace(OPTIONS, keep_bytes=500, eager_bytes=1000))
    assert LONG > 1000
    kept, lent = (pair.submit(0, 1, index, length) for index, length in ((0, 500), (1, 501)))
    assert [type(action) for action in kept] == [m.Keep, m.Sent, m.SendData]
    assert [type(action) for action in lent] == [m.SendData]
    pair.flow()
    assert pair.said(0, m.Sent) == [m.Sent(1, 0), m.Sent(1, 1)]
    assert pair.said(0, m.Keep) == [m.Keep(1, 0)]
