"""Which rails the links of a run left, and when they were back, from the flight records.

In: the events of all ranks. Out: one `RailOutage` per rail that was left. Pure: events carry their times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from helixrt.record import Event, Kind


@dataclass(frozen=True)
class RailOutage:
    """A rail that the link of `rank` with `peer` (its rank in the exchange) left, and what it left the link with."""

    rank: str
    peer: int
    rail: int
    step: int
    left_s: float  # Unix time
    failure: str | None  # None: it worked, and was slow
    reason: str
    usable: int  # rails that went on
    back_after_s: float | None = None  # None: it did not return as long as that link lived


def rail_outages(events: Iterable[Event]) -> list[RailOutage]:
    """In the order of time."""
    found: list[RailOutage] = []
    out: dict[tuple[str, int, int], int] = {}  # (rank, peer, rail) -> place in `found`
    for event in sorted(events, key=lambda e: e.end_s):
        if event.kind not in (Kind.RAIL_LEFT, Kind.RAIL_BACK):
            continue
        detail = event.detail
        key = (event.rank, detail["peer"], detail["rail"])
        if event.kind is Kind.RAIL_LEFT:
            out[key] = len(found)
            cause = {what: detail[what] for what in ("failure", "reason", "usable")}
            found.append(RailOutage(*key, event.step, event.end_s, **cause))
        elif key in out:  # else it came late in a link's life: it had never been left
            at = out.pop(key)
            found[at] = replace(found[at], back_after_s=event.end_s - found[at].left_s)
    return found
