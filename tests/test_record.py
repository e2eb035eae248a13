"""The flight record's file when the disk is full."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from helixrt.record import FlightRecord, JsonLinesSink, Kind, read_events


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
