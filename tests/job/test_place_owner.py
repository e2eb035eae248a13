"""A run's folder that is copied and resumed beside the original: the copy is refused, nothing that either needs is deleted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helixrt.errors import ConfigError, Retryable
from helixrt.job import checkpoint as checkpoints
from helixrt.job.config import CheckpointConfig
from helixrt.job.driver import Run, new_run, reopened_run
from helixrt.job.lineage_files import LineageWriter
from helixrt.job.place_owner import FILE, DeletionGuard, Owner, check_owner, is_copy, owner_of, take, token_in
from helixrt.job.stored_path import Place, place_of
from helixrt.protocol.step.lineage import CommitRecord
from tests.job.object_store import PROTOCOL, ObjectStore
from tests.job.test_resume import config_of

HERE = Owner("run-1", "/runs/a", "host", 7, "token", 0.0)


@pytest.mark.parametrize(
    ("owner", "there", "copy"),
    [
        (HERE, True, False),
        (replace(HERE, host="other"), True, False),  # one file system that both hosts have mounted
        (replace(HERE, host="other", inode=8), True, True),  # copied to the same path of another host
        (replace(HERE, inode=8), True, False),  # restored in place
        (replace(HERE, folder="/runs/b"), True, False),  # renamed: the inode stays
        (replace(HERE, folder="/runs/b", inode=8), False, False),  # moved to another disk: nothing is there any more
        (replace(HERE, folder="/runs/b", inode=8), True, True),  # copied
        (replace(HERE, folder="/runs/b", inode=8, host="other"), False, True),  # it may be there, on the other host
        (replace(HERE, folder="/runs/b", host="other"), False, True),
    ],
)
def test_which_folder_is_a_copy(owner: Owner, there: bool, copy: bool) -> None:
    assert is_copy(owner, HERE, there) == copy


def begun(root: Path, path: str) -> Run:
    """A run with checkpoints of steps 1 and 2 outside its folder; its driver has gone."""
    run = new_run(replace(config_of(root), checkpoint=CheckpointConfig(every=1, path=path)))
    assert run.lock is not None
    run.lock.close()
    writer, log = LineageWriter(run.folder / "lineage"), list(run.log.entries)
    for step in (1, 2):
        log.append(CommitRecord(step, step, log[-1].hash, ((0, 0), (1, 0)), {0: step, 1: step}, run.name))
    for index, entry in enumerate(log):
        writer.append(index, entry)
    writer.close()
    for record in log[1:]:
        saved(place_of(run.checkpoints), record)
    return run


def saved(place: Place, record: CommitRecord) -> checkpoints.Checkpoint:
    folder = checkpoints.attempt_folder(place, record, "0")
    if isinstance(folder, Path):
        folder.mkdir(parents=True)
        (folder / checkpoints.MANIFEST).write_text("{}")
    else:
        (folder / checkpoints.MANIFEST).write_bytes(b"{}")
    return checkpoints.Checkpoint(folder, record, {"pp": 1})


def newest(run: Run, folder: Path) -> checkpoints.Checkpoint:
    from helixrt.job.lineage_files import read_log

    record = read_log(folder / "lineage").head
    found = checkpoints.complete_of(place_of(run.checkpoints), record)
    assert found is not None, "nothing that the run needs was deleted"
    return checkpoints.Checkpoint(found, record, {"pp": 1})


def resume(run: Run, folder: Path) -> Run:
    again = reopened_run(folder, newest(run, folder), 1)
    assert again.lock is not None
    again.lock.close()
    return again


@pytest.mark.parametrize("kind", ["storage", "folder"])
def test_a_copy_that_is_resumed_beside_the_original_is_refused_and_the_original_goes_on(kind: str, tmp_path: Path) -> None:
    path = f"{PROTOCOL}://{tmp_path}/bucket" if kind == "storage" else str(tmp_path / "bucket")
    (tmp_path / "bucket").mkdir()
    run = begun(tmp_path / "runs", path)
    copy = tmp_path / "copy"
    shutil.copytree(run.folder, copy)
    before = {f: f.read_bytes() for f in copy.rglob("*") if f.is_file() and f.name != "run.lock"}
    with pytest.raises(ConfigError) as refused:
        resume(run, copy)
    for named in (str(copy), str(run.folder), run.checkpoints, f"delete {run.checkpoints}/{FILE}"):
        assert named in str(refused.value)
    assert all(file.read_bytes() == text for file, text in before.items()), "nothing is changed before it is refused"
    assert resume(run, run.folder).life == 1 and resume(run, run.folder).life == 2, "the original is resumed as ever"
    with pytest.raises(ConfigError, match="two runs would delete each other's checkpoints"):
        resume(run, copy)
    shutil.move(run.folder, tmp_path / "moved")
    moved = resume(run, tmp_path / "moved")
    assert moved.life == 3 and moved.owner == token_in(tmp_path / "moved")


def test_who_takes_the_place_by_hand_stops_the_other_from_deleting(tmp_path: Path) -> None:
    run, said = begun(tmp_path / "runs", f"{PROTOCOL}://{tmp_path}/bucket"), list[str]()
    place = place_of(run.checkpoints)
    guard = DeletionGuard(place, token_in(run.folder), said.append)
    assert guard() and said == []
    ObjectStore.broken = "503 Slow Down"
    try:
        assert not guard() and said == [], "nothing is deleted while it is not known whose it is"
        with pytest.raises(ConfigError, match="cannot be read: .*503 Slow Down"):
            check_owner(place, run.name, run.folder)
    finally:
        ObjectStore.broken = ""
    copy = tmp_path / "copy"
    shutil.copytree(run.folder, copy)
    (place / FILE).unlink()  # type: ignore[union-attr]
    assert not guard() and "they are nobody's any more" in said[0]
    taken = resume(run, copy)
    owner = owner_of(place)
    assert owner is not None and owner.token == taken.owner == token_in(copy) != token_in(run.folder)
    assert not guard() and len(said) == 1, "it is told once"
    with pytest.raises(ConfigError, match=f"are those of the run in {copy}"):
        resume(run, run.folder)


def test_a_run_of_an_earlier_version_becomes_the_owner(tmp_path: Path) -> None:
    run = begun(tmp_path / "runs", f"{PROTOCOL}://{tmp_path}/bucket")
    place = place_of(run.checkpoints)
    (place / FILE).unlink()  # type: ignore[union-attr]
    identity = json.loads((run.folder / "run.json").read_text())
    del identity["owner"]
    (run.folder / "run.json").write_text(json.dumps(identity))
    assert DeletionGuard(place, token_in(run.folder), print)(), "its ranks that run still delete as before"
    again = resume(run, run.folder)
    assert again.owner and again.owner == token_in(run.folder)


def test_checkpoints_in_the_run_folder_have_no_owner(tmp_path: Path) -> None:
    run = new_run(config_of(tmp_path))
    assert run.owner == "" == token_in(run.folder) == token_in(tmp_path) and not (run.folder / "checkpoints" / FILE).exists()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(Retryable, match="cannot be read"):
        token_in(tmp_path)
    assert run.lock is not None
    run.lock.close()


def test_checkpoints_of_later_steps_do_not_push_out_the_newest_of_a_run_that_went_back(tmp_path: Path) -> None:
    """As after a copy or a superseded record: those above what was just saved are left alone, and do not count."""
    record = CommitRecord(0, 0, "", ((0, 0),), {}, "run")
    for step in (10, 20, 900, 950):
        saved(tmp_path / "checkpoints", replace(record, step=step))
    for step in (30, 40):
        saved(tmp_path / "checkpoints", replace(record, step=step))
        checkpoints.prune(tmp_path / "checkpoints", 2, step)
    assert [int(f.name.split("_")[1]) for f in checkpoints.step_folders(tmp_path / "checkpoints")] == [950, 900, 40, 30]


def test_the_owner_is_written_whole(tmp_path: Path) -> None:
    token = take(tmp_path / "place", "run-1", tmp_path)
    owner = owner_of(tmp_path / "place")
    assert owner is not None and (owner.token, owner.folder, owner.run) == (token, str(tmp_path.resolve()), "run-1")
    (tmp_path / "place" / FILE).write_text('{"run": "x"}')
    with pytest.raises(ConfigError, match="owner.json cannot be read"):
        check_owner(tmp_path / "place", "run-1", tmp_path)
