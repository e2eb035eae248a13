"""A step's timeline: what belongs to it, who waited for what, and which message went where."""

import pytest

from helixrt.observe.timeline import Message, timeline
from helixrt.record import Event, Kind

T0 = 1_800_000_000.0


def event(kind: Kind, rank: str, begin_ms: float, end_ms: float, step: int = 7, **detail: object) -> Event:
    return Event(kind, rank, step, T0 + begin_ms / 1e3, T0 + end_ms / 1e3, detail)


def operation(rank: str, op: str, begin_ms: float, end_ms: float, step: int = 7) -> Event:
    return event(Kind.OPERATION, rank, begin_ms, end_ms, step, op=op, chunk=int(rank[-1]), microbatch=0)


ACTIVATION, GRADIENT, NORM = "g0.s9.c1.m3.F", "g0.s9.c0.m3.B", "g0.s9.c0.m0.norm"

# Two stages, one micro-batch: forward 10..30 and 35..55, backward 55..75 and 80..100, update 110..115.
STEP = [
    event(Kind.QUORUM_JOIN, "r0.pp0", 0, 0),
    event(Kind.QUORUM, "r0.pp0", 8, 8, generation=4, members=[0, 1]),
    operation("r0.pp0", "F", 10, 30),
    event(Kind.SEND, "r0.pp0", 30, 70, tag=ACTIVATION, bytes=64),
    event(Kind.RECV, "r0.pp1", 2, 35, tag=ACTIVATION, bytes=64, needed_s=T0 + 0.012),
    operation("r0.pp1", "F", 35, 55),
    operation("r0.pp1", "B", 55, 75),
    event(Kind.SEND, "r0.pp1", 75, 112, tag=GRADIENT, bytes=64),
    event(Kind.RECV, "r0.pp0", 5, 80, tag=GRADIENT, bytes=64, needed_s=T0 + 0.07999),
    operation("r0.pp0", "B", 80, 100),
    event(Kind.RECV, "r0.pp0", 100, 105, tag=NORM, bytes=8, needed_s=T0 + 0.101),
    event(Kind.APPLY, "r0.pp0", 110, 115, record="x"),
]


def bars(events: list[Event], rank: str, what: str) -> list[tuple[float, float]]:
    """In milliseconds from the step's begin."""
    drawn = timeline(events, 7)
    assert drawn is not None
    lane = next(lane for lane in drawn.lanes if lane.rank == rank)
    return [(round(b.begin_s * 1e3, 3), round(b.end_s * 1e3, 3)) for b in lane.bars if b.what == what]


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-6)  # Unix times are no finer


def test_messages_go_from_sent_to_taken() -> None:
    drawn = timeline(STEP, 7)
    assert drawn is not None and drawn.duration_s == pytest.approx(0.115)
    forward, backward = drawn.messages
    assert forward == Message("F", 3, "r0.pp0", "r0.pp1", about(0.030), about(0.035), 64)
    assert backward == Message("B", 3, "r0.pp1", "r0.pp0", about(0.075), about(0.080), 64)


def test_messages_stay_within_the_pipeline_of_a_tensor_rank() -> None:
    """Those of both have the same tags."""
    twins = [event for event in STEP if event.kind in (Kind.SEND, Kind.RECV)]
    twins = [event._replace(rank=f"{event.rank}.tp1", begin_s=event.begin_s + 1e-3) for event in twins]
    drawn = timeline([*STEP, *twins], 7)
    assert drawn is not None and len(drawn.messages) == 4
    for message in drawn.messages:
        assert message.sender.endswith("tp1") == message.receiver.endswith("tp1"), message


def test_both_of_a_woven_pair_are_drawn() -> None:
    """In the same time, told from what ran by itself; W has bars of its own."""
    pair = [
        event(Kind.OPERATION, "r0.pp0", 40, 60, op="F", chunk=0, microbatch=1, woven=True),
        event(Kind.OPERATION, "r0.pp0", 40, 60.002, op="BW", chunk=3, microbatch=0, woven=True),
    ]
    drawn = timeline([*STEP, *pair, operation("r0.pp0", "W", 62, 70)], 7)
    assert drawn is not None
    woven = [bar for bar in drawn.lanes[0].bars if bar.woven]
    assert [(bar.what, bar.label) for bar in woven] == [
        ("F", "F chunk 0 micro-batch 1, woven"),
        ("B", "BW chunk 3 micro-batch 0, woven"),
    ]
    assert [bar.what for bar in drawn.lanes[0].bars if not bar.woven and bar.what in "FBW"] == ["F", "W", "B"]


def test_a_message_of_another_replica_or_of_an_earlier_life_is_not_taken_for_it() -> None:
    other = event(Kind.SEND, "r1.pp0", 32, 40, tag=ACTIVATION, bytes=1)
    earlier = event(Kind.SEND, "r0.pp0", -500, -400, tag=ACTIVATION, bytes=1)
    later = event(Kind.SEND, "r0.pp0", 50, 60, tag=ACTIVATION, bytes=1)
    drawn = timeline([*STEP, other, earlier, later], 7)
    assert drawn is not None
    assert [(m.sender, round(m.sent_s * 1e3)) for m in drawn.messages if m.what == "F"] == [("r0.pp0", 30)]


def test_waiting_counts_from_when_it_was_needed() -> None:
    assert bars(STEP, "r0.pp1", "awaited") == [(12, 35)]
    assert bars(STEP, "r0.pp0", "awaited") == [(101, 105)], "the gradient lay ready"


def test_waiting_for_a_quorum_is_seen_each_time() -> None:
    again = [event(Kind.QUORUM_JOIN, "r0.pp0", 102, 102), event(Kind.QUORUM, "r0.pp0", 108, 108, generation=5, members=[0])]
    assert bars(STEP + again, "r0.pp0", "quorum") == [(0, 8), (102, 108)]


def test_neighbouring_steps_are_told_apart_and_what_is_outside_is_left_out() -> None:
    before = [operation("r0.pp1", "B", -20, 1, step=6), event(Kind.APPLY, "r0.pp1", 1, 3, step=6, record="w")]
    late = event(Kind.RECV, "r0.pp1", 90, 140, tag="g0.s10.c1.m0.F", bytes=64, needed_s=T0 + 0.120)
    drawn = timeline([*before, *STEP, late], 7)
    assert drawn is not None
    lane = drawn.lanes[1]
    assert [b.what for b in lane.bars if b.other_step] == ["B", "apply"]
    assert all(b.begin_s < drawn.duration_s for b in lane.bars)


def test_a_step_in_which_nobody_computed_has_no_timeline() -> None:
    assert timeline(STEP, 8) is None
