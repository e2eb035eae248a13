"""A checkpoint is found again bit for bit when it is whole, and never used when it is not."""

import dataclasses
import errno
import json
import resource
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from helixrt.errors import ConfigError, Retryable
from helixrt.job import checkpoint as checkpoints
from helixrt.job.checkpoint import (
    Checkpoint,
    find_resume,
    is_due,
    newest_complete,
    pause_steps,
    verify,
    writer_of,
    writer_of_last,
)
from helixrt.job.checkpoint_layout import RankPart
from helixrt.job.checkpoint_writer import Checkpointer, kept_key
from helixrt.job.lineage_files import LineageWriter, drop_from, read_lineage
from helixrt.job.storage_trouble import StorageTrouble
from helixrt.job.stored_path import Place, StoredPath, place_of
from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.record import FlightRecord, Kind
from helixrt.replica.contracts import State
from helixrt.replica.store import MemoryRunStore
from tests.job.chains import chain_of
from tests.job.object_store import ObjectStore
from tests.waiting import until


def record_of(step: int, generation: int = 1) -> CommitRecord:
    return CommitRecord(step, generation, "parent", ((0, 0), (1, 0)), {0: step, 1: step}, "run")


WEIGHT, MESH = "parameter/weight", {"pp": 2}


def state_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Of an engine that does not say how its state lies in a whole one: each rank has its own."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {
        WEIGHT: torch.randn(7, 5, generator=generator),
        "moment": torch.randn(35, generator=generator, dtype=torch.float64),
        "step": torch.tensor(step),
    }


def part_of(rank: int, step: int) -> RankPart:
    return RankPart.of(State(state_of(rank, step)), {})


def load(checkpoint: Checkpoint, rank: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(checkpoints.load(checkpoint, rank, MESH, State(like), {}).state.tensors)


@pytest.fixture(params=["folder", "storage"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return tmp_path if request.param == "folder" else StoredPath(f"objects://{tmp_path}/bucket/run")


def half_written(place: Place, record: CommitRecord) -> None:
    """A checkpoint that some life of a replica has begun."""
    part = checkpoints.attempt_folder(place, record, "0-9-9-0") / "rank_0"
    if isinstance(part, Path):
        part.mkdir(parents=True)
    else:
        (part / "__0_0.distcp").write_bytes(b"some")


class Replica:
    """The checkpointers of a replica's ranks, all in this process."""

    def __init__(
        self,
        folder: Place,
        stages: int = 2,
        every: int = 2,
        keep: int = 3,
        write_s: float = 20.0,
        last_step: int = 1000,
        life: str = "0/0",
    ) -> None:
        self.records = [FlightRecord(f"r0.pp{s}") for s in range(stages)]
        self.store, self.said = MemoryRunStore(), list[str]()
        self.savers = [
            Checkpointer(
                folder, s, {"pp": stages}, self.store, self.records[s], every, keep, last_step, write_s, life, self.said.append
            )
            for s in range(stages)
        ]
        self.flushed: list[int] = []

    def save(self, record: CommitRecord, me_writes: bool = True, departs: bool = False) -> list[bool]:
        begun = []
        for stage, saver in enumerate(self.savers):
            state = state_of(stage, record.step)
            part, flush = partial(RankPart.of, State(state), {}), partial(self.flushed.append, record.step)
            if departs:
                begun.append(saver.save(record, part, flush, after_failover=False, departs=True))
            else:
                begun.append(saver.maybe_save(record, part, me_writes, flush))
            state[WEIGHT].zero_()  # the engine trains on
        return begun

    def save_and_wait(self, record: CommitRecord) -> None:
        self.save(record)
        for saver in self.savers:
            saver.wait(120)

    def kinds(self, stage: int) -> list[Kind]:
        return [e.kind for e in self.records[stage].events()]

    def close(self) -> None:
        for saver in self.savers:
            saver.close()


def test_what_is_loaded_is_what_was_saved_bit_for_bit(place: Place) -> None:
    replica = Replica(place)
    replica.save_and_wait(record_of(2))
    found = newest_complete(place)
    assert found is not None and (found.record, found.mesh, found.ranks) == (record_of(2), MESH, 2)
    for stage in range(2):
        expected = state_of(stage, 2)
        got = load(found, stage, like={k: torch.zeros_like(v) for k, v in expected.items()})
        assert sorted(got) == sorted(expected)
        assert all(torch.equal(got[k], expected[k]) and got[k].dtype == expected[k].dtype for k in expected)
    assert replica.kinds(0) == [Kind.CHECKPOINT_BEGIN, Kind.CHECKPOINT_END] and replica.kinds(1) == [Kind.CHECKPOINT_BEGIN]
    assert replica.flushed == [2], "the lineage was made durable first"
    replica.close()


def test_only_due_steps_and_only_the_writer(place: Place) -> None:
    replica = Replica(place)
    assert replica.save(record_of(3)) == [False, False]
    assert replica.save(record_of(4), me_writes=False) == [False, False]
    assert Replica(place, every=0).save(record_of(4)) == [False, False]
    assert checkpoints.step_folders(place) == []
    assert writer_of(CommitRecord(4, 1, "p", ((2, 0), (1, 0)))) == 1


@pytest.mark.parametrize(
    ("steps", "every", "due"), [(310, 50, [50, 100, 150, 200, 250, 300, 310]), (62, 25, [25, 50, 62]), (50, 25, [25, 50]),
                                (7, 100, [7]), (7, 0, [])]
)  # fmt: skip
def test_the_last_step_is_always_due(steps: int, every: int, due: list[int]) -> None:
    assert [step for step in range(steps + 1) if is_due(step, every, steps)] == due


def test_the_last_state_has_one_writer_among_those_who_hold_it() -> None:
    record = CommitRecord(4, 1, "p", ((1, 0), (2, 0)), {0: 3, 1: 4, 2: 4}, "run")
    assert writer_of_last(record, {0, 1, 2}) == writer_of(record) == 1, "replica 0 caught up after the last step"
    assert writer_of_last(record, {0, 2}) == 0 and writer_of_last(record, {2}) == 2


def test_one_out_of_turn_is_as_good_as_any_and_says_why(place: Place) -> None:
    replica = Replica(place)
    assert not checkpoints.saved_since(place, 0)
    for stage, saver in enumerate(replica.savers):
        begun = saver.save(record_of(3), lambda stage=stage: part_of(stage, 3), lambda: None, after_failover=True)
        assert begun, "nothing else is being written"
    for saver in replica.savers:
        saver.wait(60)
    replica.save_and_wait(record_of(4))
    ends = [e for e in replica.records[0].events() if e.kind is Kind.CHECKPOINT_END]
    assert [(e.step, e.detail["after_failover"]) for e in ends] == [(3, True), (4, False)]
    saved = verify(place_of(ends[0].detail["path"]))
    assert torch.equal(load(saved, 1, state_of(1, 3))[WEIGHT], state_of(1, 3)[WEIGHT])
    half_written(place, record_of(6))
    assert [checkpoints.saved_since(place, step) for step in (3, 4, 5, 6)] == [True, True, False, False]
    replica.close()
    assert not replica.savers[0].save(record_of(5), lambda: part_of(0, 5), lambda: None, after_failover=True), "it has ended"


def test_newest_is_found_and_older_ones_go(place: Place) -> None:
    replica = Replica(place, keep=2)
    half_written(place, record_of(1))  # long ago
    for step in (2, 4, 6, 8):
        replica.save_and_wait(record_of(step))
    replica.close()
    assert [f.name[:13] for f in checkpoints.step_folders(place)] == ["step_00000008", "step_00000006"]
    found = newest_complete(place)
    assert found is not None and found.record.step == 8


def test_older_ones_stay_until_the_newest_cannot_be_superseded(place: Place) -> None:
    replica, settled = Replica(place, keep=1), set[int]()
    for saver in replica.savers:
        saver._is_settled = lambda record: record.step in settled
    for step in (2, 4):
        replica.save_and_wait(record_of(step))
    assert len(checkpoints.step_folders(place)) == 2, "others may go on behind step 3"
    replica.save_and_wait(record_of(6))
    assert [f.name[:13] for f in checkpoints.step_folders(place)] == ["step_00000006", "step_00000004"]
    settled.add(8)
    replica.save_and_wait(record_of(8))
    replica.close()
    assert [f.name[:13] for f in checkpoints.step_folders(place)] == ["step_00000008"]


def test_all_of_a_step_stay(tmp_path: Path) -> None:
    """One of two is of a record that was superseded; which one its name does not say."""
    replica = Replica(tmp_path, keep=1)
    one, other = record_of(4), dataclasses.replace(record_of(4), generation=99)
    for record in (record_of(2), one, other):
        replica.save_and_wait(record)
    replica.close()
    assert {f.name for f in checkpoints.step_folders(tmp_path)} == {checkpoints.folder_name(r) for r in (one, other)}


def test_a_file_system_that_does_not_answer_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an older checkpoint would be taken."""
    replica = Replica(tmp_path)
    for step in (2, 4):
        replica.save_and_wait(record_of(step))
    replica.close()
    read = checkpoints.file_sum

    def stale(path: Place) -> list[int]:
        if "step_00000004" in str(path):
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path)

    monkeypatch.setattr(checkpoints, "file_sum", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        newest_complete(tmp_path)


def test_pruned_while_it_is_read_is_no_damage(place: Place) -> None:
    """A replica that starts again reads while the others train, save and prune."""
    replica = Replica(place, keep=1)
    replica.save_and_wait(record_of(2))

    def overtaken(folder: Place) -> Checkpoint:
        if folder.name.startswith("step_00000002"):
            replica.save_and_wait(record_of(4))
        return verify(folder)

    found = newest_complete(place, check=overtaken)
    assert found is not None and found.record.step == 4
    replica.close()


def test_rank_that_never_writes_leaves_no_checkpoint_and_training_goes_on(place: Place) -> None:
    replica = Replica(place, write_s=0.3)
    replica.savers[0].maybe_save(record_of(2), lambda: part_of(0, 2), True, lambda: None)
    replica.savers[0].wait(60)
    assert newest_complete(place) is None
    assert replica.kinds(0) == [Kind.CHECKPOINT_BEGIN, Kind.STORAGE_FAILED]
    assert "rank 1 did not write its part in 0.3 s" in replica.said[0]
    for saver in replica.savers:
        saver._write_s = 300.0  # the next one has the time that a busy disk takes
    replica.save_and_wait(record_of(4))
    assert replica.said[1:] == ["checkpoint of step 4 was written, after 1 failed attempts"]
    found = newest_complete(place)
    assert found is not None and found.record.step == 4
    replica.close()


@pytest.mark.parametrize("departs", [False, True], ids=["last", "departure"])
def test_the_last_checkpoint_of_a_run_or_a_replica_waits_for_one_that_is_being_written(place: Place, departs: bool) -> None:
    replica = Replica(place, last_step=400 if departs else 4)
    go = threading.Event()
    replica.savers[1]._write_part = lambda *a, write=replica.savers[1]._write_part: (go.wait(60), write(*a))  # type: ignore[assignment,misc]
    assert replica.save(record_of(2)) == [True, True]
    assert replica.save(record_of(4), departs=departs) == [True, True]
    go.set()
    replica.close()
    found = newest_complete(place)
    assert found is not None and found.record.step == 4
    assert torch.equal(load(found, 1, state_of(1, 4))[WEIGHT], state_of(1, 4)[WEIGHT]), "as it was when it was asked for"


def test_rank_that_is_still_busy_gives_the_next_one_up_for_all(place: Place) -> None:
    replica = Replica(place)
    go = threading.Event()
    replica.savers[1]._write_part = lambda *a, write=replica.savers[1]._write_part: (go.wait(60), write(*a))  # type: ignore[assignment,misc]
    assert replica.save(record_of(2)) == [True, True]
    time.sleep(0.01)
    begun = replica.save(record_of(4))
    assert begun[1] is False, "the caller does not wait"
    go.set()
    for saver in replica.savers:
        saver.wait(60)
    found = newest_complete(place)
    assert found is not None and found.record.step == 2
    replica.save_and_wait(record_of(6))
    found = newest_complete(place)
    assert found is not None and found.record.step == 6
    replica.close()


def test_killed_while_writing_leaves_a_half_written_one_that_is_not_used(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.save_and_wait(record_of(2))

    class Killed(BaseException):
        pass

    seen: list[list[str]] = []

    def kill(event: object) -> None:
        (part,) = (tmp_path / checkpoints.folder_name(record_of(4))).glob("rank_1.part-*")
        seen.append([p.name for p in part.iterdir() if p.stat().st_size])
        raise Killed

    replica.records[1].attach(kill)
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        replica.save(record_of(4))
        until(lambda: seen)
    finally:
        threading.excepthook = hook
    assert len(seen) == 1 and len(seen[0]) == 1, "some bytes were there, the metadata was not"
    found = newest_complete(tmp_path)
    assert found is not None and found.record.step == 2
    replica.close()


def test_a_write_that_fails_is_told_and_the_next_ones_succeed(tmp_path: Path) -> None:
    """A file of a stage that grows beyond what the system allows: DCP then raises what is no Exception."""
    folder = tmp_path / "checkpoints"
    replica = Replica(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        replica.save_and_wait(record_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert newest_complete(folder) is None
    assert list((folder / checkpoints.folder_name(record_of(2))).iterdir()) == [], "what was written of it is gone"
    outage = replica.savers[0].trouble.outage
    assert outage is not None and (outage.failures, outage.step) == (1, 2) and "File too large" in outage.reason
    replica.save_and_wait(record_of(4))
    assert newest_complete(folder).record.step == 4  # type: ignore[union-attr]
    assert replica.savers[0].trouble.outage is None
    assert [e.kind for e in replica.records[0].events() if "storage" in e.kind] == [Kind.STORAGE_FAILED, Kind.STORAGE_BACK]
    assert len(replica.said) == 2 and "step 2 could not be written" in replica.said[0] and "step 4" in replica.said[1]
    replica.close()


def test_a_rank_that_fails_is_tried_again_and_the_other_is_not_written_twice(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    write = replica.savers[1]._write_part

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    replica.savers[1]._write_part = full  # type: ignore[method-assign]
    replica.save_and_wait(record_of(2))
    assert "rank 1 could not write its part: [Errno 28]" in replica.said[0]
    part = tmp_path / checkpoints.folder_name(record_of(2)) / "rank_0"
    before = part.stat().st_ino
    replica.savers[1]._write_part = write  # type: ignore[method-assign]
    replica.save_and_wait(record_of(2))
    assert newest_complete(tmp_path) is not None and part.stat().st_ino == before
    replica.close()


def test_two_replicas_may_write_the_same_checkpoint_at_a_time(place: Place) -> None:
    """Whatever the order in which their stages get on, each sees one that is whole."""
    replicas = [Replica(place, last_step=4, life=f"{number}/0") for number in range(2)]
    for _ in range(3):
        for replica in replicas:
            replica.save(record_of(4))
    for replica in replicas:
        replica.close()
        assert replica.said == [] and replica.store.get(kept_key(record_of(4))) == "yes"
    found = newest_complete(place)
    assert found is not None and found.record.step == 4
    assert {p.name for p in found.folder.iterdir()} == {"rank_0", "rank_1", "objects", ".metadata", checkpoints.MANIFEST}


@pytest.mark.parametrize("failures", range(1, 12))
def test_a_failed_checkpoint_is_tried_again_within_few_steps(failures: int) -> None:
    assert 1 <= pause_steps(failures, 50) <= min(50, 2 ** (failures - 1))
    assert pause_steps(failures, 1) == 1


def test_records_of_the_same_step_stay_apart(place: Place) -> None:
    replica = Replica(place)
    replica.save_and_wait(record_of(2, generation=1))
    replica.save_and_wait(record_of(2, generation=9))
    names = {f.name for f in checkpoints.step_folders(place)}
    assert len(names) == 2
    assert {verify(place / n).record.generation for n in names} == {1, 9}
    replica.close()


@pytest.fixture(params=["folder", "storage"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "2026-01-02" / "03-04-05"
    place: Place = folder / "checkpoints"
    if request.param == "storage":
        place = StoredPath(f"objects://{tmp_path}/bucket/run")
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"checkpoints": str(place)}))
    assert checkpoints.checkpoints_of(folder) == place
    replica = Replica(place)
    replica.save_and_wait(record_of(2))
    replica.save_and_wait(record_of(4))
    replica.close()
    return folder


def files_of(place: Place) -> Path:
    """Where the files or objects of a place are on this machine."""
    return Path(str(place).removeprefix("objects://"))


def damage(run: Path, step: int, how: str) -> None:
    places = checkpoints.step_folders(checkpoints.checkpoints_of(run))
    folder = files_of(next(f for f in places if f.name.startswith(f"step_{step:08d}")))
    data = next(p for p in (folder / "rank_1").iterdir() if p.suffix == ".distcp")
    if how == "flipped":
        raw = bytearray(data.read_bytes())
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw)
    elif how == "short":
        data.write_bytes(data.read_bytes()[:-9])
    elif how == "lost_part":
        shutil.rmtree(folder / "rank_1")
    elif how == "garbled_manifest":
        (folder / checkpoints.MANIFEST).write_text("{")
    elif how == "half_written":
        (folder / checkpoints.MANIFEST).unlink()


@pytest.mark.parametrize("how", ["flipped", "short", "lost_part", "garbled_manifest", "half_written"])
def test_damaged_ones_are_passed_over_and_reported_when_none_is_left(run: Path, how: str, tmp_path: Path) -> None:
    damage(run, 4, how)
    found = find_resume(tmp_path)
    assert (found[0], found[1].record.step) == (run, 2)
    damage(run, 2, how)
    why = "no complete" if how == "half_written" else "unreadable"
    with pytest.raises(ConfigError, match=rf"^resume=true: .*{why}") as caught:
        find_resume(tmp_path)
    assert "\n" not in str(caught.value)


def test_resume_takes_the_newest_run_that_has_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "2026-01-03" / "00-00-00" / "checkpoints").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(run)
    assert find_resume(tmp_path)[0] == run
    with pytest.raises(ConfigError, match="no complete checkpoint in any run under"):
        find_resume(tmp_path / "nowhere")


def test_resume_passes_over_a_superseded_record(tmp_path: Path) -> None:
    run = tmp_path / "2026-01-02" / "03-04-05"
    root = genesis("run", 1)
    log = [root]
    for step in (1, 2):
        log.append(CommitRecord(step, step, log[-1].hash, ((0, 0),), {0: step}, "run"))
    log.append(CommitRecord(2, 9, log[1].hash, ((0, 0),), {0: 2}, "run"))  # supersedes the other one of step 2
    writer, replica = LineageWriter(run / "lineage"), Replica(run / "checkpoints", every=1)
    for index, entry in enumerate(log):
        writer.append(index, entry)
    writer.close()
    for entry in log[1:3]:
        replica.save_and_wait(entry)
    replica.close()
    assert find_resume(tmp_path)[1].record == log[1]
    shutil.rmtree(run / "checkpoints" / checkpoints.folder_name(log[1]))
    with pytest.raises(ConfigError, match="only complete checkpoints, the newest of step 2, are of steps that were superseded"):
        find_resume(tmp_path)


def test_one_that_is_deleted_while_it_is_loaded_is_refused(run: Path, tmp_path: Path) -> None:
    """DCP's error for it is no Exception: it would end the rank with a traceback instead of a message."""
    found = newest_complete(checkpoints.checkpoints_of(run))
    assert found is not None
    for written in files_of(found.folder).rglob("*.distcp"):
        written.unlink()
    with pytest.raises(ConfigError, match="cannot load"):
        load(found, 0, state_of(0, 4))


def test_other_model_cannot_load_it(run: Path, tmp_path: Path) -> None:
    found = find_resume(tmp_path)[1]
    other = {**state_of(0, 4), WEIGHT: torch.zeros(7, 6)}
    with pytest.raises(ConfigError, match=r"'parameter/weight' is \[7, 5\] float32 there and of shape \[7, 6\] here"):
        load(found, 0, other)
    with pytest.raises(ConfigError, match=r"'parameter/bias' is absent there"):
        load(found, 0, {**state_of(0, 4), "parameter/bias": torch.zeros(1)})


def test_lineage_is_read_up_to_a_gap_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    entries = chain_of(5)
    for index, entry in enumerate(entries):  # as runs wrote them that did not gather records
        (tmp_path / f"{index:08d}.json").write_text(entry.to_json())
    assert read_lineage(tmp_path) == entries
    (tmp_path / "00000003.json").write_text(json.dumps({"step": 3}))
    with pytest.raises(ConfigError, match=r"^resume=true: cannot read .*00000003\.json"):
        read_lineage(tmp_path)
    (tmp_path / "00000003.json").unlink()
    assert read_lineage(tmp_path) == entries[:3], "what follows a gap does not count"


def test_lineage_that_cannot_be_written_is_written_later_in_order(tmp_path: Path) -> None:
    """A file in the place of its folder, as an administrator's mistake or a lost mount leaves it."""
    folder, entries, said = tmp_path / "lineage", chain_of(9), list[str]()
    record = FlightRecord("r0.pp0")
    writer = LineageWriter(folder, trouble=StorageTrouble("lineage", record, said.append))
    writer.append(0, entries[0])
    writer.flush(20)
    folder.rename(tmp_path / "away")
    folder.write_text("in its place")
    for index, entry in enumerate(entries[1:], 1):
        writer.append(index, entry)
    for _ in range(2):  # it goes on failing, and says so to each who asks
        with pytest.raises(NotADirectoryError):
            writer.flush(20)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    writer.flush(20)
    assert read_lineage(folder) == entries
    assert "lineage of step 1 could not be written" in said[0] and "lineage of step 1 was written, after" in said[-1]
    assert {e.kind for e in record.events()} == {Kind.STORAGE_FAILED, Kind.STORAGE_BACK}
    writer.close()


def test_lineage_waits_in_little_memory_and_is_whole_all_the_same(tmp_path: Path) -> None:
    folder, entries = tmp_path / "lineage", chain_of(40)
    log: list[CommitRecord] = []
    asked: list[int] = []

    def again(index: int) -> list[CommitRecord]:
        asked.append(index)
        if len(asked) == 1:
            raise Retryable("the store is away")
        return log[index:]

    writer = LineageWriter(folder, again=again, capacity=3)
    folder.rmdir()
    folder.write_text("in its place")
    for index, entry in enumerate(entries):
        log.append(entry)
        writer.append(index, entry)
        assert len(writer._pending) <= 3
    folder.unlink()
    folder.mkdir()
    writer.close()
    assert read_lineage(folder) == entries and asked


def test_lineage_that_is_never_writable_does_not_keep_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineageWriter, "CLOSE_S", 0.2)
    writer = LineageWriter(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    writer.append(0, genesis("run", 1))
    with pytest.raises(FileNotFoundError):
        writer.flush(20)
    writer.close()


def test_entries_behind_a_gap_do_not_come_back(tmp_path: Path) -> None:
    first, second = record_of(1), record_of(2)
    for index, entry in ((0, genesis("run", 1)), (2, first)):
        (tmp_path / f"{index:08d}.json").write_text(entry.to_json())
    drop_from(tmp_path, len(read_lineage(tmp_path)))
    writer = LineageWriter(tmp_path)
    writer.append(1, first)
    writer.append(2, second)
    writer.close()
    assert read_lineage(tmp_path)[1:] == [first, second]


@pytest.mark.parametrize("run", ["storage"], indirect=True)
def test_resume_says_which_storage_cannot_be_read(run: Path, tmp_path: Path) -> None:
    ObjectStore.broken = "connection refused"
    try:
        with pytest.raises(ConfigError, match=r"its checkpoints in objects://.* cannot be read: .*connection refused"):
            find_resume(tmp_path)
    finally:
        ObjectStore.broken = ""


def test_only_what_is_wanted_is_read_whole(run: Path) -> None:
    read: list[str] = []
    place = checkpoints.checkpoints_of(run)

    def check(folder: Place) -> Checkpoint:
        read.append(folder.name[:13])
        return verify(folder)

    found = newest_complete(place, lambda record: record.step < 4, check)
    assert found is not None and found.record.step == 2 and read == ["step_00000002"]


def test_a_folder_whose_run_cannot_be_read_is_not_taken_for_one_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()  # as an error of the file system
    with pytest.raises(Retryable, match=r"run.json cannot be read: .*Is a directory"):
        checkpoints.checkpoints_of(tmp_path)


def test_the_newest_run_is_the_one_that_began_last_whatever_its_folder_is_called(tmp_path: Path) -> None:
    """Folders have local times, and machines may be in other zones."""
    begun = {"2026-01-01/09-00-00": 300.0, "2026-01-01/15-00-00": 100.0, "2026-01-01/12-00-00": 200.0}
    for name, epoch_s in begun.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(json.dumps({"epoch_s": epoch_s}))
    assert [run.name for run in checkpoints.run_folders(tmp_path)] == ["09-00-00", "12-00-00", "15-00-00"]
    (tmp_path / "2026-01-01" / "10-00-00").mkdir()
    assert checkpoints.run_folders(tmp_path)[0].name == "10-00-00", "without a word of its own, by its name"
