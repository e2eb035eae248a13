"""Durable checkpoints: written by one replica, in the background, and only ever used whole.

In: the state of a step's boundary and its commit record. Out: a folder that `newest_complete` finds
again, or ignores when it was half written.

    checkpoints/step_00000050_1a2b3c4d/      the step and the start of its record's lineage hash
        stage_0/                             torch.distributed.checkpoint's files of that stage
        stage_1/
        complete.json                        the commit record and every file's size and CRC-32

Each stage of the writing replica writes its own folder from a snapshot and says so through the run's
store; when all have, stage 0 writes `complete.json` (write, fsync, rename). The hash in the name
keeps a record that superseded another of the same step apart from it.
"""

from __future__ import annotations

import json
import queue
import re
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from helixrt.errors import ConfigError, HelixError, Retryable
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.record import FlightRecord, Kind
from helixrt.replica.contracts import RunStore
from helixrt.train.lineage_files import read_lineage, sync_folder, write_durably

MANIFEST = "complete.json"
_FOLDER = re.compile(r"^step_(\d{8,})_([0-9a-f]{8})$")
_WRITTEN, _GIVEN_UP = "written", "given up"


@dataclass(frozen=True)
class Checkpoint:
    """A complete one: where it is, the record whose state it holds, and how many stages it has."""

    folder: Path
    record: CommitRecord
    stages: int


@dataclass(frozen=True)
class _Job:
    record: CommitRecord
    state: dict[str, torch.Tensor] | None  # None: this stage was still busy, the checkpoint is given up
    flush_lineage: Callable[[], object]
    after_failover: bool


# Decisions


def is_due(step: int, every: int) -> bool:
    """Whether this step's state is to be saved; `every` 0: no step's is."""
    return every > 0 and step > 0 and step % every == 0


def writer_of(record: CommitRecord) -> int:
    """The replica that writes this record's checkpoint: the lowest that contributed."""
    return min(record.contributors)


def folder_name(record: CommitRecord) -> str:
    return f"step_{record.step:08d}_{record.hash[:8]}"


def step_folders(folder: Path) -> list[Path]:
    """The checkpoint folders, whole or not, newest step first."""
    if not folder.is_dir():
        return []
    return sorted((f for f in folder.iterdir() if _FOLDER.match(f.name)), key=lambda f: f.name, reverse=True)


# Writing


class Checkpointer:
    """One stage's side of writing checkpoints. `folder` is the run's `checkpoints` folder.

    `maybe_save` never waits for the disk: at most one checkpoint is being written and the next one
    is given up by all stages if one of them is not done with it. What goes wrong while writing goes
    into the flight record and never stops training.
    """

    def __init__(
        self,
        folder: Path,
        stage: int,
        stages: int,
        store: RunStore,
        record: FlightRecord,
        every: int,
        keep: int,
        parts_timeout_s: float = 120.0,
    ) -> None:
        self._folder, self._stage, self._stages = folder, stage, stages
        self._store, self._record = store, record
        self._every, self._keep, self._parts_timeout_s = every, keep, parts_timeout_s
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def maybe_save(
        self,
        commit_record: CommitRecord,
        state: Mapping[str, torch.Tensor],
        me_writes: bool,
        flush_lineage: Callable[[], object],
        last: bool = False,
    ) -> bool:
        """Begin a checkpoint of `state`, if this step is due and this replica writes it (`writer_of`).

        While one is being written another is given up, but not the `last` of a run, which waits its turn.
        `state` is cloned before this returns. `flush_lineage` must make the lineage durable up to the
        record; stage 0 calls it, on the background thread. Returns whether one was begun.
        """
        due = is_due(commit_record.step, self._every) and me_writes
        return due and self._begin(commit_record, state, flush_lineage, last, after_failover=False)

    def save(
        self, commit_record: CommitRecord, state: Mapping[str, torch.Tensor], flush_lineage: Callable[[], object]
    ) -> bool:
        """As `maybe_save`, out of turn. All stages of the replica that writes must be told to."""
        return self._begin(commit_record, state, flush_lineage, last=False, after_failover=True)

    @property
    def busy(self) -> bool:
        """One is being written."""
        return self._unfinished > 0

    def _begin(
        self,
        commit_record: CommitRecord,
        state: Mapping[str, torch.Tensor],
        flush_lineage: Callable[[], object],
        last: bool,
        after_failover: bool,
    ) -> bool:
        if self._closed:
            return False
        with self._changed:
            busy = self._unfinished > 0 and not last
            self._unfinished += 1
        snapshot = None if busy else {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpointer", daemon=True)
            self._thread.start()
        self._jobs.put(_Job(commit_record, snapshot, flush_lineage, after_failover))
        return not busy

    def wait(self, timeout_s: float = 300.0) -> None:
        """Return once nothing is being written. Raises Retryable when it takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._unfinished:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and self._unfinished:
                    raise Retryable(f"a checkpoint was not written after {timeout_s} s")

    def close(self) -> None:
        """Finish what is being written, and end the thread; idempotent."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=2 * self._parts_timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._save(job)
            except (OSError, HelixError, RuntimeError) as error:
                self._note(job.record, str(error))
            finally:
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()

    def _save(self, job: _Job) -> None:
        target = self._folder / folder_name(job.record)
        verdict = _GIVEN_UP
        try:
            if job.state is not None:
                part = target / f"stage_{self._stage}"
                shutil.rmtree(part, ignore_errors=True)  # left by a life of this replica that was killed
                self._write_part(part, job.record, job.state)
                verdict = _WRITTEN
        finally:
            if self._stage != 0:
                self._store.put_if_absent(self._key(job.record, self._stage), verdict)
        if self._stage == 0 and verdict == _WRITTEN:
            self._complete(target, job)

    def _write_part(self, part: Path, record: CommitRecord, state: dict[str, torch.Tensor]) -> None:
        from torch.distributed import checkpoint as dcp

        flight = self._record

        class Writer(dcp.FileSystemWriter):
            """Notes the begin when the tensors' bytes are in the file and the metadata is not."""

            def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
                flight.write(Kind.CHECKPOINT_BEGIN, step=record.step, lineage=record.hash)
                super().finish(metadata, results)

        _alone_on_purpose()
        part.mkdir(parents=True)
        dcp.save(dict(state), storage_writer=Writer(part), no_dist=True)
        sync_folder(part)
        sync_folder(part.parent)

    def _complete(self, target: Path, job: _Job) -> None:
        """Stage 0: wait for the other stages, then write the manifest."""
        deadline = time.monotonic() + self._parts_timeout_s
        for stage in range(1, self._stages):
            said = self._store.wait(self._key(job.record, stage), max(0.1, deadline - time.monotonic()))
            if said != _WRITTEN:
                self._note(job.record, f"stage {stage} was busy or failed")
                return
        job.flush_lineage()
        manifest = {
            "record": job.record.to_json(),
            "stages": self._stages,
            "files": {f"stage_{s}": _sums(target / f"stage_{s}") for s in range(self._stages)},
        }
        write_durably(target / MANIFEST, json.dumps(manifest, indent=1))
        sync_folder(self._folder)
        self._record.write(
            Kind.CHECKPOINT_END,
            step=job.record.step,
            lineage=job.record.hash,
            path=str(target),
            after_failover=job.after_failover,
        )
        for stage in range(1, self._stages):
            self._store.delete(self._key(job.record, stage))
        prune(self._folder, self._keep)

    def _key(self, record: CommitRecord, stage: int) -> str:
        return f"checkpoint/{record.hash}/{stage}"

    def _note(self, record: CommitRecord, why: str) -> None:
        reason = f"checkpoint of step {record.step} given up: {why}"
        self._record.write(Kind.FAILURE, step=record.step, replica=-1, reason=reason)


def prune(folder: Path, keep: int) -> None:
    """Delete what is older than the newest `keep` complete ones, half-written ones included."""
    complete = [f for f in step_folders(folder) if is_complete(f)]
    if len(complete) <= keep:
        return
    oldest_kept = complete[keep - 1].name
    for old in [f for f in step_folders(folder) if f.name < oldest_kept]:
        (old / MANIFEST).unlink(missing_ok=True)  # first of all: from now on it is not complete
        shutil.rmtree(old, ignore_errors=True)


# Reading


def is_complete(folder: Path) -> bool:
    """Whether this checkpoint's folder was written to the end, and not pruned since."""
    return (folder / MANIFEST).exists()


def saved_since(folder: Path, step: int) -> bool:
    """Whether there is a complete checkpoint of this step or a later one. Reads names alone."""
    return any(is_complete(f) for f in step_folders(folder) if int(f.name.split("_")[1]) >= step)


def newest_complete(folder: Path, wanted: Callable[[CommitRecord], bool] = lambda record: True) -> Checkpoint | None:
    """The newest wanted checkpoint in a `checkpoints` folder that is whole, every file checked; None if there is none.

    Raises ConfigError (resume) if there are complete ones but every one is damaged.
    """
    damage, whole = "", False
    for candidate in step_folders(folder):
        if not is_complete(candidate):
            continue  # half written
        try:
            found = verify(candidate)
        except ConfigError as error:
            if not is_complete(candidate):
                return newest_complete(folder, wanted)  # pruned while it was read: there are newer ones
            damage = damage or error.rule
            continue
        whole = True
        if wanted(found.record):
            return found
    if damage and not whole:
        raise ConfigError("resume", "true", damage)
    return None


def verify(folder: Path) -> Checkpoint:
    """The checkpoint in this folder. Raises ConfigError (resume) with what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        record = CommitRecord.from_json(manifest["record"])
        stages, files = int(manifest["stages"]), manifest["files"]
        if folder_name(record) != folder.name or set(files) != {f"stage_{s}" for s in range(stages)}:
            raise ValueError(f"{MANIFEST} belongs to another checkpoint")
        for stage in files:
            if _sums(folder / stage) != files[stage]:
                raise ValueError(f"the files of {stage} are not those that were written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("resume", "true", f"the checkpoint {folder} is unreadable: {error}") from error
    return Checkpoint(folder, record, stages)


def load(checkpoint: Checkpoint, stage: int, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A stage's tensors, with the names, shapes and dtypes of `like` (an engine's `state()`), on the CPU.

    Raises ConfigError (resume) when the checkpoint does not have exactly these.
    """
    from torch.distributed import checkpoint as dcp

    part = checkpoint.folder / f"stage_{stage}"
    reader = dcp.FileSystemReader(part)
    shards = {name: torch.empty_like(tensor, device="cpu") for name, tensor in like.items()}
    try:
        stored = {name: (m.size, m.properties.dtype) for name, m in reader.read_metadata().state_dict_metadata.items()
                  if isinstance(m, dcp.TensorStorageMetadata)}  # fmt: skip
        wanted = {name: (tensor.size(), tensor.dtype) for name, tensor in like.items()}
        if stored != wanted:
            odd = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))[0]
            raise ValueError(f"{odd!r} is {_shape(stored.get(odd))} there and {_shape(wanted.get(odd))} in this model")
        _alone_on_purpose()
        dcp.load(shards, storage_reader=reader, no_dist=True)
    except Exception as error:  # DCP wraps what went wrong in a CheckpointException of many causes
        raise ConfigError("resume", "true", f"cannot load {part}: {' '.join(str(error).split())}") from error
    return shards


def run_folders(root: Path) -> list[Path]:
    """The run folders `DATE/TIME` under an output root, newest first."""
    found = [run for run in root.glob("[0-9]*/[0-9]*") if run.is_dir() and not run.parent.is_symlink()]
    return sorted(found, key=lambda run: (run.parent.name, run.name), reverse=True)


def find_resume(root: Path) -> tuple[Path, Checkpoint]:
    """The newest complete checkpoint of the newest run that has one, and that run's folder. One whose record was
    superseded counts only if there is no other.

    Raises ConfigError (resume) when there is none, or when that run's are all damaged.
    """
    for run in run_folders(root):
        newest = newest_complete(run / "checkpoints")
        if newest is not None:
            log = Log(read_lineage(run / "lineage"))
            return run, newest_complete(run / "checkpoints", partial(_on_chain, log)) or newest
    raise ConfigError("resume", "true", f"no complete checkpoint in any run under {root}")


def _on_chain(log: Log, record: CommitRecord) -> bool:
    return log.on_chain(record.hash)


def _alone_on_purpose() -> None:
    """Each stage saves and loads its own part, the manifest joins them: DCP need not warn of it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _sums(part: Path) -> dict[str, list[int]]:
    """Each file's size in bytes and CRC-32."""
    sums: dict[str, list[int]] = {}
    for path in sorted(p for p in part.iterdir() if p.is_file()):
        crc = size = 0
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                crc, size = zlib.crc32(block, crc), size + len(block)
        sums[path.name] = [size, crc]
    if not sums:
        raise FileNotFoundError(f"{part} is empty")
    return sums


def _shape(entry: tuple[torch.Size, torch.dtype] | None) -> str:
    return "absent" if entry is None else f"{list(entry[0])} {str(entry[1]).removeprefix('torch.')}"
