"""Durable checkpoints: what is in their folders, which are due, and how they are found again and read.

They are in the run's folder, or in a storage that fsspec reaches (`checkpoint.path`), which `checkpoints_of` says.

    checkpoints/step_00000050_1a2b3c4d/      the step and the start of its record's lineage hash
        .metadata                            of torch.distributed.checkpoint (DCP), over all files below
        rank_0/__0_0.distcp                  what rank 0 of the replica has stored
        rank_0/part.json                     which entries that is (`checkpoint_layout`), and the file's size and CRC-32
        rank_1/...
        objects/...                          scalars, for those who read the checkpoint with plain PyTorch
        complete.json                        commit record, mesh, every file's size and CRC-32; written last

The whole folder is one DCP checkpoint of the replica, with the names of the whole model: `model.NAME`,
`optimizer.KEY.state.NAME.exp_avg`, `optimizer.KEY.param_groups` and so on.
`newest_complete` ignores a folder that was half written: it has no `complete.json`. The hash in the name
keeps a record that superseded another of the same step apart from it. In a storage each attempt at a checkpoint has a folder of
its own, with its number behind a dot. `checkpoint_writer` writes them.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import prod
from pathlib import Path

from helixrt.errors import ConfigError, Retryable
from helixrt.job.checkpoint_layout import Index, PartIndex, is_of_model
from helixrt.job.checkpoint_restore import empty_of, restored
from helixrt.job.lineage_files import read_log
from helixrt.job.stored_path import Place, StoredPath, delete_all, place_of
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.replica.contracts import State
from helixrt.replica.portions import Portion

MANIFEST, PART, WITHDRAWN = "complete.json", "part.json", "withdrawn.json"
_DATA = ".distcp"  # how the names of files with tensors end
_BLOCK = 1 << 20  # bytes that are read at a time
_READERS = 8  # threads that check files: neither a read nor a checksum holds the interpreter's lock
LAYOUT = 2  # of the files in a checkpoint's folder; 1 was one DCP checkpoint for each stage
_FOR_NOW = (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_log = logging.getLogger(__name__)
_FOLDER = re.compile(r"^step_(\d{8,})_([0-9a-f]{8})(\.[\w.-]+)?$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete one: where it is, the record whose state it holds, the sizes of the axes of the mesh that wrote it, and how
    many bytes its files have."""

    folder: Place
    record: CommitRecord
    mesh: Mapping[str, int]
    nbytes: int = 0

    @property
    def ranks(self) -> int:
        """Of the replica that wrote it."""
        return prod(self.mesh.values())


@dataclass(frozen=True)
class Loaded:
    """What a rank has read of a checkpoint, on the CPU. `left`: the parameters and buffers that it has no part of."""

    state: State
    left: tuple[str, ...]


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


def attempt_folder(folder: Place, record: CommitRecord, attempt: str) -> Place:
    """Where to write this record's checkpoint. `attempt` has another value for each attempt that any replica makes."""
    name = folder_name(record)
    return folder / f"{name}.{attempt}" if isinstance(folder, StoredPath) else folder / name


def record_part(folder: Place) -> str:
    """`folder_name` of the record whose state is in this checkpoint's folder."""
    return folder.name.partition(".")[0]


def _step_of(folder: Place) -> int:
    return int(folder.name.split("_")[1])


def step_folders(folder: Place) -> list[Place]:
    """The checkpoint folders, whole or not, newest step first."""
    if isinstance(folder, Path) and not folder.is_dir():
        return []
    try:
        found: list[Place] = [f for f in folder.iterdir() if _FOLDER.match(f.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda f: f.name, reverse=True)


def prune(folder: Place, keep: int, newest_step: int) -> None:
    """Delete what is older than the newest `keep` steps with a complete one, half-written ones included. All of a step stay, of
    which one may have been superseded. Those of steps above `newest_step`, which was just saved, are left alone and do not
    count: the run has gone back behind them."""
    known = [f for f in step_folders(folder) if _step_of(f) <= newest_step]
    complete = list(dict.fromkeys(_step_of(f) for f in known if is_complete(f)))
    if len(complete) <= keep:
        return
    for old in [f for f in known if _step_of(f) < complete[keep - 1]]:
        (old / MANIFEST).unlink(missing_ok=True)  # first of all: from now on it is not complete
        delete_all(old)


def withdraw_after(folder: Place, step: int) -> None:
    """The checkpoints of later steps are complete no more: their states are not to be used. What their manifests said stays, in
    another file."""
    for later in step_folders(folder):
        if _step_of(later) > step and is_complete(later):
            (later / WITHDRAWN).write_bytes((later / MANIFEST).read_bytes())
            (later / MANIFEST).unlink(missing_ok=True)


# Reading


def checkpoints_of(run: Path) -> Place:
    """Where the checkpoints of the run in this folder are. Raises Retryable if that cannot be read now: to look elsewhere would
    find none."""
    try:
        address = json.loads((run / "run.json").read_text(encoding="utf-8")).get("checkpoints", "")
    except FileNotFoundError:
        address = ""
    except (OSError, ValueError) as error:
        raise Retryable(f"{run / 'run.json'} cannot be read: {error}") from error
    return place_of(address) if address else run / "checkpoints"


def is_complete(folder: Place) -> bool:
    """Whether this checkpoint's folder was written to the end, and not pruned since."""
    return (folder / MANIFEST).exists()


def complete_of(folder: Place, record: CommitRecord, usable: Callable[[Place], bool] = lambda found: True) -> Place | None:
    """The folder with this record's complete checkpoint, one that is usable; None if there is none."""
    name = folder_name(record)
    places = [f for f in step_folders(folder) if record_part(f) == name] if isinstance(folder, StoredPath) else [folder / name]
    return next((f for f in places if is_complete(f) and usable(f)), None)


def saved_since(folder: Place, step: int) -> bool:
    """Whether there is a complete checkpoint of this step or a later one. Reads names alone."""
    return any(is_complete(f) for f in step_folders(folder) if _step_of(f) >= step)


def newest_complete(
    folder: Place,
    wanted: Callable[[CommitRecord], bool] = lambda record: True,
    check: Callable[[Place], Checkpoint] | None = None,
) -> Checkpoint | None:
    """The newest wanted checkpoint in a `checkpoints` folder that is whole; None if there is none. `check` says of a folder
    what `verify` does, which is its default.

    Raises ConfigError (resume) if there are complete ones but every one is damaged, OSError if a storage does not answer.
    """
    damage, whole = "", False
    for candidate in step_folders(folder):
        if not is_complete(candidate):
            continue  # half written
        try:
            if not wanted(read_manifest(candidate).record):
                whole = True  # its files are not asked for
                continue
            return (check or verify)(candidate)
        except ConfigError as error:
            if not is_complete(candidate):
                return newest_complete(folder, wanted, check)  # pruned while it was read: there are newer ones
            damage = damage or error.rule
            _log.warning("%s; an older one is looked for", error.rule)
    if damage and not whole:
        raise ConfigError("resume", "true", damage)
    return None


def verify(folder: Place, data: bool = True) -> Checkpoint:
    """The checkpoint in this folder, every file checked; without `data` files of tensors by their sizes alone, as `load` checks
    each tensor that it reads. Raises ConfigError (resume) with what is wrong with it, OSError if a storage does not answer."""

    def check(name: str) -> None:
        file, (size, crc) = folder / name, files[name]
        whole = file_sum(file) == [size, crc] if data or not name.endswith(_DATA) else file_size(file) == size
        if not whole:
            raise ValueError(f"{name} is not the file that was written")

    try:
        checkpoint, files = _manifest(folder)
        needed = {f"rank_{rank}/{PART}" for rank in range(checkpoint.ranks)} | {".metadata"}
        if missing := sorted(needed - files.keys()):
            raise ValueError(f"{MANIFEST} does not name {missing[0]}")
        with ThreadPoolExecutor(_READERS) as readers:
            for _ in readers.map(check, files):
                pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _raise_if_silent(folder, error)
        raise ConfigError("resume", "true", f"the checkpoint {folder} is unreadable: {error}") from error
    return checkpoint


def read_manifest(folder: Place) -> Checkpoint:
    """The checkpoint in this folder, as its manifest has it. Raises ConfigError (resume) without one that can be read,
    OSError if a storage does not answer."""
    try:
        return _manifest(folder)[0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _raise_if_silent(folder, error)
        raise ConfigError("resume", "true", f"the checkpoint {folder} is unreadable: {error}") from error


def _raise_if_silent(folder: Place, error: BaseException) -> None:
    """A storage that does not answer, or a file system that does not for now, says nothing of what it holds: raises OSError for
    such an error, also inside DCP's."""
    failures = [inner for inner, _ in getattr(error, "failures", {}).values()]
    for each in (error, *failures):
        silent = isinstance(each, OSError) and (
            not isinstance(each, FileNotFoundError) if isinstance(folder, StoredPath) else each.errno in _FOR_NOW
        )
        if silent:
            raise each  # as it is: a missing right is another thing than a broken connection


def _manifest(folder: Place) -> tuple[Checkpoint, dict[str, list[int]]]:
    """The checkpoint of this folder as its manifest has it, and size and CRC-32 of its files."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if (layout := manifest.get("layout", 1)) != LAYOUT:
        raise ValueError(
            f"it has layout {layout}, of another version of helixrt, and this version reads layout {LAYOUT}; resume the run "
            "with the version that wrote it"
        )
    record = CommitRecord.from_json(manifest["record"])
    if folder_name(record) != record_part(folder):
        raise ValueError(f"{MANIFEST} belongs to another checkpoint")
    mesh = {str(axis): int(size) for axis, size in manifest["mesh"].items()}
    return Checkpoint(folder, record, mesh, sum(size for size, _ in manifest["files"].values())), manifest["files"]


def read_index(checkpoint: Checkpoint) -> Index:
    """What its ranks have stored. Raises ConfigError (resume), OSError if a storage does not answer."""
    try:
        texts = [(checkpoint.folder / f"rank_{r}" / PART).read_text(encoding="utf-8") for r in range(checkpoint.ranks)]
        return Index([PartIndex.from_plain(json.loads(text)["index"]) for text in texts])
    except (OSError, ValueError, KeyError, TypeError) as error:
        _raise_if_silent(checkpoint.folder, error)
        raise _cannot_load(checkpoint, error, ConfigError) from error


class Unread(ConfigError):
    """Tensors could not be read, or are not what was written: `verify` says whether the checkpoint is damaged."""


def load(checkpoint: Checkpoint, rank: int, mesh: Mapping[str, int], live: State, portions: Mapping[str, Portion]) -> Loaded:
    """For rank `rank` of a replica of this mesh, which need not be the one that wrote the checkpoint. `live`: the rank's state
    as it is, for its names and shapes, and `portions`: how it lies in the whole (`Engine.portions`).

    Raises ConfigError (resume) when the checkpoint does not have what this rank needs, Unread when reading fails or a tensor is
    not what was written (every CRC-32 is compared), OSError if a storage does not answer.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    from helixrt.job.dcp_private import read

    index = read_index(checkpoint)
    try:
        found = restored(index, rank, dict(mesh) == dict(checkpoint.mesh), live, portions)
    except Exception as error:
        raise _cannot_load(checkpoint, error, ConfigError) from error
    tensors = {name: empty_of(wanted) for name, wanted in found.tensors.items()}
    try:
        read(checkpoint.folder, {name: (wanted.portion, tensors[name], wanted.crcs) for name, wanted in found.tensors.items()})
    except (Exception, CheckpointException) as error:  # DCP raises it for what failed; it is no Exception
        _raise_if_silent(checkpoint.folder, error)
        raise _cannot_load(checkpoint, error, Unread) from error
    left = tuple(name.split("/", 1)[1] for name in index.placed if is_of_model(name) and name not in found.taken)
    return Loaded(State(tensors, found.scalars), left)


def _cannot_load(checkpoint: Checkpoint, error: BaseException, kind: type[ConfigError]) -> ConfigError:
    return kind("resume", "true", f"cannot load {checkpoint.folder}: {' '.join(str(error).split())}")


def run_folders(root: Path) -> list[Path]:
    """The run folders `DATE/TIME` under an output root, that of the run that began last first."""
    found = [run for run in root.glob("[0-9]*/[0-9]*") if run.is_dir() and not run.parent.is_symlink()]
    return sorted(found, key=lambda run: (_begun_s(run), run.parent.name, run.name), reverse=True)


def _begun_s(run: Path) -> float:
    """As it has written down itself: names are local times, which machines may have differently."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads((run / "run.json").read_text(encoding="utf-8"))["epoch_s"])
    with suppress(ValueError):
        return datetime.strptime(f"{run.parent.name} {run.name[:8]}", "%Y-%m-%d %H-%M-%S").timestamp()
    return 0.0


def find_resume(root: Path, name: str = "", asked: str = "true") -> tuple[Path, Checkpoint]:
    """The checkpoint to resume from of the newest run that has one (`name`: of the runs with this name), and its folder.
    `asked`: the value of `resume` that an error names.

    Raises ConfigError (resume) when there is none, or when that run's are all damaged.
    """
    for run in run_folders(root):
        if (not name or name_of_run(run) == name) and (found := checkpoint_of(run)) is not None:
            return run, found
    which = f"run named {name}" if name else "run"
    raise ConfigError("resume", asked, f"no complete checkpoint in any {which} under {root}")


def checkpoint_of(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint in a run's folder whose record is on the lineage; None if there is no complete one.

    Raises ConfigError (resume) if all are of records that were superseded: the run would begin again at step 0.
    """
    place, log = checkpoints_of(run), read_log(run / "lineage")
    try:
        newest = found = newest_complete(place)
        if newest is not None and len(log) and not log.on_chain(newest.record.hash):
            found = newest_complete(place, partial(_on_chain, log))
    except OSError as error:
        raise ConfigError("resume", run, f"its checkpoints in {place} cannot be read: {error}") from error
    if newest is None:
        return None
    if found is None:
        rule = (
            f"its only complete checkpoints, the newest of step {newest.record.step}, are of steps that were superseded: the "
            "lineage went on without them. Begin a new run"
        )
        raise ConfigError("resume", run, rule)
    return found


def name_of_run(run: Path) -> str:
    """As its settings have it; "" for a folder without settings."""
    try:
        return str(json.loads((run / "config.json").read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError):
        return ""


def _on_chain(log: Log, record: CommitRecord) -> bool:
    return log.on_chain(record.hash)


def file_sum(path: Place) -> list[int]:
    """A file's size in bytes and CRC-32."""
    crc = size = 0
    for block in path.blocks(_BLOCK) if isinstance(path, StoredPath) else _blocks(path):
        crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def file_size(path: Place) -> int:
    """In bytes."""
    return path.size() if isinstance(path, StoredPath) else path.stat().st_size


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            yield block
