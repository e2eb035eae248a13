"""The files of the run's log: shared by records that come fast, by writers of several replicas, and whole after a crash."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helixrt.errors import ConfigError
from helixrt.job import lineage_files
from helixrt.job.lineage_files import LineageWriter, read_lineage, read_log, write_durably
from helixrt.protocol.step.lineage import CommitRecord
from tests.job.chains import chain_of
from tests.waiting import until


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that were synced."""
    found: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(lineage_files.os, "fsync", lambda descriptor: (found.append(descriptor), sync(descriptor))[1])
    return found


def test_records_that_come_fast_share_a_file_and_its_two_syncs(tmp_path: Path, syncs: list[int]) -> None:
    entries = chain_of(500)
    writer = LineageWriter(tmp_path, gather_s=3600.0)
    for index, entry in enumerate(entries):
        writer.append(index, entry)
    assert not list(tmp_path.iterdir()), "they wait for more"
    writer.flush(20)
    assert read_lineage(tmp_path) == entries and [path.name for path in tmp_path.iterdir()] == ["00000000.json"]
    assert len(syncs) == 2
    writer.append(501, CommitRecord(501, 501, entries[-1].hash, ((0, 0),), {0: 501}, "run"))
    writer.close()
    assert len(read_lineage(tmp_path)) == 502 and len(syncs) == 4


def test_records_that_go_on_coming_are_gathered(tmp_path: Path) -> None:
    entries = chain_of(150)
    gather_s, begin_s = 0.05, time.monotonic()
    writer = LineageWriter(tmp_path, gather_s=gather_s)
    for index, entry in enumerate(entries):
        writer.append(index, entry)
        time.sleep(0.001)
    writer.close()
    files_in_time = (time.monotonic() - begin_s) / gather_s + 1  # a busy machine takes longer, so it may write more
    assert read_lineage(tmp_path) == entries and len(list(tmp_path.iterdir())) <= files_in_time


def test_a_record_is_written_when_its_time_is_over_though_nobody_asks(tmp_path: Path) -> None:
    entries = chain_of(3)
    writer = LineageWriter(tmp_path, gather_s=0.01)
    for index, entry in enumerate(entries):
        writer.append(index, entry)
        until(lambda: len(read_lineage(tmp_path)) > index)  # noqa: B023
        assert read_lineage(tmp_path) == entries[: index + 1]
    writer.close()


@pytest.mark.parametrize("links", [True, False])
def test_writers_of_several_replicas_leave_one_whole_log(
    tmp_path: Path, seed: int, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gathers other records into a file, and looks and writes at any moment."""
    if not links:

        def refuse(*paths: Any) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(lineage_files.os, "link", refuse)
    chance, entries = random.Random(seed), chain_of(60)
    lags = [chance.choice([0.0, 0.001, 0.004]) for _ in range(3)]
    writers = [LineageWriter(tmp_path, lag_s=lag_s, gather_s=0.002 * chance.random()) for lag_s in lags]

    def write(writer: LineageWriter, own: random.Random) -> None:
        for index, entry in enumerate(entries):
            writer.append(index, entry)
            if own.random() < 0.1:
                writer.flush(60)
                assert read_lineage(tmp_path)[: index + 1] == entries[: index + 1]
            if own.random() < 0.2:
                time.sleep(own.random() * 0.003)
        writer.close()

    threads = [threading.Thread(target=write, args=(w, random.Random(seed + n))) for n, w in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert read_lineage(tmp_path) == entries, f"seed {seed}"
    assert all(path.suffix == ".json" and not path.name.startswith(".") for path in tmp_path.iterdir())


def test_a_writer_that_comes_later_takes_what_is_there_and_goes_on_behind_it(tmp_path: Path, syncs: list[int]) -> None:
    entries = chain_of(9)
    first = LineageWriter(tmp_path, gather_s=3600.0)
    for index, entry in enumerate(entries[:6]):
        first.append(index, entry)
    first.close()
    synced, second = len(syncs), LineageWriter(tmp_path, gather_s=3600.0)
    for index, entry in enumerate(entries[:4]):
        second.append(index, entry)
    second.flush(20)
    assert len(syncs) == synced, "all of it was written by the other one"
    for index, entry in enumerate(entries[4:], 4):
        second.append(index, entry)
    second.close()
    assert read_lineage(tmp_path) == entries and {p.name for p in tmp_path.iterdir()} == {"00000000.json", "00000006.json"}


def test_a_record_that_a_rank_of_an_ended_life_wrote_late_gives_way(tmp_path: Path) -> None:
    """The run was resumed without it, while the rank still tried to write: the lineage could not be read any more."""
    entries = chain_of(3)
    late = replace(entries[2], generation=999)
    mine = replace(entries[2], life=1)
    write_durably(tmp_path / "00000002.json", late.to_json())
    for records in ([*entries[:2], mine], [*entries[:2], mine]):
        writer = LineageWriter(tmp_path, gather_s=0.0)
        writer.append(0, records[0])
        writer.flush(20)
        writer.append(1, records[1])
        writer.flush(20)
        writer.append(2, records[2])
        writer.close()
    assert read_log(tmp_path).head == mine
    early = LineageWriter(tmp_path, gather_s=0.0)
    for index, record in enumerate((*entries[:2], late)):
        early.append(index, record)
        early.flush(20)
    early.close()
    assert read_log(tmp_path).head == mine, "of a life before, it changes nothing"


def test_a_lineage_that_is_no_chain_is_refused_with_one_line(tmp_path: Path) -> None:
    entries = chain_of(3)
    write_durably(tmp_path / "00000000.json", "\n".join(e.to_json() for e in (entries[0], replace(entries[2], parent="x"))))
    with pytest.raises(ConfigError, match=r"resume=true: the lineage in .* is damaged: "):
        read_log(tmp_path)


def test_files_that_overlap_are_read_as_one_log(tmp_path: Path) -> None:
    """They begin at other records: nothing behind is lost for that; what comes after a gap is not taken."""
    entries = chain_of(12)
    for begin, end in ((0, 4), (2, 8), (3, 5), (6, 10), (11, 13)):
        (tmp_path / f"{begin:08d}.json").write_text("\n".join(entry.to_json() for entry in entries[begin:end]))
    assert read_lineage(tmp_path) == entries[:10]
