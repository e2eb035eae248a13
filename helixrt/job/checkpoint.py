"""Durable checkpoints: what is in their folders, which are due, and how they are found again and read.

    checkpoints/step_00000050_1a2b3c4d/      the step and the start of its record's lineage hash
        stage_0/                             torch.distributed.checkpoint's files of that stage
        stage_1/
        complete.json                        the commit record and every file's size and CRC-32

`newest_complete` ignores a folder that was half written: it has no `complete.json`. The hash in the name
keeps a record that superseded another of the same step apart from it. `checkpoint_writer` writes them.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from helixrt.errors import ConfigError
from helixrt.job.lineage_files import read_log
from helixrt.protocol.step.lineage import CommitRecord, Log

MANIFEST = "complete.json"
_FOLDER = re.compile(r"^step_(\d{8,})_([0-9a-f]{8})$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete one: where it is, the record whose state it holds, and how many stages it has."""

    folder: Path
    record: CommitRecord
    stages: int


# Decisions


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether this step's state is to be saved: each `every` steps, and that of the run's last; `every` 0: no step's is."""
    return every > 0 and step > 0 and (step % every == 0 or step == last_step)


def pause_steps(failures: int, every: int) -> int:
    """How many steps after an attempt that failed the next one is made: 1, 2, 4 ... and at most `every`."""
    return min(2 ** min(failures - 1, 30), every)


def writer_of(record: CommitRecord) -> int:
    """The replica that writes this record's checkpoint: the lowest that committed it."""
    return min(record.committers)[0]


def writer_of_last(record: CommitRecord, holders: Collection[int]) -> int:
    """The replica that writes the run's last checkpoint, of those `holders` that live and hold its state: the one
    that writes it in any case (`writer_of`), else the lowest. The same on all that see the same quorum."""
    usual = writer_of(record)
    return usual if usual in holders else min(holders)


def folder_name(record: CommitRecord) -> str:
    return f"step_{record.step:08d}_{record.hash[:8]}"


def step_folders(folder: Path) -> list[Path]:
    """The checkpoint folders, whole or not, newest step first."""
    if not folder.is_dir():
        return []
    return sorted((f for f in folder.iterdir() if _FOLDER.match(f.name)), key=lambda f: f.name, reverse=True)


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
            if file_sums(folder / stage) != files[stage]:
                raise ValueError(f"the files of {stage} are not those that were written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("resume", "true", f"the checkpoint {folder} is unreadable: {error}") from error
    return Checkpoint(folder, record, stages)


def load(checkpoint: Checkpoint, stage: int, like: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """A stage's tensors, on the CPU, with the names, shapes and dtypes of `like` (an engine's `state()`); None: all that are
    there, for an engine whose state has another layout before the first step of its optimizers.

    Raises ConfigError (resume) when the checkpoint does not have exactly these.
    """
    from torch.distributed import checkpoint as dcp

    part = checkpoint.folder / f"stage_{stage}"
    reader = dcp.FileSystemReader(part)
    try:
        stored = {name: (m.size, m.properties.dtype) for name, m in reader.read_metadata().state_dict_metadata.items()
                  if isinstance(m, dcp.TensorStorageMetadata)}  # fmt: skip
        wanted = stored if like is None else {name: (tensor.size(), tensor.dtype) for name, tensor in like.items()}
        if stored != wanted:
            odd = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))[0]
            raise ValueError(f"{odd!r} is {_shape(stored.get(odd))} there and {_shape(wanted.get(odd))} in this model")
        shards = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in wanted.items()}
        alone_on_purpose()
        dcp.load(shards, storage_reader=reader, no_dist=True)
    except Exception as error:  # DCP wraps what went wrong in a CheckpointException of many causes
        raise ConfigError("resume", "true", f"cannot load {part}: {' '.join(str(error).split())}") from error
    return shards


def run_folders(root: Path) -> list[Path]:
    """The run folders `DATE/TIME` under an output root, newest first."""
    found = [run for run in root.glob("[0-9]*/[0-9]*") if run.is_dir() and not run.parent.is_symlink()]
    return sorted(found, key=lambda run: (run.parent.name, run.name), reverse=True)


def find_resume(root: Path, name: str = "") -> tuple[Path, Checkpoint]:
    """The checkpoint to resume from of the newest run that has one (`name`: of the runs with this name), and its folder.

    Raises ConfigError (resume) when there is none, or when that run's are all damaged.
    """
    for run in run_folders(root):
        if (not name or name_of_run(run) == name) and (found := checkpoint_of(run)) is not None:
            return run, found
    which = f"run named {name}" if name else "run"
    raise ConfigError("resume", "latest" if name else "true", f"no complete checkpoint in any {which} under {root}")


def checkpoint_of(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint in a run's folder. One whose record was superseded counts only if there is no other."""
    newest = newest_complete(run / "checkpoints")
    if newest is None:
        return None
    log = read_log(run / "lineage")
    return newest_complete(run / "checkpoints", partial(_on_chain, log)) or newest


def name_of_run(run: Path) -> str:
    """As its settings have it; "" for a folder without settings."""
    try:
        return str(json.loads((run / "config.json").read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError):
        return ""


def _on_chain(log: Log, record: CommitRecord) -> bool:
    return log.on_chain(record.hash)


def alone_on_purpose() -> None:
    """Each stage saves and loads its own part, the manifest joins them: DCP need not warn of it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def file_sums(part: Path) -> dict[str, list[int]]:
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
