"""Flow control of one end of a verbs rail: credits, slots, and places that are used again. Pure.

In: what this end is about to post, which work requests are completed, and what came from the other end. Out: whether
something may go now, and under which numbers. The driver is `transport/verbs/send_queue.py`.

On a rail's queue pair messages are numbered from 1 in each direction. Each uses up one posted receive of the other end:

    SEND                a head, then nothing (a credit) or a frame, with a short payload behind it
    WRITE_WITH_IMM      a chunk of a long payload, into a slot of the receiver's ring; its immediate is checked

Bounds that are kept, whatever the order in which things happen:

- never more messages on their way than the other end has receives posted, nor chunks than it has free slots: so a slow
  receiver stops its sender here, and not in the NIC. Every head contains how many messages its writer has used; their receives
  are posted again by then, and their slots are free;
- never more work requests than the send queue holds, and the memory of one is used again only when it is completed. Not
  every work request is signalled (reports its completion), but a signalled one is always in flight;
- counters are unbounded: their lowest 32 bits are sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from helixrt.protocol.link.frames import FrameError

CHAIN = 8  # work requests posted with one call, at most; receives are posted again so many at a time
SPARE = 3 * CHAIN  # receives that data leaves alone: those used and not posted again yet, and credits
LOW_BITS = (1 << 32) - 1

_GENERATION_BITS, _SLOT_BITS, _SEQUENCE_BITS = 8, 10, 14
MAX_SLOTS = 1 << _SLOT_BITS


class Immediate(NamedTuple):
    """What a chunk carries beside its bytes; each field is cut to its bits."""

    generation: int
    slot: int
    sequence: int  # number of the message

    def pack(self) -> int:
        assert 0 <= self.slot < MAX_SLOTS
        generation = self.generation & ((1 << _GENERATION_BITS) - 1)
        sequence = self.sequence & ((1 << _SEQUENCE_BITS) - 1)
        return (generation << _SLOT_BITS | self.slot) << _SEQUENCE_BITS | sequence


def check_immediate(raw: int, expected: Immediate) -> None:
    """Raises FrameError if a chunk is not the one that must come now."""
    if raw != expected.pack():
        sequence = raw & ((1 << _SEQUENCE_BITS) - 1)
        slot = raw >> _SEQUENCE_BITS & (MAX_SLOTS - 1)
        generation = raw >> _SEQUENCE_BITS + _SLOT_BITS
        raise FrameError(f"chunk of generation {generation}, slot {slot}, sequence {sequence}: expected {expected}")


def forward(before: int, low: int) -> int:
    """The counter whose lowest 32 bits are `low` and which is not less than `before` (and less than 2^31 beyond)."""
    step = (low - before) & LOW_BITS
    if step >= 1 << 31:
        raise FrameError(f"a counter went back from {before} to {low} (modulo 2^32)")
    return before + step


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of one end's queue pair."""

    sends: int  # work requests posted
    receives: int
    slots: int  # of its ring
    bounces: int  # places for short messages that are copied to be sent
    signal_every: int  # work requests per completion, while there is more to send


class Flow:
    """One end of a queue pair in one life; `their_receives` and `their_slots` are the other end's. Raises FrameError for what
    no correct other end says."""

    def __init__(self, ours: Bounds, generation: int, their_receives: int, their_slots: int) -> None:
        self.ours, self.generation = ours, generation
        self._their_receives, self._their_slots = their_receives, their_slots
        self.posted = self.completed = 0  # work requests
        self.signalled = 0  # the newest work request that will be completed by itself
        self.said = self.used = 0  # messages sent, and those of them the other end has used
        self.heard = self.chunks_heard = 0  # messages of the other end that were used here
        self.told = self.chunks_told = 0  # how many of them were reported to it
        self.bounced = self.bounces_free = 0  # short messages copied, and those of them whose places are free again
        self._bounces_signalled = 0
        self._slots_in_use: deque[int] = deque()  # the messages that filled them
        self._next_slot = 0

    # ---- what may go

    @property
    def may_post(self) -> bool:
        """A work request; one chain is left for credits."""
        return self.posted - self.completed < self.ours.sends - CHAIN

    @property
    def may_post_credit(self) -> bool:
        return self.posted - self.completed < self.ours.sends

    @property
    def may_send(self) -> bool:
        """A work request that uses up a receive of the other end."""
        return self.may_post and self.said - self.used < self._their_receives - SPARE

    @property
    def slot_is_free(self) -> bool:
        return len(self._slots_in_use) < self._their_slots

    @property
    def bounce_is_free(self) -> bool:
        return self.bounced - self.bounces_free < self.ours.bounces

    @property
    def starved(self) -> bool:
        """The other end's NIC has answered all that it was to answer."""
        return self.signalled <= self.completed

    # ---- what goes

    def speak(self) -> tuple[int, int]:
        """The head of the next SEND: how many messages were used here, and its number."""
        self.said += 1
        self.told, self.chunks_told = self.heard, self.chunks_heard
        return self.told & LOW_BITS, self.said & LOW_BITS

    def write(self) -> tuple[int, int]:
        """The next chunk (`slot_is_free`): its slot, and its immediate."""
        self.said += 1
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % self._their_slots
        self._slots_in_use.append(self.said)
        return slot, Immediate(self.generation, slot, self.said).pack()

    def bounce(self) -> int:
        """The next short message that is copied (`bounce_is_free`): its number, from 0."""
        self.bounced += 1
        return self.bounced - 1

    def post(self, signalled: bool = False) -> tuple[int, bool]:
        """The next work request: its number, and whether it is signalled.

        Every Nth does, and the first after a pause: so one that will be completed by itself is always under way.
        """
        many = self.posted + 1 - self.signalled >= self.ours.signal_every or self.starved
        if signalled or many or self.bounced - self._bounces_signalled >= max(1, self.ours.bounces // 4):
            signalled, self.signalled, self._bounces_signalled = True, self.posted + 1, self.bounced
        self.posted += 1
        return self.posted - 1, signalled

    # ---- what is done

    def complete(self, low: int) -> None:
        """A work request is completed, and with it all before; the lowest bits of its number."""
        self.completed += ((low - self.completed) & LOW_BITS) + 1

    def credited(self, low: int) -> None:
        """The other end has reported how many of our messages it has used."""
        used = forward(self.used, low)
        if used > self.said:
            raise FrameError(f"{used} messages were used: {self.said} were sent")
        self.used = used
        slots = self._slots_in_use
        while slots and slots[0] <= used:
            slots.popleft()

    # ---- what comes

    def took_head(self, used: int, number: int) -> None:
        """A SEND came: the two numbers of its head."""
        self.heard += 1
        if number != self.heard & LOW_BITS:
            raise FrameError(f"message {number}: {self.heard & LOW_BITS} was expected")
        self.credited(used)

    def took_chunk(self, immediate: int) -> int:
        """A chunk came; the slot it is in. It is counted before it is used: nothing is said of it until then."""
        self.heard += 1
        slot = self.chunks_heard % self.ours.slots
        check_immediate(immediate, Immediate(self.generation, slot, self.heard))
        self.chunks_heard += 1
        return slot

    @property
    def owes_credit(self) -> bool:
        """The count of used messages should be sent although there is no other message to send."""
        owed, chunks = self.heard - self.told, self.chunks_heard - self.chunks_told
        return owed * 4 >= self.ours.receives - SPARE or chunks * 2 >= self.ours.slots


def receives_to_post(index: int) -> int | None:
    """After the message in receive `index` was used: the first of CHAIN receives that are to be posted again, if any are."""
    return index + 1 - CHAIN if index % CHAIN == CHAIN - 1 else None
