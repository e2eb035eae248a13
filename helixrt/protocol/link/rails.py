"""One rail of a link as its end sees it: the states of SHIFT section 4.3, what it carries, when it rests.

In: what the link learned about the rail. Out: the rail's record, and the rule for how long it rests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.messages import Failure, Landing


class SendState(Enum):
    """How this end's traffic treats the rail; the four send states of SHIFT section 4.3. `link.py` draws the ways."""

    DEFAULT = "default"  # it carries its share (striped), or stands by behind a lower-numbered one
    FALLBACK = "fallback"  # its share goes over the others; it is down, rests, is handshaken about or probed
    WAIT_SIGNALED = "wait signaled"  # it works again; the newest frame on the others is about to become the fence
    WAIT_DRAINED = "wait drained"  # the others' frames up to the fence are to be acknowledged, then SWITCH is


class ReceiveState(Enum):
    """Which way the peer's traffic takes; the two receive states of SHIFT section 4.3."""

    DEFAULT = "default"  # the peer may use this rail
    FALLBACK = "fallback"  # all of this rail's earlier incarnation was fenced; until SWITCH the peer uses others


@dataclass(slots=True, eq=False)
class Flight:
    """A frame with a sequence number, from its making until it is acknowledged."""

    sequence: int
    kind: Kind
    body: bytes  # of CREDIT, WANT
    message: Outgoing | None = None  # of DATA, and of the SKIP in its place
    rail: int = -1  # -1: on none, it waits to be sent
    at_s: float = -math.inf  # when it was handed to the rail

    @property
    def bytes(self) -> int:
        """Of its payload: a SKIP has none."""
        return self.message.length if self.message and self.kind is Kind.DATA else 0


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message the caller submitted, until it is acknowledged."""

    op: int
    index: int
    length: int
    repeatable: bool
    eager: bool = False  # goes without credit, charged to the peer's eager memory
    kept: bool = False  # the driver has a copy: `Sent` was said already
    granted: bool = False  # the peer gave its credit
    forgotten: bool = False  # the caller may reuse the memory: never sent from now on
    flight: Flight | None = None


@dataclass(slots=True, eq=False)
class Arrival:
    """The payload under way on a rail."""

    frame: Frame
    landing: Landing
    counts: bool  # it takes effect when it is whole; a duplicate, a stale or a superseded copy does not


@dataclass(slots=True, eq=False)
class Rail:
    number: int
    up: bool = False
    incarnation: int = 0  # of the newest connection we know of
    send: SendState = SendState.FALLBACK
    receive: ReceiveState = ReceiveState.FALLBACK
    fresh: bool = True  # it has never failed: its first connection needs no probe
    leaving: bool = False  # slow: nothing new goes on it, and when it is drained it is in FALLBACK

    flights: dict[int, Flight] = field(default_factory=dict)  # on a rail that failed: unresolved until the handshake
    bytes: int = 0  # of `flights`
    arrival: Arrival | None = None
    delivered: int = 0  # bytes of long messages acknowledged since `paths` looked; not counted without it
    delivered_messages: int = 0
    begun_s: float = math.inf  # when the first of them was handed to the rail

    heard_s: float = -math.inf
    acknowledged_s: float = -math.inf  # when the peer's kernel last acknowledged bytes: its process may be stopped
    spoke_s: float = -math.inf
    unanswered_s: float = -math.inf  # when the first frame after the last received one was sent; at most `heard_s`: none

    failure: Failure | None = None  # of the latest end; the first cause of it, not a cascade where known
    reason: str = ""
    flaps: int = 0  # failures after it had carried traffic, forgiven after a steady while
    default_s: float = math.inf  # when DEFAULT began
    wake_s: float = math.inf  # when to restore it, to probe it, or to give up the probe
    rested_s: float = -math.inf  # not to be restored before: it flaps
    tried_s: float = -math.inf  # when its latest restoration began
    mended: bool = False  # it is said to be whole, since that began
    probe: int = 0  # number of the probe that waits for its answer
    probed_s: float = -math.inf  # when it, or SWITCH, was sent
    fence: int = 0  # newest sequence number that must be acknowledged before it carries traffic again
    switch: int = 0  # sequence number of the SWITCH under way

    unresolved: int = 0  # incarnation that failed and of which the peer has not confirmed the end; 0: none
    via: tuple[int, int] = (-1, 0)  # rail and incarnation on which the latest RESUME went
    asked_s: float = -math.inf  # when

    def spoke(self, now: float) -> None:
        """A frame is sent on it."""
        self.spoke_s = now
        if self.unanswered_s <= self.heard_s:
            self.unanswered_s = now

    def silent(self, least_s: float, now: float) -> bool:
        """Frames were sent, at least so long ago, and nothing was received since."""
        return self.heard_s < self.unanswered_s <= now - least_s

    @property
    def usable(self) -> bool:
        """New traffic may go on it."""
        return self.up and self.send is SendState.DEFAULT and not self.leaving


def rest_s(flaps: int, rest_s: float, longest_s: float) -> float:
    """How long a rail rests before its restoration: not at all the first time, then longer with each flap."""
    return 0.0 if flaps < 2 else min(longest_s, rest_s * 2.0 ** min(flaps - 2, 60))
