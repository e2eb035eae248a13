"""Which rails the links of a run left, when they were back, and what was saved then, from the flight records.

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
    towards: str = ""  # the peer's name; empty if the members were not recorded
    saved_step: int | None = None  # of the first checkpoint of that step or a later one
    saved_after_s: float | None = None  # until it was written; not positive: it was there already


def rail_outages(events: Iterable[Event]) -> list[RailOutage]:
    """In the order of time."""
    found: list[RailOutage] = []
    out: dict[tuple[str, int, int], int] = {}  # (rank, peer, rail) -> place in `found`
    members: dict[str, list[int]] = {}  # replica's name -> replicas of its newest quorum
    saved: list[Event] = []
    for event in sorted(events, key=lambda e: e.end_s):
        detail = event.detail
        if event.kind is Kind.QUORUM:
            members[_replica(event.rank)] = sorted(detail["members"])
        elif event.kind is Kind.CHECKPOINT_END:
            saved.append(event)
        elif event.kind is Kind.RAIL_LEFT:
            out[event.rank, detail["peer"], detail["rail"]] = len(found)
            cause = {what: detail[what] for what in ("failure", "reason", "usable")}
            towards = _name(event.rank, detail["peer"], members.get(_replica(event.rank), []))
            found.append(
                RailOutage(event.rank, detail["peer"], detail["rail"], event.step, event.end_s, **cause, towards=towards)
            )
        elif event.kind is Kind.RAIL_BACK:
            at = out.pop((event.rank, detail["peer"], detail["rail"]), None)
            if at is not None:  # else it came late in a link's life: it had never been left
                found[at] = replace(found[at], back_after_s=event.end_s - found[at].left_s)
    return [_saved(outage, saved) for outage in found]


def _saved(outage: RailOutage, saved: Iterable[Event]) -> RailOutage:
    first = next((event for event in saved if event.step >= outage.step), None)
    if first is None:
        return outage
    return replace(outage, saved_step=first.step, saved_after_s=first.end_s - outage.left_s)


def _replica(rank: str) -> str:
    return rank.partition(".")[0]


def _name(rank: str, peer: int, members: list[int]) -> str:
    """Of the rank `peer` of the exchange: the same stage of another replica."""
    _, dot, stage = rank.partition(".")
    return f"r{members[peer]}{dot}{stage}" if peer < len(members) else ""
