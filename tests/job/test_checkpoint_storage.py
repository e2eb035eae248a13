"""Checkpoints in a storage without renaming, which may fail: no checkpoint is lost, and no whole one is reported as damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helixrt.errors import ConfigError, Retryable
from helixrt.job import checkpoint as checkpoints
from helixrt.job.checkpoint import newest_complete
from helixrt.job.checkpoint_writer import kept_key
from helixrt.job.durable_state import DurableState
from helixrt.job.stored_path import StoredPath
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.replica.contracts import State
from helixrt.replica.store import MemoryRunStore
from tests.job.object_store import ObjectStore
from tests.job.test_checkpoint import MESH, WEIGHT, Replica, files_of, half_written, record_of, state_of


def test_a_storage_that_breaks_stops_no_training_and_the_next_attempt_is_in_a_folder_of_its_own(tmp_path: Path) -> None:
    place = StoredPath(f"objects://{tmp_path}/bucket/run")
    replica = Replica(place)
    replica.save_and_wait(record_of(2))
    write = replica.savers[1]._write_part

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    replica.savers[1]._write_part = full  # type: ignore[method-assign]
    replica.save_and_wait(record_of(4))
    assert "rank 1 could not write its part: [Errno 28]" in replica.said[0]
    assert [f.name for f in checkpoints.step_folders(place)] == [f"{checkpoints.folder_name(record_of(2))}.0-0-0-0"]
    replica.savers[1]._write_part = write  # type: ignore[method-assign]
    ObjectStore.broken = "403 Forbidden"
    try:
        replica.save_and_wait(record_of(4))
    finally:
        ObjectStore.broken = ""
    outage = replica.savers[0].trouble.outage
    assert outage is not None and outage.failures == 2 and "403 Forbidden" in outage.reason
    replica.save_and_wait(record_of(4))
    replica.close()
    found = newest_complete(place)
    assert found is not None and found.folder.name == f"{checkpoints.folder_name(record_of(4))}.0-0-0-2"
    assert replica.said[-1] == "checkpoint of step 4 was written, after 2 failed attempts"


def test_an_attempt_of_another_replica_is_left_alone_and_goes_with_its_step(tmp_path: Path) -> None:
    place = StoredPath(f"objects://{tmp_path}/bucket/run")
    replica = Replica(place, keep=1)
    half_written(place, record_of(2))
    replica.save_and_wait(record_of(2))
    assert len(checkpoints.step_folders(place)) == 2
    replica.save_and_wait(record_of(4))
    replica.close()
    (left,) = checkpoints.step_folders(place)
    assert checkpoints.record_part(left) == checkpoints.folder_name(record_of(4))


def test_plain_pytorch_reads_what_is_in_a_storage(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    place = StoredPath(f"objects://{tmp_path}/bucket/run")
    replica = Replica(place)
    replica.save_and_wait(record_of(2))
    replica.close()
    found = newest_complete(place)
    assert found is not None
    state = {"own": {"1": {"parameter": {"weight": torch.zeros(7, 5)}}}}
    dcp.load(state, storage_reader=FsspecReader(str(found.folder)), no_dist=True)
    assert torch.equal(state["own"]["1"]["parameter"]["weight"], state_of(1, 2)[WEIGHT])


def test_a_replica_that_starts_while_the_storage_is_silent_starts_again(tmp_path: Path) -> None:
    place = StoredPath(f"objects://{tmp_path}/bucket/run")
    root = genesis("run", 2)
    record = CommitRecord(2, 2, root.hash, ((0, 0),), {0: 2}, "run")
    replica = Replica(place)
    replica.save_and_wait(record)
    replica.close()
    log = Log([root, record])
    durable = DurableState(place, 0, MESH, None, lambda: log, MemoryRunStore(), "0/1")  # type: ignore[arg-type]
    chosen: list[checkpoints.Checkpoint] = []
    assert durable.newest(-1, chosen.append) == record.hash
    (folder,) = checkpoints.step_folders(place)
    files = [file for file in files_of(folder).rglob("*") if file.is_file() and file.name != checkpoints.MANIFEST]
    assert [(each.folder, each.nbytes) for each in chosen] == [(folder, sum(file.stat().st_size for file in files))]
    ObjectStore.broken = "503 Slow Down"
    try:
        for ask in (lambda: durable.newest(-1), lambda: durable.load(record.hash, False)):
            with pytest.raises(Retryable, match=r"objects://.* does not answer: .*503 Slow Down"):
                ask()
    finally:
        ObjectStore.broken = ""
    assert durable.newest(2) is None
    damaged = files_of(checkpoints.step_folders(place)[0]) / checkpoints.MANIFEST
    damaged.unlink()
    assert durable.load(record.hash, False) is False, "pruned meanwhile"


def test_a_read_that_fails_once_damages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a broken connection no older checkpoint is loaded, and no damage is reported."""
    place = StoredPath(f"objects://{tmp_path}/bucket/run")
    root = genesis("run", 2)
    record = CommitRecord(4, 4, root.hash, ((0, 0),), {0: 4}, "run")
    replica = Replica(place)
    replica.save_and_wait(record_of(2))
    replica.save_and_wait(record)
    replica.close()
    opened, failing = ObjectStore._open, list[str]()
    errors: list[OSError] = [ConnectionResetError("reset by peer")]

    def broken(self: ObjectStore, path: str, mode: str = "rb", **options: object) -> object:
        if path.endswith(failing[-1]):
            raise errors[-1]
        return opened(self, path, mode, **options)

    log = Log([root, record])
    engine = type("Engine", (), {"state": lambda self: State(state_of(0, 4)), "portions": lambda self: {}})()
    durable = DurableState(place, 0, MESH, engine, lambda: log, MemoryRunStore(), "0/1")
    for name, asked in (("complete.json", True), ("part.json", True), ("__0_0.distcp", False)):
        failing.append(name)
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "_open", broken)
            with pytest.raises(OSError, match="reset by peer"):
                newest_complete(place)
            with pytest.raises(Retryable, match="does not answer: .*reset by peer"):
                durable.load(record.hash, False)
            if not asked:  # for `newest`, that is: it opens no file with tensors
                assert durable.newest(-1) == record.hash
                continue
            with pytest.raises(Retryable, match="does not answer: .*reset by peer"):
                durable.newest(-1)
            errors.append(PermissionError("403 Forbidden"))
            with pytest.raises(ConfigError, match=r"^checkpoint.path=objects://.*: cannot be read: 403 Forbidden"):
                durable.newest(-1)
            errors.pop()
    assert newest_complete(place).record == record  # type: ignore[union-attr]


def test_a_complete_checkpoint_stays_when_what_comes_behind_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = StoredPath(f"objects://{tmp_path}/bucket/run")
    replica = Replica(place, keep=1, last_step=4)
    replica.save_and_wait(record_of(2))

    def silent(*arguments: object) -> None:
        raise ConnectionResetError("reset by peer")

    def away(key: str, value: str) -> str:
        if key == kept_key(record_of(4)):
            raise ValueError("the store has gone")
        return put(key, value)

    put = replica.store.put_if_absent
    monkeypatch.setattr(checkpoints, "delete_all", silent)
    monkeypatch.setattr(replica.store, "put_if_absent", away)
    replica.save_and_wait(record_of(4))
    replica.close()
    found = newest_complete(place)
    assert found is not None and found.record == record_of(4) and replica.said == []
