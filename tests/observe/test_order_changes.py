"""Changes of a schedule's order are put together from what the leaders recorded."""

from helixrt.observe.order_changes import OrderChange, order_changes
from helixrt.record import Event, Kind


def event(kind: Kind, rank: str, at_s: float, **detail: object) -> Event:
    return Event(kind, rank, int(at_s), at_s, at_s, dict(detail))


def decided(rank: str, at_s: float, order: str, before: str) -> Event:
    return event(Kind.ORDER, rank, at_s, order=order, before=before, why="slow", present_ms=790.0, predicted_ms=450.0)


def test_each_change_has_what_was_predicted_and_what_was_measured() -> None:
    events = [
        decided("r1.pp0", 21, "b", "a"),
        event(Kind.ORDER_READY, "r1.pp0", 22, order="b", seconds=0.5, failed=""),
        decided("r0.pp0", 23, "b", "a"),
        event(Kind.ORDER_READY, "r0.pp0", 24, order="b", seconds=0.1, failed="rank 1: no graph"),
        event(Kind.ORDER_GAIN, "r1.pp0", 30, order="b", before_ms=800.0, after_ms=460.0, predicted_ms=340.0),
        decided("r1.pp0", 61, "a", "b"),
        event(Kind.ORDER_READY, "r1.pp0", 62, order="a", seconds=0.0, failed=""),
        decided("r1.pp0", 81, "b", "a"),  # again: the gain of before is not its
    ]
    shared = {"why": "slow", "present_ms": 790.0, "predicted_ms": 450.0}
    assert order_changes(reversed(events)) == (
        OrderChange(0, 23, "b", "a", **shared, ready_s=0.1, failed="rank 1: no graph"),
        OrderChange(1, 21, "b", "a", **shared, ready_s=0.5, before_ms=800.0, after_ms=460.0),
        OrderChange(1, 61, "a", "b", **shared, ready_s=0.0),
        OrderChange(1, 81, "b", "a", **shared),
    )
