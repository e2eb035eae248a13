"""Links through shared memory under seeded interleavings: nothing lost, late or overslept; rules broken on purpose.

A failing seed prints the line that replays it (`python -m helixrt.emulate.memory_world --seed …`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixrt.emulate.memory_world import MemoryWorld
from helixrt.emulate.seeded import Violation
from helixrt.protocol.calls import Agreement
from helixrt.protocol.shared_memory.frames import Frame, Kind, SegmentError
from helixrt.protocol.shared_memory.messages import LIMITS, Inbox, Limits, Name, Outbox, Way
from helixrt.transport.shared_memory import link as memory_link
from helixrt.transport.shared_memory.link import SharedMemoryLink
from helixrt.transport.shared_memory.messages import Receiving, Sending
from helixrt.transport.shared_memory.segment import RingReader, RingWriter
from tests.emulate.broken_rules import Patch, Rule, noticed_by

# ---------------------------------------------------------------- the halves alone


def offer(length: int) -> Frame:
    return Frame(Kind.OFFER, 0, 1, length, 4096, 512)


@pytest.mark.parametrize("stands, alive", [(False, True), (True, False), (False, False)])
def test_what_was_read_of_a_withdrawn_offer_is_still_waited_for(stands: bool, alive: bool) -> None:
    box = Inbox(True, set(), Agreement())
    assert box.receive((1, 0), 10) is Way.WAIT
    assert box.offer(offer(10)) is Way.READ
    assert not box.was_read((1, 0), stands, alive)
    assert box.awaited() == (1, 0) and not box.reading


def test_a_short_message_that_no_ring_takes_is_offered() -> None:
    box = Outbox(set(), 500)
    assert box.send((1, 0), 500, int).kind == Kind.EAGER
    assert box.send((1, 1), 501, int).kind == Kind.OFFER


def test_short_messages_beyond_the_budget_are_offered_until_the_peer_has_freed_some() -> None:
    box, freed = Outbox(set(), 1 << 20, Limits(budget=200)), [0, 129, 128]
    kinds = [box.send((1, index), 10, lambda: freed.pop(0)).kind for index in range(2)]
    assert kinds == [Kind.EAGER, Kind.OFFER] and freed == [129, 128]
    with pytest.raises(SegmentError, match="129 bytes of short messages freed: must be 0 to 128"):
        box.send((1, 2), 10, lambda: freed.pop(0))
    assert box.send((1, 2), 10, lambda: freed.pop(0)).kind == Kind.EAGER


@pytest.mark.parametrize("where, size, done", [(0, 10, 4), (4, 7, 4), (8, 2, 4), (4, 0, 4)])
def test_a_piece_that_is_not_the_next_one_is_refused(where: int, size: int, done: int) -> None:
    box = Inbox(False, set(), Agreement())
    box.receive((1, 0), 10)
    assert box.offer(offer(10)) is Way.PULL
    box.piece(Frame(Kind.PIECE, 0, 1, 10, 0, size=done))
    with pytest.raises(SegmentError, match="must begin at 4, end at most at 10"):
        box.piece(Frame(Kind.PIECE, 0, 1, 10, where, size=size))


def test_a_message_of_another_length_than_was_agreed_is_refused() -> None:
    box = Inbox(True, set(), Agreement())
    box.receive((1, 0), LIMITS.eager + 1)
    with pytest.raises(SegmentError, match="has 70000 bytes, agreed were 65537"):
        box.offer(offer(70_000))


# ---------------------------------------------------------------- rules broken on purpose


def a_receive_is_lost_with_its_withdrawn_offer(patch: Patch) -> None:
    """A receive whose offer is withdrawn while it is read waits for nothing any more."""
    was_read = Inbox.was_read

    def lost(self: Inbox, name: Name, stands: bool, alive: bool) -> bool:
        counts = was_read(self, name, stands, alive)
        self.posted.pop(name, None)
        return counts

    patch.setattr(Inbox, "was_read", lost)


def what_was_read_counts_whatever_became_of_its_offer(patch: Patch) -> None:
    """Nobody looks whether an offer still stands once it was read."""
    was_read = Inbox.was_read
    patch.setattr(Inbox, "was_read", lambda self, name, stands, alive: was_read(self, name, True, True))


def offers_are_not_withdrawn(patch: Patch) -> None:
    """A sender that takes its memory back leaves the offer in the table."""
    patch.setattr(Sending, "_withdraw", lambda self, offered: None)


def short_messages_without_end(patch: Patch) -> None:
    """A sender does not count what waits at the receiver."""
    begin = Outbox.__init__

    def careless(self: Outbox, forgotten: set[int], ring_most: int, limits: Limits = LIMITS) -> None:
        begin(self, forgotten, ring_most, replace(limits, budget=1 << 30))

    patch.setattr(Outbox, "__init__", careless)


def a_short_message_may_be_longer_than_finds_room(patch: Patch) -> None:
    """A short message is sent at once however small the ring is."""
    begin = Outbox.__init__

    def careless(self: Outbox, forgotten: set[int], ring_most: int, limits: Limits = LIMITS) -> None:
        begin(self, forgotten, ring_most, limits)
        self.short = limits.eager

    patch.setattr(Outbox, "__init__", careless)


def the_ring_is_written_before_it_was_read(patch: Patch) -> None:
    """A writer takes all of the ring as read."""
    patch.setattr(RingWriter, "_refresh", lambda self: self._end)


def what_is_read_is_released_at_once(patch: Patch) -> None:
    """A reader gives a frame's memory back before its payload was used."""
    take = RingReader.take

    def hasty(self: RingReader) -> tuple[Frame, memoryview]:
        taken = take(self)
        self.release()
        return taken

    patch.setattr(RingReader, "take", hasty)


def who_falls_asleep_does_not_look_again(patch: Patch) -> None:
    """An end says that it sleeps, and does not look whether something came just before."""
    arm = SharedMemoryLink.arm

    def blind(self: SharedMemoryLink) -> None:
        before = self._again
        arm(self)
        self._again = before

    patch.setattr(SharedMemoryLink, "arm", blind)


def nobody_rings_for_room(patch: Patch) -> None:
    """An end that waits for room in the ring is not woken when there is some."""
    patch.setattr(memory_link, "_WANTS_ROOM", 0)


def forgotten_memory_is_written(patch: Patch) -> None:
    """A receiver that takes its memory back goes on with what was on its way into it."""
    patch.setattr(Receiving, "forget", lambda self, op: None)


BROKEN = [
    a_receive_is_lost_with_its_withdrawn_offer,
    what_was_read_counts_whatever_became_of_its_offer,
    offers_are_not_withdrawn,
    short_messages_without_end,
    a_short_message_may_be_longer_than_finds_room,
    the_ring_is_written_before_it_was_read,
    what_is_read_is_released_at_once,
    who_falls_asleep_does_not_look_again,
    nobody_rings_for_room,
    forgotten_memory_is_written,
]


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_worlds_notice_a_broken_rule(rule: Rule, monkeypatch: Patch) -> None:
    noticed_by(rule, monkeypatch, lambda seed: MemoryWorld(seed).run(), range(2000), Violation)
