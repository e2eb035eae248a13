"""How a run's replicas changed the order of their schedules, and what that brought.

In: events of the flight record. Out: `OrderChange`s, by replica and step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from helixrt.observe.failures import replica_of
from helixrt.record import Event, Kind


@dataclass(frozen=True)
class OrderChange:
    """One decision. Times in ms per step: `present_ms` and `predicted_ms` by simulation under the measured costs, by the order
    before and by this one; `before_ms` and `after_ms` as measured, None if the run ended too soon. `ready_s`: what making it
    ready took on the slowest rank, None if that never ended; `failed`: why a rank could not work by it, "" if all did.
    """

    replica: int
    step: int
    order: str
    before: str
    why: str
    present_ms: float
    predicted_ms: float
    ready_s: float | None = None
    failed: str = ""
    before_ms: float | None = None
    after_ms: float | None = None


def order_changes(events: Iterable[Event]) -> tuple[OrderChange, ...]:
    """Of all replicas."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    changes: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda e: e.end_s):
        if event.kind not in (Kind.ORDER, Kind.ORDER_READY, Kind.ORDER_GAIN):
            continue
        detail = event.detail
        same = found.setdefault((event.rank, detail["order"]), [])
        if event.kind is Kind.ORDER:
            same.append({"replica": replica_of(event.rank), "step": event.step, **detail})
            changes.append(same[-1])
        elif same and event.kind is Kind.ORDER_READY:
            same[-1] |= {"ready_s": detail["seconds"], "failed": detail["failed"]}
        elif same:
            same[-1] |= {"before_ms": detail["before_ms"], "after_ms": detail["after_ms"]}
    return tuple(sorted((OrderChange(**each) for each in changes), key=lambda c: (c.replica, c.step)))
