"""Schedules in torch's CSV and JSON come back as they went; bad files are told in one line; pictures show every figure."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixrt.errors import ConfigError
from helixrt.schedule.check import check, check_microbatch_order
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.exchange import as_json, chrome, svg, text, torch_csv
from helixrt.schedule.generators.classic import gpipe, one_f_one_b
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule, folded, interleaved, linear, operations_of
from helixrt.schedule.simulate import Direct, simulate
from helixrt.schedule.timeline import Timeline


def random_schedule(seed: int) -> Schedule:
    """Any complete order, runnable or not: formats carry both."""
    draw = random.Random(seed)
    stages, microbatches = draw.randint(1, 5), draw.randint(1, 6)
    placement = draw.choice([linear(stages), interleaved(stages, draw.randint(2, 3)), folded(stages)])
    entries: list[list[Entry]] = [[] for _ in range(stages)]
    for chunk, stage in enumerate(placement):
        for microbatch in range(microbatches):
            forward = Operation(Op.F, chunk, microbatch)
            backward = Operation(draw.choice([Op.B, Op.BW]), chunk, microbatch)
            entries[stage] += [Pair(forward, backward)] if draw.random() < 0.3 else [forward, backward]
            if backward.op is Op.B:
                entries[stage].append(Operation(Op.W, chunk, microbatch))
    for line in entries:
        draw.shuffle(line)
    return Schedule(f"random {seed}", stages, microbatches, placement, tuple(map(tuple, entries)))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6))
def test_orders_come_back_from_csv_and_json_as_they_were(seed: int) -> None:
    schedule = random_schedule(seed)
    assert torch_csv.read(torch_csv.write(schedule), schedule.name) == schedule
    assert torch_csv.read(torch_csv.write(schedule), schedule.name, schedule.placement) == schedule
    labels = [[schedule.label(entry) for entry in entries] for entries in schedule.entries]
    written = json.dumps({"order": labels, "placement": schedule.placement})
    assert as_json.read(written, schedule.name) == schedule


def torch_schedule(name: str, ranks: int, microbatches: int) -> Mock:
    """Torch's own schedule object; only its stages are stand-ins, which it asks for their numbers."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    numbers = {"group_size": ranks, "group_rank": 0, "num_stages": 2 * ranks, "has_backward": True, "submod": None}
    stages = [Mock(stage_index=index, **numbers) for index in (0, 1)]
    return getattr(schedules, name)(stages, microbatches)


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV", "ScheduleInterleaved1F1B"])
@pytest.mark.parametrize("ranks,microbatches", [(2, 4), (4, 8), (4, 12)])
def test_torchs_own_schedules_import_check_and_simulate(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    theirs = torch_schedule(name, ranks, microbatches)
    file = tmp_path / "order.csv"
    theirs._dump_csv(str(file), format="compute_only")
    schedule = torch_csv.read(file.read_text(), name)
    check(schedule)
    check_microbatch_order(schedule)
    placement = interleaved(ranks) if "Interleaved" in name else folded(ranks)
    assert (schedule.stages, schedule.microbatches, schedule.placement) == (ranks, microbatches, placement)
    timeline = simulate(schedule, uniform(ranks).split(placement))
    assert timeline.makespan_ms >= 3.0 * microbatches, "a stage's work alone takes as long"

    file.write_text(torch_csv.write(schedule))
    again = torch_schedule(name, ranks, microbatches)
    again._load_csv(str(file), format="compute_only")
    ours = {rank: [a for a in actions if a is not None] for rank, actions in again.pipeline_order.items()}
    assert ours == {rank: [a for a in actions if a is not None] for rank, actions in theirs.pipeline_order.items()}


GOOD = "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    "content,message",
    [
        ("", "x.csv='': needs one line of operations per stage"),
        ("0F0,0B0\n1F0,1X0\n", "x.csv line 2 column 2=1X0: must be chunk, F, I, W or B, micro-batch"),
        ("0F0,-1B0\n", "x.csv line 1 column 2=-1B0: must be"),
        ("0F0,0F٣\n", "x.csv line 1 column 2=0F٣: must be"),
        ("0F0,,0SEND_F0\n", "x.csv line 1 column 3=0SEND_F0: is no computation; write the file with format="),
        ("0F0,0B0\n,\n1F0\n", "x.csv line 2='': a stage without operations"),
        ("0F0,0B0\n1F0,0W0\n", "x.csv line 2 column 2=0W0: chunk 0 stands on line 1 already"),
        ("0F0,0B0\n2F0,2B0\n", "x.csv=3 chunks: no line has an operation of chunk 1"),
        ("0F0,0B0,0F999999999\n", "x.csv=1000000000 micro-batches: no cell has an operation of micro-batch 1"),
        ("(0F0;0F1)OVERLAP_F_B\n", "x.csv line 1 column 1=(0F0;0F1)OVERLAP_F_B: an overlap is of one F with one B or I"),
        ("(0F0;0W1)OVERLAP_F_B\n", "x.csv line 1 column 1=(0F0;0W1)OVERLAP_F_B: an overlap is of one F"),
        ("(0F0)OVERLAP_F_B\n", "x.csv line 1 column 1=(0F0)OVERLAP_F_B: must be chunk"),
        ('0F0,"0B0\n', "x.csv line 1='': is not CSV"),
        ("0F0," + "9" * 200_000, "x.csv line 1="),
    ],
)
def test_a_malformed_csv_is_told_with_line_and_column(content: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        torch_csv.read(content, "x.csv")
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


def test_csv_against_a_given_placement() -> None:
    assert torch_csv.read("\ufeff" + GOOD + "\n,\n", "x").placement == (0, 1)
    with pytest.raises(ConfigError, match=r"x line 1 column 1=0F0: the placement \[1, 0\] has no such chunk on stage 0"):
        torch_csv.read(GOOD, "x", (1, 0))
    with pytest.raises(ConfigError, match="x=4 chunks: no line has an operation of chunk 2"):
        torch_csv.read(GOOD, "x", (0, 1, 1, 0))


@pytest.mark.parametrize(
    "content,message",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", 'needs "order"'),
        ('{"order": [["F0", 3]]}', "order[0][1]=3: must be"),
        ('{"order": [["F0", "B0.1"]]}', "order[0][1]=B0.1: must be"),
        ('{"order": [["F0+W0"]]}', "order[0][0]=F0+W0: must be"),
        ('{"order": [["F1"]]}', "no entry is of micro-batch 0"),
        ('{"order": [["F0"], "F0"]}', "order[1]=F0: must be a list"),
        ('{"order": [["F0"]], "placement": [0, 1]}', "placement=[0, 1]: must be the stage of every chunk"),
    ],
)
def test_a_malformed_json_order_is_one_line(content: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        as_json.read(content, "x.json")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def timelines() -> list[Timeline]:
    """One of each kind: free, delayed and direct, capped, two chunks with pairs, one micro-batch, no time at all."""
    slow = with_delays(uniform(4, 10, 10, 10, memory=6), {(0, 1): 10, (1, 0): 20})
    two = torch_csv.read(
        "0F0,3F0,0F1,(3F1;3B0)OVERLAP_F_B,0I0,3B1,0B1,0W0\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n", "pairs", folded(2)
    )
    return [
        simulate(one_f_one_b(4, 12), uniform(4, 10, 10, 10)),
        simulate(one_f_one_b(4, 12), slow),
        simulate(one_f_one_b(4, 12), slow, Direct(1)),
        simulate(two, uniform(2, 3.25, 1.5, 2).split(folded(2))),
        simulate(gpipe(1, 1), uniform(1)),
        simulate(gpipe(2, 2), uniform(2, 0, 0, 0)),
        simulate(gpipe(3, 2), replace(uniform(3, 1, 2, 3), links={(0, 1): Link(0.5, 2.0)})),
    ]


@pytest.mark.parametrize("timeline", timelines(), ids=lambda t: t.schedule.name)
def test_the_svg_is_well_formed_and_shows_every_operation_where_it_was(timeline: Timeline) -> None:
    root = ElementTree.fromstring(svg.write(timeline, 1.0))
    ns = "{http://www.w3.org/2000/svg}"
    boxes = [(b, b.findtext(f"{ns}title") or "") for b in root.iter(f"{ns}rect")]
    for stage, spans in enumerate(timeline.spans):
        for span in spans:
            hint = f"{timeline.schedule.label(span.entry)}, stage {stage}: {span.start_ms:g} to {span.end_ms:g} ms"
            found = [b for b, text_ in boxes if text_ == hint]
            assert len(found) == len(operations_of(span.entry))
    width = float(root.attrib["width"])
    assert all(0 <= float(b.get("x", "0")) and float(b.get("x", "0")) + float(b.attrib["width"]) <= width for b, _ in boxes)
    slow = [m for m in timeline.messages if m.arrive_ms > m.ready_ms]
    assert sum(1 for p in root.iter(f"{ns}path") if " from stage " in (p.findtext(f"{ns}title") or "")) == len(slow)


@pytest.mark.parametrize("timeline", timelines(), ids=lambda t: t.schedule.name)
@pytest.mark.parametrize("width", [20, 57, 200])
@pytest.mark.parametrize("color", [False, True])
def test_the_text_fits_its_width_and_shows_who_is_busy(timeline: Timeline, width: int, color: bool) -> None:
    written = text.write(timeline, 1.0, 2.0, width, color)
    assert ("\x1b" in written) == color
    lines = re.sub(r"\x1b\[[0-9;]*m", "", written).splitlines()
    assert timeline.schedule.name in lines[0]
    rows = [line for line in lines if re.match(r"\d+ ", line)]
    assert len(rows) == timeline.schedule.stages and {len(row) for row in rows} == {max(width, 40)}
    if width == 200 and not color and timeline.makespan_ms:
        left, columns = 2, 200 - 2 - len(" mem")
        for stage, row in enumerate(rows):
            for span in timeline.spans[stage]:
                begin, end = (round(at_ms / timeline.makespan_ms * columns) for at_ms in (span.start_ms, span.end_ms))
                run = row[left : left + columns][max(begin - 1, 0) : end + 1]
                letters = {"X" if o.op is Op.BW else o.op.value for o in operations_of(span.entry)}
                assert letters & set(run.upper()), (row, span)


@pytest.mark.parametrize("timeline", timelines(), ids=lambda t: t.schedule.name)
def test_the_chrome_trace_tells_operations_messages_and_memory(timeline: Timeline) -> None:
    trace = json.loads(chrome.write(timeline))
    events = trace["traceEvents"]
    kind = {ph: [e for e in events if e["ph"] == ph] for ph in "XMbesfC"}
    assert sum(map(len, kind.values())) == len(events)
    for stage, spans in enumerate(timeline.spans):
        mine = [e for e in kind["X"] if e["tid"] == stage and e["cat"] != "bubble"]
        assert [(e["name"], e["ts"] / 1e3, e["dur"] / 1e3) for e in mine] == [
            (timeline.schedule.label(s.entry), pytest.approx(s.start_ms), pytest.approx(s.end_ms - s.start_ms)) for s in spans
        ]
        held = [e["args"]["held"] for e in kind["C"] if e["name"] == f"memory of stage {stage}"]
        assert max(held) == timeline.peak_memory[stage] and held[-1] == 0
    assert len(kind["b"]) == len(kind["e"]) == len(timeline.messages)
    # Both ends of every arrow lie in an operation of their thread, or viewers drop it.
    assert len(kind["s"]) == len(kind["f"]) == len(timeline.messages)
    for end in kind["s"] + kind["f"]:
        assert any(
            e["tid"] == end["tid"] and e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in kind["X"] if e["cat"] != "bubble"
        )


def test_the_json_has_the_figures_of_the_replay() -> None:
    costs: Costs = with_delays(uniform(4, 10, 10, 10), {(0, 1): 10, (1, 0): 10})
    timeline = simulate(one_f_one_b(4, 12), costs)
    found = json.loads(as_json.write(timeline, 400.0, 1.5, "1f1b"))
    assert list(found) == [
        *("policy", "makespan_ms", "lower_bound_ms", "gap", "bubble_rate", "warmup", "peak_memory", "solve_ms", "placement"),
        "order",
    ]
    assert found["makespan_ms"] == timeline.makespan_ms and found["gap"] == pytest.approx(timeline.makespan_ms / 400 - 1)
    assert found["bubble_rate"] == timeline.bubble_rate and found["warmup"] == [4, 3, 2, 1]
    assert found["peak_memory"] == [4, 3, 2, 1]
    assert as_json.read(as_json.write(timeline, 400.0, 1.5, "1f1b"), "1f1b") == timeline.schedule
    assert as_json.report(simulate(gpipe(1, 1), uniform(1, 0, 0, 0)), 0.0, 0.0, "gpipe")["gap"] == 0.0
