"""The run's log is bounded: what lies far behind the newest entry and behind a complete checkpoint is deleted, in the store, in
memory and on disk, and nothing that counts is lost."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest

from helixrt.bench import lasting
from helixrt.emulate.step_node import Violation
from helixrt.emulate.step_world import StepWorld
from helixrt.errors import ConfigError, StartAgain
from helixrt.job import checkpoint as checkpoints
from helixrt.job.compaction import Compaction, history_of
from helixrt.job.lineage_files import LineageWriter, drop_from, forget_before, read_log, with_history
from helixrt.protocol.step.lineage import Behind, CommitRecord, Log, audit, genesis
from helixrt.replica.runlog import LOOK_S, RunLog
from helixrt.replica.store import MemoryRunStore
from tests.emulate.sweeps import SweepOf, sweep_all
from tests.emulate.test_step_world import SCHEDULES

REPLICAS = 3


def drawn_log(seed: int, entries: int = 60) -> Log:
    """A log in which now and then an entry supersedes up to three steps."""
    chance = random.Random(seed)
    log = Log([genesis("run", REPLICAS)])
    while len(log) < entries:
        base = log.head
        for _ in range(chance.choice([0, 0, 0, 0, 1, 1, 3])):
            base = log.get(base.parent) or base
        log.append(lasting.next_record(base, log.head.generation))
    return log


def saved(folder: Path, record: CommitRecord) -> None:
    made = folder / "checkpoints" / checkpoints.folder_name(record)
    made.mkdir(parents=True)
    (made / checkpoints.MANIFEST).write_text("{}")


def test_a_log_that_was_cut_says_the_same_of_what_it_has(seed: int) -> None:
    for number in range(seed, seed + 60):
        whole, cut = drawn_log(number), drawn_log(number)
        index = cut.may_begin(random.Random(number).randrange(len(cut)))
        cut.drop(index, advance=1)
        assert len(cut) == len(whole) and cut.head == whole.head and cut.genesis == whole.genesis
        assert cut.entries == whole.entries[index:] and cut.entry(index) == whole.entries[index]
        assert index == 0 or cut.entry(index - 1) is None
        for at, entry in enumerate(whole.entries):
            known = at >= index
            assert (cut.get(entry.hash) is not None) == known
            assert cut.on_chain(entry.hash) == (known and whole.on_chain(entry.hash)), (number, at)
            assert cut.may_be_on_chain(entry.hash) or not whole.on_chain(entry.hash)
        first = cut.entries[0].step
        assert cut.above(-1) == [r for r in whole.above(-1) if r.step >= (first if index else 0)]
        assert cut.above(first + 2) == whole.above(first + 2)
        assert audit(cut.chain(), 1, cut.behind.audit) == audit(whole.chain(), 1), number
        assert cut.behind.superseded + len(cut.superseded()) == len(whole.superseded())
        assert Behind.from_json(cut.behind.to_json()) == cut.behind
        again = Log(cut.entries, cut.behind)  # what is read back takes every entry: all parents are there
        again.append(lasting.next_record(again.head, again.head.generation))
        cut.drop(cut.may_begin(len(cut) - 5), advance=1)
        assert audit(cut.chain(), 1, cut.behind.audit) == audit(whole.chain(), 1), "a second cut"


def test_a_reader_begins_where_the_log_does_and_one_that_is_too_late_starts_again() -> None:
    store, now_s = MemoryRunStore(), [0.0]
    source = drawn_log(1)
    writer = RunLog(store)
    writer.restore(source)
    late, other = (RunLog(store, clock=lambda: now_s[0]) for _ in range(2))
    assert late.read().entries == source.entries and late.read_from(len(source)) == []
    begin = source.may_begin(40)
    writer.compact(Behind(begin, source.genesis))
    read = RunLog(store).read()
    assert (read.behind.begin, read.genesis, read.head, len(read)) == (begin, source.genesis, source.head, len(source))
    assert store.get(f"log/{begin - 1}") is None and store.get(f"log/{begin}") is not None
    assert other.read_from(len(source)) == [] and other.begin == begin, "a reader that is not late learns where it begins"
    busy = RunLog(store, clock=lambda: now_s[0])
    assert busy.read_from(len(source) - 1) == source.entries[-1:] and busy.begin == begin, "one that always finds an entry, too"
    now_s[0] += 1.1 * LOOK_S
    with pytest.raises(StartAgain, match=rf"it begins with entry {begin}, not {begin - 1}"):
        late.read_from(begin - 1)


def test_what_is_behind_a_checkpoint_is_deleted_and_the_run_goes_on(tmp_path: Path) -> None:
    store, source = MemoryRunStore(), drawn_log(2, 400)
    saves = [next(i for i in range(at, 400) if source.on_chain(source.entries[i].hash)) for at in (150, 250, 350)]
    runlog = RunLog(store)
    compaction = Compaction(runlog, tmp_path, REPLICAS, kept=20, history=200)
    compaction.restore(Log(source.entries[:1]))
    driver = Log(source.entries[:1])
    lineage = LineageWriter(tmp_path / "lineage", gather_s=0.0)
    lineage.append(0, source.entries[0])
    for index, entry in enumerate(source.entries[1:], 1):
        runlog.append(index, entry)
        driver.append(entry)
        lineage.append(index, entry)
        if index in saves:
            lineage.flush()
            saved(tmp_path, entry)
            checkpoints.prune(tmp_path / "checkpoints", 1, 10**6)
        compaction.look(driver, 1)
        assert compaction.settle()
        assert runlog.begin <= index
        if index < saves[0]:
            assert runlog.begin == 0 and driver.behind.begin == 0, "no checkpoint, nothing is deleted"
    lineage.close()
    chain = source.chain()
    assert 0 < driver.behind.begin <= runlog.begin <= saves[-1]
    assert len(driver.entries) <= 65 < 200 <= len(read_log(tmp_path / "lineage").entries), "the history is on disk alone"
    assert audit(driver.chain(), 1, driver.behind.audit) == audit(chain, 1)
    resumed = read_log(tmp_path / "lineage")
    assert (len(resumed), resumed.head) == (len(source), source.head) and 0 < resumed.behind.begin <= driver.behind.begin
    whole = with_history(driver, tmp_path / "lineage")
    assert (whole.entries, whole.behind) == (resumed.entries, resumed.behind), "what the report reads"
    assert whole.entries == source.entries[whole.behind.begin :]
    assert audit(whole.chain(), 1, whole.behind.audit) == audit(chain, 1)
    assert whole.behind.superseded + len(whole.superseded()) == len(source.superseded())
    assert len(list((tmp_path / "lineage").glob("0*.json"))) < 400
    # a new life: the store gets what ranks need, and ends where the folder does
    drop_from(tmp_path / "lineage", len(resumed))
    second = MemoryRunStore()
    Compaction(RunLog(second), tmp_path, REPLICAS, kept=20, history=50).restore(resumed)
    read = RunLog(second).read()
    assert read.head == source.head and read.genesis == source.genesis and 20 <= len(read.entries) < len(resumed.entries)


def test_files_that_overlap_lose_nothing_that_only_they_have(tmp_path: Path) -> None:
    """Another writer began in the middle of a file's range: its shorter file does not stand for the longer one."""
    source = drawn_log(3, 20)
    folder = tmp_path / "lineage"
    folder.mkdir()
    for begin, end in ((0, 10), (3, 6), (10, 20)):
        (folder / f"{begin:08d}.json").write_text("\n".join(entry.to_json() for entry in source.entries[begin:end]))
    cut = Log(source.entries)
    index = next(i for i in range(4, 10) if cut.may_begin(i) == i)
    cut.drop(index, advance=1)
    forget_before(folder, cut.behind)
    assert read_log(folder).entries == source.entries[index:]
    (folder / "begin.json").write_text("[1")
    with pytest.raises(ConfigError, match="resume=true: cannot read .*begin.json"):
        read_log(folder)


def test_a_history_is_longer_than_what_ranks_read() -> None:
    assert history_of(2) == 100_000 and history_of(256) == 2000


def cut_world(seed: int) -> StepWorld:
    """Longer runs than those of `test_step_world`, so that logs are cut: to three entries, where a job keeps a thousand."""
    return StepWorld(seed, 2 + seed % 4, 1 + seed // 4 % 3, 20, SCHEDULES[seed // 12 % len(SCHEDULES)], compacts=3)


@pytest.mark.system
def test_replicas_that_forget_old_entries_keep_one_lineage(seed: int) -> None:
    hard = ("dropped", "crashes", "superseded", "waits", "reloads")
    sweep_all(SweepOf(cut_world, hard, Violation), seed, 72, hard)


def test_a_run_that_lasts_does_not_grow(tmp_path: Path) -> None:
    """The benchmark, in small."""
    marks, clean = lasting.live(8_000, 2, tmp_path / "short")
    assert clean and len(marks) == lasting.MARKS
    grown = lasting.growth(marks)
    for what in ("keys", "store_mb", "restart_requests"):
        assert grown[what] <= lasting.MOST_GROWTH < lasting.MARKS / lasting.STEADY, (what, marks)
    assert max(mark.keys for mark in marks) <= 2500


@pytest.mark.slow  # 16,000 records of 256 replicas, and the start of 64 ranks
@pytest.mark.timeout(500)
def test_what_a_run_keeps_stays_small_through_many_records_and_the_start_of_many_ranks(tmp_path: Path) -> None:
    """`helixrt bench lasting` makes a million records, and starts up to 256 ranks; this a part of it."""
    arguments = argparse.Namespace(records=16_000, replicas=256, start=(32, 64), json=tmp_path / "lasting.json")
    assert lasting.run(arguments) == 0
