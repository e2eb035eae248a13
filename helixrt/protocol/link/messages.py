"""Events (input) and actions (output) of a link, all frozen.

In: nothing. Out: the types that `link.Link` shares with the code that moves the bytes: the TCP driver,
the verbs driver and simulated worlds. A link is the pair of one rank with one peer in one generation; a
message is named (op, index), each name used once per direction and generation; rails are numbered from 0
in the same way at both ends. Times are the caller's monotonic seconds.

A driver passes every event as it happens, oldest first; carry out the actions in the
order given; wake the link with `Tick` at `Link.deadline`. It reads all that can be read before a `Tick`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from helixrt.errors import Cause
from helixrt.protocol.hopping.messages import Reason
from helixrt.protocol.link.frames import Frame


class Failure(Enum):
    """Why a rail failed; decides who may try again, and where (DESIGN.md, "Link")."""

    PATH = "path"  # the way between the two ends: what it carried goes elsewhere, the rail is tried again after a rest
    DEVICE = "device"  # our own device: the same, after a longer pause; report it for all rails of that device
    CASCADE = "cascade"  # a consequence (flushed work): the cause that came first stands
    PROGRAM = "program"  # a use that can never work: not tried again anywhere, the link is lost
    PEER_GONE = "peer gone"  # no process listens at the peer's end: with no rail left, the link is lost at once


class Landing(Enum):
    """Where the payload of a DATA frame goes."""

    PLACE = "place"  # the memory posted for (op, index)
    HOLD = "hold"  # memory of the driver, kept under (op, index) until `Deliver` or `Free`
    DROP = "drop"  # nowhere: read it and throw it away


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Submit:
    """The caller gave `length` bytes to send. `deadline`: `Failed` comes at that time if it is not done."""

    op: int
    index: int
    length: int
    repeatable: bool = True  # False: once handed to a rail it is never sent again
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Post:
    """The caller gave memory for the peer's message."""

    op: int
    index: int
    length: int
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class RailUp:
    """The rail is connected. `incarnation` counts its connections, from 1, and both ends know the same number for
    the same connection; nothing of an earlier one arrives from now on. `crossed`: setting it up took words over the rail
    itself, which shows that the peer is alive and can be reached."""

    rail: int
    incarnation: int
    crossed: bool = True


@dataclass(frozen=True, slots=True)
class RailDown:
    """The rail broke, or `RestoreRail` failed. What was handed to it and not sent yet is dropped; nothing of it
    arrives any more, and a payload under way ends here."""

    rail: int
    failure: Failure
    reason: str


@dataclass(frozen=True, slots=True)
class RailSlow:
    """The rail works but should be left: fence, drain, switch, as in fail-back. It rests before it is used again."""

    rail: int


@dataclass(frozen=True, slots=True)
class RailMended:
    """Something says that what broke the rail is whole again: its port is active. So it is tried now, unless it rests for
    having flapped. No more than a hint: it may be wrong, early, or never come."""

    rail: int


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A frame with its checked body (`frames.with_body`), or the header of a DATA frame: then exactly one `Accept`
    for this rail is among the actions, and the payload follows (also when its length is 0)."""

    rail: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class PayloadArrived:
    """All bytes of the payload under way on `rail` are where `Accept` (or a `Discard` since) said."""

    rail: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Heard:
    """Some bytes of a frame came: a sign of life. Needed only where no whole frame came of them."""

    rail: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The peer's kernel (its NIC) acknowledged something of the rail at `at_s`: a sign of life, also of a peer whose process
    reads nothing (`liveness.acknowledged_s`). May be repeated, and may come late."""

    rail: int
    at_s: float


@dataclass(frozen=True, slots=True)
class FrameSent:
    """The last byte of a DATA frame left the memory it came from. Needed only without fault tolerance."""

    rail: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Settle:
    """A batch of `Submit`, `Post`, `FrameArrived` and `PayloadArrived` is over: frames are sent for all of it. Needed only with
    `LinkOptions.batched`, before the driver waits, writes or looks at `Link.deadline`; other events have the same effect."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; everything that could be read by now was read and passed on."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The caller takes back all memory of `op`, in both directions."""

    op: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The generation is over for this end: send the reason to the peer. Nothing follows but `SendFrame` of this call."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Close:
    """This end closes; the peer is informed, so that it does not count as a failure."""


Event = (
    Submit
    | Post
    | RailUp
    | RailDown
    | RailSlow
    | RailMended
    | FrameArrived
    | PayloadArrived
    | Heard
    | Acknowledged
    | FrameSent
    | Settle
    | Tick
    | Forget
    | Abort
    | Close
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Write `frames.pack(frame)` on the rail, after all that was given to it before."""

    rail: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class SendData:
    """Write `frames.pack(frame)` and then the message (frame.op, frame.index), `frame.length` bytes, on the rail."""

    rail: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Keep:
    """Copy the short message (op, index) now: its `Sent` follows, and sending it, perhaps again, uses the copy."""

    op: int
    index: int


@dataclass(frozen=True, slots=True)
class Release:
    """The copy that `Keep` made is needed no more."""

    op: int
    index: int


@dataclass(frozen=True, slots=True)
class Detach:
    """The caller takes back the memory of (op, index), which rails may hold: copy what they have yet to send of it."""

    op: int
    index: int


@dataclass(frozen=True, slots=True)
class Accept:
    """Read the payload announced on `rail` to `landing`; then pass `PayloadArrived`."""

    rail: int
    sequence: int
    op: int
    index: int
    landing: Landing


@dataclass(frozen=True, slots=True)
class Discard:
    """Not one byte more of the payload under way on `rail` goes to its landing: throw the rest away as it comes."""

    rail: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Copy the held message into the memory posted for it and free it; `Received` follows."""

    op: int
    index: int


@dataclass(frozen=True, slots=True)
class Free:
    """Free the held message; it will not be requested."""

    op: int
    index: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The memory of the message may be written again."""

    op: int
    index: int


@dataclass(frozen=True, slots=True)
class Received:
    """The message is whole, in the memory posted for it."""

    op: int
    index: int


@dataclass(frozen=True, slots=True)
class Failed:
    """This message, and no other, was not delivered: its deadline passed, or it must not be sent twice and may have been
    delivered once. Its memory is the caller's again."""

    op: int
    index: int
    sending: bool  # else receiving
    cause: Cause


@dataclass(frozen=True, slots=True)
class RestoreRail:
    """Connect the rail again (reset its queue pair), and answer `RailUp` or `RailDown`. The end that cannot dial waits
    for the other's connection, and may try the peer's address to detect that no process listens there (PEER_GONE)."""

    rail: int


@dataclass(frozen=True, slots=True)
class ResetRail:
    """Close the rail's connection, dropping what it holds in either direction; the link knows it is down."""

    rail: int


@dataclass(frozen=True, slots=True)
class RailLeft:
    """For the record: `rail` carried traffic or was a backup, and is not used any more; the link uses the others. The code that
    runs the job should be informed: after the next failure there may be no rail left."""

    rail: int
    failure: Failure | None  # None: it works, and is left as slow
    reason: str
    usable: int  # rails that new traffic may still go on; 0: it waits for one


@dataclass(frozen=True, slots=True)
class RailBack:
    """For the record: `rail` carries traffic again, or stands by."""

    rail: int
    usable: int  # rails that new traffic may go on now


@dataclass(frozen=True, slots=True)
class Hopped:
    """For the record: new messages take another path (`hopping`). RTTs are of messages of the standard size, in seconds: of
    the old path its average, of the new one its probe, 0 if there was none."""

    old: int
    path: int
    reason: Reason
    old_rtt_s: float
    rtt_s: float


@dataclass(frozen=True, slots=True)
class PathProbed:
    """For the record: another path was measured (`hopping`); the RTT as in `Hopped`."""

    path: int
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer is gone for good in this generation. Last action but `ResetRail`s; the link answers nothing more."""

    cause: Cause
    failure: Failure


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """The peer ended the generation and said why; else as `Lost`."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The peer closed in order; else as `Lost`."""


ForTheRecord = RailLeft | RailBack | Hopped | PathProbed

Action = (
    SendFrame
    | SendData
    | Keep
    | Release
    | Detach
    | Accept
    | Discard
    | Deliver
    | Free
    | Sent
    | Received
    | Failed
    | RestoreRail
    | ResetRail
    | RailLeft
    | RailBack
    | Hopped
    | PathProbed
    | Lost
    | PeerAborted
    | PeerClosed
)
