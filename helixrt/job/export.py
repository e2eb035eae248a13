"""A checkpoint's model as Hugging Face has them: safetensors with the model's own names.

In: a run's folder, or that of one of its checkpoints. Out: `model.safetensors`, or several files and
`model.safetensors.index.json`, which `from_pretrained` and `weights=` of `session.parallelize` read. Offline; one process,
which holds one file's tensors at a time. Buffers that are not persistent are left out, as `save_pretrained` leaves them, and so
are the names of wrappers: `from_pretrained` would not find the parameters below them, and initialize them anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job.checkpoint_layout import Entry, dcp_key
from helixrt.job.lineage_files import read_log, sync_folder, write_durably
from helixrt.job.stored_path import Place, StoredPath
from helixrt.replica.manifest import ITEM_BYTES
from helixrt.replica.portions import MODEL, Portion

FILE_BYTES = 5_000_000_000  # of one file, as Hugging Face has it
WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))  # in names: of torch.compile and of checkpoint_wrapper
_TRAINED = re.compile(r"optimizer/.*/group/\d+/train_mode")
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Exported:
    """What was written: of which step, how many tensors, and their files."""

    step: int
    tensors: int
    files: tuple[Path, ...]


def export(
    source: Place,
    to: Path,
    *,
    step: int | None = None,
    dtype: str = "",
    config: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Write the newest checkpoint of the run in the folder `source` (that of `step`, if one is given), or the checkpoint that
    `source` itself is, to the folder `to`, which must be new or empty. `dtype`, one of DTYPES: of tensors with a floating-point
    type; "" as they are. `config`: the model's `config.json`, or a folder with one, which is copied.

    Raises ConfigError for what is not there or does not fit, and without the package safetensors.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("to", to, "needs the package safetensors: pip install safetensors") from error
    if dtype and dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    to = to.resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError("to", to, "must be a new or an empty folder")
    settings = _config(config)
    try:
        checkpoint = _chosen(source, step)
    except OSError as error:
        raise ConfigError("run", source, f"cannot be read: {' '.join(str(error).split())}") from error
    index = checkpoints.read_index(checkpoint)
    if any(_TRAINED.fullmatch(name) and value for part in index.parts for name, value in part.scalars.items()):
        what = f"{checkpoint.folder.name} has the weights that a schedule-free optimizer trains, not the averaged ones"
        raise ConfigError("run", source, f"{what}: call optimizer.eval() behind the loop, and save the model there")
    placed = index.placed
    entries = {n.removeprefix(f"{MODEL}/"): e for n, e in placed.items() if n.startswith(f"{MODEL}/")}
    if not entries:
        raise ConfigError("run", source, f"the checkpoint {checkpoint.folder.name} names no parameters of a model")
    own = {name: own_name(name) for name in entries}
    if len(set(own.values())) < len(own):
        raise ConfigError("run", source, f"{checkpoint.folder.name} has parameters that differ in the names of wrappers alone")
    unfinished = to.with_name(f".{to.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ConfigError("to", to, f"cannot be made: {error.strerror}") from error
    try:
        groups = list(_files(entries, file_bytes))
        names = [_file_name(number, len(groups)) for number in range(len(groups))]
        for name, group in zip(names, groups, strict=True):
            tensors = {own[stored]: tensor for stored, tensor in _read(checkpoint, group, dtype).items()}
            save_file(tensors, unfinished / name, metadata={"format": "pt"})
        if len(groups) > 1:
            total = sum(_nbytes(entry) for entry in entries.values())
            where = {own[tensor]: name for name, group in zip(names, groups, strict=True) for tensor in group}
            listed = {"metadata": {"total_size": total}, "weight_map": where}
            write_durably(unfinished / "model.safetensors.index.json", json.dumps(listed, indent=2))
        if settings is not None:
            shutil.copyfile(settings, unfinished / "config.json")
        sync_folder(unfinished)
        if to.exists():  # it stays: a shell may be in it
            for file in unfinished.iterdir():
                os.rename(file, to / file.name)
            sync_folder(to)
        else:
            os.rename(unfinished, to)
        sync_folder(to.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(checkpoint.record.step, len(entries), tuple(to / name for name in names))


def own_name(name: str) -> str:
    """A parameter's name in the model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _chosen(source: Place, step: int | None) -> checkpoints.Checkpoint:
    """Verified, whole. Raises ConfigError."""
    if (source / checkpoints.MANIFEST).is_file():
        return checkpoints.verify(source)
    if isinstance(source, StoredPath):
        raise ConfigError("run", source, f"is not the folder of a complete checkpoint: it has no {checkpoints.MANIFEST}")
    if not (source / "run.json").is_file():
        raise ConfigError("run", source, "is neither the folder of a run nor of a checkpoint: it has no run.json")
    if step is None:
        found = checkpoints.checkpoint_of(source)
    else:
        log = read_log(source / "lineage")
        found = checkpoints.newest_complete(
            checkpoints.checkpoints_of(source),
            lambda record: record.step == step and (not len(log) or log.on_chain(record.hash)),
        )
    if found is None:
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise ConfigError("run", source, f"has no complete {which}")
    return found


def _config(given: Path | None) -> Path | None:
    if given is None:
        return None
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise ConfigError("config", given, "must be a model's config.json, or a folder with one")
    return file


def _files(entries: Mapping[str, Entry], file_bytes: int) -> Iterator[dict[str, Entry]]:
    """The tensors in order, in groups of at most `file_bytes`; a larger one alone."""
    group: dict[str, Entry] = {}
    held = 0
    for name, entry in entries.items():
        if group and held + _nbytes(entry) > file_bytes:
            yield group
            group, held = {}, 0
        group[name] = entry
        held += _nbytes(entry)
    yield group


def _file_name(number: int, files: int) -> str:
    return "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"


def _nbytes(entry: Entry) -> int:
    return prod(entry.shape) * ITEM_BYTES[entry.dtype]


def _read(checkpoint: checkpoints.Checkpoint, group: Mapping[str, Entry], dtype: str) -> dict[str, torch.Tensor]:
    from helixrt.job.dcp_private import read

    tensors = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in group.items()}
    keys = {name: Portion.whole(dcp_key(f"{MODEL}/{name}"), entry.shape) for name, entry in group.items()}
    read(checkpoint.folder, {name: (keys[name], tensors[name], entry.crc_at) for name, entry in group.items()})
    if not dtype:
        return tensors
    return {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in tensors.items()}
