"""Files of a run's log are merged while writers write, readers read and processes are lost: nothing is lost, and few remain."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from helixrt.bench import lasting
from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job import compaction as compactions
from helixrt.job import lineage_files
from helixrt.job.compaction import Compaction
from helixrt.job.lineage_files import LineageWriter, drop_from, forget_before, merge_files, read_lineage, read_log
from helixrt.protocol.step.lineage import Log, audit
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import MemoryRunStore
from tests.job.chains import chain_of

MOST = 4  # records in a file, in these tests
SEEDS = 300


class Crash(BaseException):
    """The process is lost here."""


class Disk:
    """What the code under test asks the file system for; `event` is called before each change and during each listing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event: Callable[[], None] = lambda: None
        self.links = True
        real = {name: getattr(Path, name) for name in ("glob", "unlink", "read_text", "exists")}
        calls = {name: getattr(os, name) for name in ("replace", "link")}

        def during(name: str) -> Callable[..., Any]:
            def call(path: Path, *args: Any, **more: Any) -> Any:
                self.event()
                return real[name](path, *args, **more)

            return call

        def glob(path: Path, pattern: str) -> Iterator[Path]:
            """A listing takes time: some names are read before an event during it, some after."""
            before = set(real["glob"](path, pattern))
            self.event()
            after = set(real["glob"](path, pattern))
            late = {found for found in before | after if crc32(f"{found.name} {len(before)}".encode()) % 2}
            return iter((before - late) | (after & late))

        def renamed(name: str) -> Callable[..., None]:
            def call(*paths: Path) -> None:
                self.event()
                if name == "link" and not self.links:
                    raise OSError(95, "no links here")
                calls[name](*paths)

            return call

        monkeypatch.setattr(lineage_files, "_MOST", MOST)
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        monkeypatch.setattr(os, "getpid", count().__next__)  # each writer is a process
        for name in ("unlink", "read_text", "exists"):
            monkeypatch.setattr(Path, name, during(name))
        monkeypatch.setattr(Path, "glob", glob)
        for name in calls:
            monkeypatch.setattr(os, name, renamed(name))


class World:
    """Writers of one folder, the driver and a reader, one of which does something while another is in the middle of it."""

    def __init__(self, seed: int, folder: Path, disk: Disk) -> None:
        self.chance, self.folder, self.disk = random.Random(seed), folder, disk
        self.log = Log(chain_of(0))  # as the run's store has it
        self.life, self.crashes, self.nested = 0, 0, 0
        disk.links = self.chance.random() < 0.7
        self.writers = [LineageWriter(folder) for _ in range(3)]
        self.next = [0, 0, 0]  # entry that each writer writes next
        self.acknowledged = 0  # so many entries are on disk, by the word of a writer
        self.whole = list(self.log.entries)
        self.busy: set[str] = set()

    def run(self) -> None:
        self.disk.event = self.event
        try:
            for _ in range(30):
                self.act(self.chance.choice(["commit", "commit", "write", "write", "drive", "read", "restart", "resume"]))
                self.check()
            self.disk.event = lambda: None
            self.write_all()
            for _ in range(2):
                self.drive()
        finally:
            self.disk.event = lambda: None
            for writer in self.writers:
                writer.close()
        assert len(self.read()) == len(self.whole)
        names = [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]
        assert len(names) <= len(self.log.entries) / MOST + 4 * MOST, names

    def event(self) -> None:
        if self.nested < 2 and self.chance.random() < 0.04:
            self.nested += 1
            self.act(self.chance.choice(["commit", "write", "drive", "read", "restart"]))
            self.nested -= 1
        if self.chance.random() < 0.02 and self.busy:
            self.crashes += 1
            raise Crash

    def act(self, what: str) -> None:
        """In the middle of another's act, unless it is the same one's. What is crashed is the innermost act."""
        who = {"write": f"writer {self.chance.randrange(3)}", "drive": "driver", "read": "reader"}.get(what, "")
        if (who and who in self.busy) or (what in ("resume", "restart") and self.nested):
            return
        busy, self.busy = self.busy, self.busy | {who} - {""}
        nested = self.nested
        try:
            self.do(what, who)
        except Crash:
            if not self.busy - busy:
                raise
        finally:
            self.busy, self.nested = busy, nested

    def do(self, what: str, who: str) -> None:
        if what == "commit":
            for _ in range(self.chance.randrange(6)):
                record = replace(lasting.next_record(self.log.head, self.log.head.generation), life=self.life)
                self.log.append(record)
                self.whole.append(record)
        elif what == "write":
            self.write(int(who[-1]), self.chance.choice([1, 1, 2, MOST]))
        elif what == "drive":
            self.drive()
        elif what == "read":
            self.read()
        elif what == "restart":  # or it was stopped for long: it does not know what is on disk
            self.next[self.chance.randrange(3)] = self.log.behind.begin
        elif self.chance.random() < 0.2:  # by a driver that is alone
            self.disk.event = lambda: None
            log = read_log(self.folder)
            drop_from(self.folder, len(log))
            self.disk.event = self.event
            if log.entries:
                self.log, self.whole, self.life = log, self.whole[: len(log)], self.life + 1
                self.next, self.acknowledged = [log.behind.begin] * 3, len(log)

    def write(self, number: int, most: int) -> None:
        index = self.next[number]
        if index < len(self.whole):
            end = self.writers[number]._write(index, self.whole[index : index + min(most, MOST)])
            assert end > index
            self.next[number] = end
            self.acknowledged = max(self.acknowledged, min(end, len(self.whole)))

    def write_all(self) -> None:
        for number in range(3):
            while self.next[number] < len(self.whole):
                self.act("write")

    def drive(self) -> None:
        if len(self.log.entries) > 8 * MOST and self.chance.random() < 0.3:
            self.log.drop(min(self.log.may_begin(len(self.log) - 5 * MOST), self.acknowledged - 1), 1)
        forget_before(self.folder, self.log.behind)
        merge_files(self.folder, self.log.entries, self.log.behind.begin)

    def read(self) -> Log:
        least = self.acknowledged
        log = read_log(self.folder)
        assert not least or len(log) >= least, (len(log), least, sorted(path.name for path in self.folder.iterdir()))
        assert log.entries == self.whole[log.behind.begin : len(log)]
        return log

    def check(self) -> None:
        event, self.disk.event = self.disk.event, lambda: None
        found = self.read()
        if found.behind.audit is not None:
            assert audit(found.chain(), 1, found.behind.audit) == audit(self.whole[: len(found)], 1)
        self.disk.event = event


@pytest.mark.system
def test_writers_readers_merges_and_crashes_in_any_order_lose_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, crashes, merged = Disk(monkeypatch), 0, 0
    for number in range(seed, seed + SEEDS):
        world = World(number, tmp_path / str(number), disk)
        try:
            world.run()
        except BaseException:
            print(f"replay: World({number}, folder, disk).run()")
            raise
        crashes += world.crashes
        merged += len(list(world.folder.glob("*-*.json")))
    assert crashes > SEEDS / 4 and merged > SEEDS, (crashes, merged)


@pytest.mark.parametrize("records", [8_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_files_stay_few_however_long_the_run_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    """Steps are so long that each record has a file of its own: without merging there were as many as entries are kept."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    most, history = 64, 1000
    monkeypatch.setattr(lineage_files, "_MOST", most)
    run, folder, counts = tmp_path, tmp_path / "lineage", list[int]()
    log, runlog = Log(chain_of(0)), RunLog(MemoryRunStore())
    compaction = Compaction(runlog, run, 1, kept=400, history=history)
    compaction.restore(log)
    writer, late = LineageWriter(folder), LineageWriter(folder)
    writer._write(0, log.entries)
    for index in range(1, records + 1):
        record = lasting.next_record(log.head, log.head.generation)
        runlog.append(index, record)
        log.append(record)
        writer._write(index, [record])
        if index % 500 == 0:  # another replica, which is behind, finds its files deleted
            behind = log.entry(index - 200)
            assert behind is not None and late._write(index - 200, [behind]) > index - 200
            made = run / "checkpoints" / checkpoints.folder_name(record)
            made.mkdir(parents=True)
            (made / checkpoints.MANIFEST).write_text("{}")
            checkpoints.prune(run / "checkpoints", 1, 10**6)
        compaction.look(log, 1)
        assert compaction.settle()
        if index % 1000 == 0:
            counts.append(len(os.listdir(folder)))
    compaction.close()
    for each in (writer, late):
        each.close()
    assert log.behind.begin > records - 4 * history
    assert max(counts) <= 3 * history / most + 4 * most, counts
    found = read_log(folder)
    assert (len(found), found.head) == (records + 1, log.head) and found.behind == log.behind


def test_a_slow_folder_does_not_hold_up_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        begun.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(compactions, "merge_files", slow)
    log = Log(chain_of(0))
    compaction = Compaction(RunLog(MemoryRunStore()), tmp_path, 1, kept=4, history=50)
    for _ in range(10):
        log.append(lasting.next_record(log.head, log.head.generation))
        compaction.look(log, 1)  # while `slow` waits
    assert begun.wait(60) and not compaction.settle(0.0)
    goes_on.set()
    compaction.close()
    assert compaction.settle(0.0)


def test_merging_ends_early_when_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage_files, "_MOST", MOST)
    entries = chain_of(20)
    for index, entry in enumerate(entries):
        (tmp_path / f"{index:08d}.json").write_text(entry.to_json())
    answers = [False, False, True]
    merge_files(tmp_path, entries, 0, lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    assert len(list(tmp_path.glob("*-*.json"))) == 2 and len(list(tmp_path.iterdir())) == 23
    assert read_lineage(tmp_path) == entries


def test_a_log_that_does_not_begin_at_a_whole_file_is_merged_from_the_next_one_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of an earlier version, of which the oldest entries were forgotten."""
    monkeypatch.setattr(lineage_files, "_MOST", MOST)
    log = Log(chain_of(30))
    for index, entry in enumerate(log.entries):
        (tmp_path / f"{index:08d}.json").write_text(entry.to_json())
    log.drop(6, 1)
    forget_before(tmp_path, log.behind)
    merge_files(tmp_path, log.entries, 6)
    names = {path.stem for path in tmp_path.iterdir()}
    assert {n for n in names if "-" in n} == {f"{begin:08d}-{begin + 4:08d}" for begin in range(8, 28, 4)}
    assert {int(n) for n in names if n.isdigit()} == {6, 7, *range(24, 31)}
    assert read_log(tmp_path).entries == log.entries
    log.drop(17, 1)
    forget_before(tmp_path, log.behind)
    assert min(path.stem for path in tmp_path.glob("0*")) == "00000016-00000020"
    assert read_log(tmp_path).entries == log.entries
    drop_from(tmp_path, 31)
    (tmp_path / "00000028-00000032.json").write_text("never read")
    drop_from(tmp_path, 28)
    assert read_log(tmp_path).entries == log.entries[: 28 - 17]


def test_what_a_crash_left_half_written_is_deleted_by_the_next_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*paths: Path) -> None:
        raise Crash

    monkeypatch.setattr(lineage_files.os, "replace", lost)
    with pytest.raises(Crash):
        lineage_files.write_durably(tmp_path / "00000000-00001024.json", "{}")
    assert len(list(tmp_path.iterdir())) == 1
    drop_from(tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_a_merged_file_that_lacks_lines_is_damage_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage_files, "_MOST", MOST)
    entries = chain_of(3 * MOST)
    lineage_files.write_durably(tmp_path / "00000000.json", "\n".join(entry.to_json() for entry in entries))
    merge_files(tmp_path, entries, 0)
    merged = tmp_path / "00000004-00000008.json"
    merged.write_text(merged.read_text().rsplit("\n", 1)[0])
    (tmp_path / "00000000.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"cannot read .*00000004-00000008.json: it has 3 records"):
        read_log(tmp_path)
