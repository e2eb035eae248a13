"""Rails that were left, and when they were back, are figured from the flight records."""

from helixrt.observe.rails import RailOutage, rail_outages
from helixrt.record import Event, Kind


def event(kind: Kind, rank: str, at_s: float, **detail: object) -> Event:
    return Event(kind, rank, int(at_s), at_s, at_s, dict(detail))


def test_every_rail_that_was_left_is_found_with_its_return_and_the_next_checkpoint() -> None:
    left, back = Kind.RAIL_LEFT, Kind.RAIL_BACK
    events = [
        event(Kind.QUORUM, "r0.pp0", 0.25, members=[2, 0]),
        event(Kind.CHECKPOINT_END, "r0.pp0", 0.5),
        event(Kind.CHECKPOINT_END, "r0.pp0", 2.5),
        event(back, "r0.pp0", 0.5, peer=1, rail=1, usable=2),  # it came late: never left
        event(left, "r0.pp0", 1.0, peer=1, rail=0, failure="path", reason="cable cut", usable=1),
        event(left, "r1.pp0", 1.25, peer=0, rail=0, failure="device", reason="port down", usable=1),
        event(Kind.COMMIT, "r0.pp0", 1.5),
        event(back, "r0.pp0", 3.0, peer=1, rail=0, usable=2),
        event(left, "r0.pp0", 4.0, peer=1, rail=0, failure=None, reason="left as slow", usable=1),
        event(left, "r0.pp0", 4.5, peer=1, rail=1, failure="path", reason="cable cut", usable=0),
        event(back, "r0.pp0", 5.0, peer=1, rail=1, usable=1),
    ]
    assert rail_outages(reversed(events)) == [
        RailOutage("r0.pp0", 1, 0, 1, 1.0, "path", "cable cut", 1, 2.0, "r2.pp0", 2, 1.5),
        RailOutage("r1.pp0", 0, 0, 1, 1.25, "device", "port down", 1, None, "", 2, 1.25),
        RailOutage("r0.pp0", 1, 0, 4, 4.0, None, "left as slow", 1, None, "r2.pp0"),
        RailOutage("r0.pp0", 1, 1, 4, 4.5, "path", "cable cut", 0, 0.5, "r2.pp0"),
    ]
