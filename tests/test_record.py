"""The flight record's files: when the disk is full, and when a run is long."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

import pytest

from helixrt import record as record_module
from helixrt.record import BoundedSink, Event, FlightRecord, JsonLinesSink, Kind, newest_events, read_events, shrink_life


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "flight.jsonl"
    sink, record = JsonLinesSink(path), FlightRecord("0")
    record.attach(sink)
    record.write(Kind.STEP_BEGIN, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))  # room for part of a line, then for none
    try:
        for step in (2, 3, 4):
            record.write(Kind.STEP_BEGIN, step=step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for step in (5, 6):
        record.write(Kind.STEP_BEGIN, step=step)
    assert sink.lost == 3
    assert [event.step for event in read_events(path)] == [1, 5, 6]
    assert [event.step for event in record.events()] == [1, 2, 3, 4, 5, 6]
    sink.close()
    with pytest.raises(OSError, match="Bad file descriptor"):  # the program's own mistake is no full disk
        record.write(Kind.STEP_BEGIN, step=7)


LIMIT = 20_000


def test_a_long_run_keeps_its_story_and_the_newest_details(tmp_path: Path) -> None:
    sink, record = BoundedSink(tmp_path / "r0.jsonl", LIMIT), FlightRecord("r0")
    record.attach(sink)

    def work(op: str) -> None:
        for number in range(1000):
            record.write(Kind.OPERATION, op=op, number=number)
            if number % 100 == 0:
                record.write(Kind.COMMIT, op=op, number=number)

    threads = [threading.Thread(target=work, args=(op,)) for op in ("F", "B")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sink.close()
    found = [event for path in sorted(tmp_path.iterdir()) for event in read_events(path)]
    story = [event for event in found if event.kind is Kind.COMMIT]
    details = [event for event in found if event.kind is Kind.OPERATION]
    assert len(story) == 20 and sink.lost == 0
    kept = {op: sorted(e.detail["number"] for e in details if e.detail["op"] == op) for op in ("F", "B")}
    assert any(kept.values())  # one of the two may have been done before the newest began
    assert all(numbers == list(range(numbers[0], 1000)) for numbers in kept.values() if numbers), "the newest, without a gap"
    one = len(details[0].to_json()) + 10
    written = sum(path.stat().st_size for path in tmp_path.glob("*.detail*"))
    assert LIMIT / 2 <= written <= LIMIT + 2 * one


def test_details_go_on_in_the_file_there_is_while_its_page_cannot_be_turned(tmp_path: Path) -> None:
    sink, record = BoundedSink(tmp_path / "r0.jsonl", 2_000), FlightRecord("r0")
    record.attach(sink)
    obstacle = tmp_path / "r0.detail.old.jsonl"
    obstacle.mkdir()
    for number in range(50):
        record.write(Kind.OPERATION, number=number)
    sink.flush()
    kept = [event.detail["number"] for event in read_events(tmp_path / "r0.detail.jsonl")]
    assert kept == list(range(50)) and sink.lost == 0
    obstacle.rmdir()
    for number in range(50, 100):
        record.write(Kind.OPERATION, number=number)
    sink.close()
    newest = [event.detail["number"] for event in read_events(tmp_path / "r0.detail.jsonl")]
    assert newest == list(range(newest[0], 100)) and newest[0] > 50


def test_of_steps_that_are_long_past_what_is_rare_is_kept(tmp_path: Path) -> None:
    """Failures of the whole run, each once; the routine of the newest steps, without a gap."""
    sink, record = BoundedSink(tmp_path / "r0.jsonl", LIMIT), FlightRecord("r0")
    record.attach(sink)
    for step in range(2000):
        record.write(Kind.WORK_BEGIN, step=step)
        record.write(Kind.COMMIT, step=step)
        if step % 100 == 7:
            record.write(Kind.FAILURE, step=step)
    sink.close()
    found = [event for path in sorted(tmp_path.iterdir()) for event in read_events(path)]
    assert sorted(event.step for event in found if event.kind is Kind.FAILURE) == list(range(7, 2000, 100))
    commits = sorted(event.step for event in found if event.kind is Kind.COMMIT)
    assert commits == list(range(commits[0], 2000)) and commits[0] > 1000 and sink.lost == 0
    routine = sum(path.stat().st_size for path in (tmp_path / "r0.jsonl", tmp_path / "r0.old.jsonl"))
    assert LIMIT / 2 <= routine <= LIMIT + 500


def test_what_is_rare_stays_when_a_later_life_writes_on_in_the_same_files(tmp_path: Path) -> None:
    """Incarnations are counted from 0 in each life of a run."""
    for life in range(3):
        sink, record = BoundedSink(tmp_path / "r0.inc0.jsonl", LIMIT), FlightRecord("r0")
        record.attach(sink)
        record.write(Kind.RANK_START, incarnation=0, step=life)
        for step in range(1000 if life == 2 else 10):
            record.write(Kind.COMMIT, step=step)
        record.write(Kind.FAILURE, step=life)
        sink.close()
    assert (tmp_path / "r0.inc0.old.jsonl").exists(), "pages were turned"
    found = [event for path in tmp_path.iterdir() for event in read_events(path)]
    for kind in (Kind.RANK_START, Kind.FAILURE):
        assert sorted(event.step for event in found if event.kind is kind) == [0, 1, 2]


@pytest.mark.parametrize("steps", [0, 3, 500])
def test_of_a_life_that_has_ended_its_end_and_what_is_rare_stay(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "r0.inc0.jsonl"
    sink, record = BoundedSink(path, LIMIT), FlightRecord("r0")
    record.attach(sink)
    record.write(Kind.RANK_START, incarnation=0)
    for step in range(steps):
        record.write(Kind.OPERATION, op="F", step=step)
        record.write(Kind.COMMIT, step=step)
    record.write(Kind.FAILURE, step=steps)
    sink.close()
    for _ in range(2):  # the second time it finds nothing to do
        shrink_life(path, 2_000)
        kept = sorted(file.name for file in tmp_path.iterdir())
        assert kept == ["r0.inc0.jsonl", "r0.inc0.story.jsonl"]
        assert path.stat().st_size <= 4_000
        commits = [event.step for event in read_events(path)]
        assert commits == list(range(steps))[-len(commits) or steps :] and (len(commits) > 5 or len(commits) == steps)
        assert [event.kind for event in read_events(tmp_path / kept[1])] == [Kind.RANK_START, Kind.FAILURE]
    shrink_life(tmp_path / "r1.inc0.jsonl")  # of a rank that never began
    assert len(list(tmp_path.iterdir())) == 2


def test_of_a_life_that_has_ended_the_steps_around_another_replicas_losses_stay(tmp_path: Path) -> None:
    path = tmp_path / "r0.inc0.jsonl"
    sink, record = BoundedSink(path, 1 << 22), FlightRecord("r0")
    record.attach(sink)
    for step in range(2_000):
        record.write(Kind.QUORUM, step=step, members=[0, 1], contributors=[0] if step % 200 < 20 else [0, 1])
        record.write(Kind.VOTE, step=step)
        record.write(Kind.COMMIT, step=step)
    sink.close()
    old, whole = tmp_path / "r0.inc0.old.jsonl", path.read_bytes()
    for _ in range(3):
        shrink_life(path)
        old.write_bytes(whole)  # as after a crash behind the rename
        shrink_life(path)
        assert path.stat().st_size <= 5 * (16 << 10) and not old.exists()
        steps = [event.step for event in read_events(path) if event.kind is Kind.COMMIT]
        assert {*(lost + near for lost in range(200, 2_000, 200) for near in range(-3, 3)), 1_999} <= set(steps)
        assert steps == sorted(steps)
        quorums = [event.step for event in read_events(path) if event.kind is Kind.QUORUM]
        assert set(range(20, 2_000, 200)) <= set(quorums), "from when it is there again"


@pytest.mark.parametrize("newest", [1, 2, 7, 600, 10_000])
def test_the_newest_events_are_read_from_the_end_of_a_file(tmp_path: Path, newest: int) -> None:
    path = tmp_path / "r0.jsonl"
    events = [Event(Kind.COMMIT, "r0", step, 1.0, 2.0, {"what": "\u00e9" * (step % 200)}) for step in range(3_000)]
    path.write_text("".join(event.to_json() + "\n" for event in events))
    assert path.stat().st_size > 4 << 16, "several blocks"
    assert newest_events(path, newest) == events[-newest:]
    with open(path, "a") as file:
        file.write('{"kind":"comm')  # cut short
    assert newest_events(path, newest) == events[-newest:]
    path.write_text("")
    assert newest_events(path, newest) == []


def kinds_in(path: Path) -> list[Kind]:
    return [event.kind for event in read_events(path)]


STEP = (Kind.WORK_BEGIN, Kind.WORK_END, Kind.EXCHANGE_BUCKET, Kind.VOTE, Kind.COMMIT, Kind.QUORUM_JOIN, Kind.QUORUM, Kind.APPLY)


def test_what_begins_work_is_in_the_file_at_once_with_all_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies there says how far it came; and a short step makes few calls of the system."""
    calls, write = [], os.write
    monkeypatch.setattr(record_module, "GATHER_S", 3600.0)
    sink, record = BoundedSink(tmp_path / "r0.jsonl", 1 << 20), FlightRecord("r0")
    record.attach(sink)
    monkeypatch.setattr(os, "write", lambda fd, data: [calls.append(fd), write(fd, data)][1])
    for step in range(10):
        for kind in STEP:
            record.write(kind, step=step)
        record.write(Kind.WORK_BEGIN, step=step + 1)
        found = kinds_in(tmp_path / "r0.jsonl")
        assert found[-8:] == [kind for kind in STEP if kind is not Kind.EXCHANGE_BUCKET] + [Kind.WORK_BEGIN]
        assert kinds_in(tmp_path / "r0.detail.jsonl") == [Kind.EXCHANGE_BUCKET] * (step + 1)
    assert len(calls) <= 10 * 3
    record.write(Kind.VOTE)
    record.write(Kind.FAILURE)
    assert kinds_in(tmp_path / "r0.jsonl")[-1] is Kind.VOTE, "what is rare comes after what was before it"
    assert kinds_in(tmp_path / "r0.story.jsonl") == [Kind.FAILURE]
    sink.close()


def test_what_is_gathered_reaches_the_file_while_nothing_more_happens(tmp_path: Path) -> None:
    """A rank that hangs says where."""
    sink, record = BoundedSink(tmp_path / "r0.jsonl", 1 << 20), FlightRecord("r0")
    record.attach(sink)
    for kind in (Kind.WORK_END, Kind.VOTE, Kind.COMMIT):  # each time the thread that writes may have gone to rest
        record.write(kind)
        deadline = time.monotonic() + 60
        while kind not in kinds_in(tmp_path / "r0.jsonl") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kinds_in(tmp_path / "r0.jsonl")[-1] is kind
    sink.close()


def test_of_lines_that_are_written_together_those_that_a_full_disk_does_not_take_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "flight.jsonl"
    sink = JsonLinesSink(path)
    lines = [Event(Kind.COMMIT, "r0", step, 1.0, 2.0, {}).to_json() + "\n" for step in range(10)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sum(map(len, lines[:4])) + 20, hard))  # the fifth is cut short
    try:
        sink.write(lines)
        sink.write(lines[:2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.write(lines[8:])
    assert sink.lost == 8
    assert [event.step for event in read_events(path)] == [0, 1, 2, 3, 8, 9]
    sink.close()
