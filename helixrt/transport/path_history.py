"""The history of a link's paths, in the flight record: every probe that was answered, every hop and why.

In: what the link says of its paths. Out: events of a `FlightRecord`. RTTs are of messages of the standard size.
"""

from __future__ import annotations

import math

from helixrt.protocol.link_messages import Hopped, PathProbed
from helixrt.record import FlightRecord, Kind


def write(record: FlightRecord, peer: int, event: Hopped | PathProbed) -> None:
    match event:
        case Hopped(old, path, reason, old_rtt_s, rtt_s):
            was_s = old_rtt_s if math.isfinite(old_rtt_s) else None
            record.write(Kind.HOP, peer=peer, old=old, path=path, reason=reason.value, old_rtt_s=was_s, rtt_s=rtt_s)
        case PathProbed(path, rtt_s):
            record.write(Kind.PATH_PROBED, peer=peer, path=path, rtt_s=rtt_s)
