"""The history of a link's rails and paths, in the flight record: what was left and why, what is back, every hop and probe.

In: what the link says of them. Out: events of a `FlightRecord`, which the code that runs the job may subscribe to: after a rail
was left is a good time for a checkpoint. RTTs are of messages of the standard size.
"""

from __future__ import annotations

import math

from helixrt.protocol.link.messages import ForTheRecord, Hopped, PathProbed, RailBack, RailLeft
from helixrt.record import FlightRecord, Kind


def write(record: FlightRecord, peer: int, event: ForTheRecord) -> None:
    match event:
        case RailLeft(rail, failure, reason, usable):
            cause = failure.value if failure is not None else None
            record.write(Kind.RAIL_LEFT, peer=peer, rail=rail, failure=cause, reason=reason, usable=usable)
        case RailBack(rail, usable):
            record.write(Kind.RAIL_BACK, peer=peer, rail=rail, usable=usable)
        case Hopped(old, path, reason, old_rtt_s, rtt_s):
            was_s = old_rtt_s if math.isfinite(old_rtt_s) else None
            record.write(Kind.HOP, peer=peer, old=old, path=path, reason=reason.value, old_rtt_s=was_s, rtt_s=rtt_s)
        case PathProbed(path, rtt_s):
            record.write(Kind.PATH_PROBED, peer=peer, path=path, rtt_s=rtt_s)
