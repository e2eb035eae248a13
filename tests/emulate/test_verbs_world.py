"""Flow control of verbs under seeded orders: nothing overflows, is lost or is used too early; rules broken on purpose.

A failing seed prints the line that replays it (`python -m helixrt.emulate.verbs_world --seed …`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helixrt.emulate.seeded import Violation
from helixrt.emulate.verbs_world import VerbsWorld
from helixrt.protocol.link.frames import FrameError
from helixrt.protocol.verbs import flow as verbs_flow
from helixrt.protocol.verbs.flow import CHAIN, Bounds, Flow
from helixrt.transport.verbs import connection as verbs_connection
from helixrt.transport.verbs.send_queue import SendQueue
from tests.emulate.broken_rules import Patch, Rule, noticed_by

# ---------------------------------------------------------------- what the other end says wrong

BOUNDS = Bounds(sends=64, receives=64, slots=2, bounces=2, signal_every=16)


@pytest.fixture
def flow() -> Iterator[Flow]:
    yield Flow(BOUNDS, 1, 64, 2)


def test_more_messages_than_were_sent_cannot_be_used(flow: Flow) -> None:
    flow.speak()
    flow.credited(1)
    with pytest.raises(FrameError, match="2 messages were used: 1 were sent"):
        flow.credited(2)


def test_credit_does_not_go_back(flow: Flow) -> None:
    for _ in range(3):
        flow.speak()
    flow.credited(3)
    with pytest.raises(FrameError, match="went back from 3 to 2"):
        flow.credited(2)


def test_messages_come_in_their_order(flow: Flow) -> None:
    flow.took_head(0, 1)
    with pytest.raises(FrameError, match="message 3: 2 was expected"):
        flow.took_head(0, 3)


def test_a_chunk_comes_in_the_next_slot(flow: Flow) -> None:
    assert flow.took_chunk(verbs_flow.Immediate(1, 0, 1).pack()) == 0
    with pytest.raises(FrameError, match="slot 0"):
        flow.took_chunk(verbs_flow.Immediate(1, 0, 2).pack())


# ---------------------------------------------------------------- rules broken on purpose


def as_many_messages_as_there_are(patch: Patch) -> None:
    """A sender does not count the other end's receives."""
    patch.setattr(Flow, "may_send", Flow.may_post)


def no_receives_are_spared(patch: Patch) -> None:
    """Data uses up all receives: none is left for credits and for those that are not posted again yet."""
    patch.setattr(verbs_flow, "SPARE", 0)


def slots_without_end(patch: Patch) -> None:
    """A sender does not count the other end's slots."""
    patch.setattr(Flow, "slot_is_free", True)


def bounces_without_end(patch: Patch) -> None:
    """A place for a short message is used again before the NIC has read it."""
    patch.setattr(Flow, "bounce_is_free", True)


def work_requests_without_end(patch: Patch) -> None:
    """The send queue is not counted."""
    patch.setattr(Flow, "may_post", True)
    patch.setattr(Flow, "may_send", property(lambda self: self.said - self.used < self._their_receives - verbs_flow.SPARE))


def nothing_is_signalled(patch: Patch) -> None:
    """No work request tells of its completion unless its memory is waited for."""
    post = Flow.post

    def silent(self: Flow, signalled: bool = False) -> tuple[int, bool]:
        return post(self, signalled)[0], signalled

    patch.setattr(Flow, "post", silent)


def no_credit_is_given(patch: Patch) -> None:
    """What was used is told in messages that go anyway, and in no others."""
    patch.setattr(SendQueue, "give_credit", lambda self: None)


def credit_is_given_before_its_use(patch: Patch) -> None:
    """A message counts as used as soon as it has come."""
    patch.setattr(Flow, "speak", _early(Flow.speak))


def _early(speak: Callable[[Flow], tuple[int, int]]) -> Callable[[Flow], tuple[int, int]]:
    def early(self: Flow) -> tuple[int, int]:
        told, number = speak(self)
        return (told + CHAIN) & verbs_flow.LOW_BITS, number

    return early


def receives_are_not_posted_again(patch: Patch) -> None:
    """Receives that were used stay used."""
    patch.setattr(verbs_connection, "receives_to_post", lambda index: None)


def receives_are_posted_again_too_early(patch: Patch) -> None:
    """A chain of receives is posted again when the first of them is used."""
    patch.setattr(verbs_connection, "receives_to_post", lambda index: index if index % CHAIN == 0 else None)


def counters_stop_at_32_bits(patch: Patch) -> None:
    """A counter that has passed 2^32 counts as one that went back."""
    patch.setattr(verbs_flow, "forward", lambda before, low: low)


def memory_goes_back_when_it_is_posted(patch: Patch) -> None:
    """A long message counts as gone when its last chunk is posted, not when it is completed."""
    add = SendQueue._add

    def hasty(self: SendQueue, *what: Any, **more: Any) -> None:
        add(self, *what, **more)
        if self._lent and self._lent[-1].sequence:
            self._left(self._lent[-1].sequence)

    patch.setattr(SendQueue, "_add", hasty)


def detached_without_a_copy(patch: Patch) -> None:
    """The caller gets its memory back while chunks of it are still to be posted."""
    patch.setattr(SendQueue, "detach", lambda self, name: -1)


BROKEN = [
    as_many_messages_as_there_are,
    no_receives_are_spared,
    slots_without_end,
    bounces_without_end,
    work_requests_without_end,
    nothing_is_signalled,
    no_credit_is_given,
    credit_is_given_before_its_use,
    receives_are_not_posted_again,
    receives_are_posted_again_too_early,
    counters_stop_at_32_bits,
    memory_goes_back_when_it_is_posted,
    detached_without_a_copy,
]


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_worlds_notice_a_broken_rule(rule: Rule, monkeypatch: Patch) -> None:
    noticed_by(rule, monkeypatch, lambda seed: VerbsWorld(seed).run(), range(500), Violation)
