"""How the files of a checkpoint get into their place, in a folder of a file system or in a storage that fsspec reaches.

In: what one rank stores, or the parts of all ranks. Out: files as `helixrt.job.checkpoint` describes them, and the size and
CRC-32 of each, which the manifest names.

In a file system a part is written under a name of its own, synced and renamed into place, and the first one in place stays:
equal records have equal states, so two replicas may write one checkpoint at a time. A storage knows no renaming; there each
attempt has a folder of its own (`checkpoint.attempt_folder`), in which nobody else writes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helixrt.job.checkpoint import MANIFEST, PART, file_sum
from helixrt.job.checkpoint_layout import Index, PartIndex, objects_of, tensors_of
from helixrt.job.lineage_files import sync_folder, write_durably
from helixrt.job.stored_path import Place, StoredPath

_UNFINISHED = ".part-"  # in the name of what is being written, before a random number


def write_folder(
    folder: Place, things: Sequence[Any], description: Mapping[str, Any], written: Callable[[], None] = lambda: None
) -> None:
    """Write tensors or objects into a new folder, and `PART` with the description, where each thing is and the checksums of the
    files. Nothing, if the folder of a file system is there: it is whole, by an earlier attempt or by another replica."""
    if isinstance(folder, StoredPath):
        text = _fill(folder, things, description, written)
        (folder / PART).write_bytes(text.encode())
        return
    if folder.is_dir():
        return
    unfinished = folder.with_name(f"{folder.name}{_UNFINISHED}{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        write_durably(unfinished / PART, _fill(unfinished, things, description, written))
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():  # else another replica was first
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fill(folder: Place, things: Sequence[Any], description: Mapping[str, Any], written: Callable[[], None]) -> str:
    """All files but `PART`, whose text is returned."""
    from helixrt.job.dcp_private import write_data

    stored = [[each.file, each.at, each.nbytes] for each in write_data(folder, things, written)]
    names = sorted(path.name for path in folder.iterdir())
    sums = {name: file_sum(folder / name) for name in names}  # read again: so the bytes are known to be there
    return json.dumps({**description, "stored": stored, "files": sums})


def join_parts(target: Place, ranks: int) -> dict[str, list[int]]:
    """Make the parts of all ranks one DCP checkpoint; size and CRC-32 of all files. Raises ValueError for parts that do not
    make up a whole state."""
    from helixrt.job.dcp_private import Stored, write_metadata

    def described(folder: str) -> dict[str, Any]:
        text = (target / folder / PART).read_text(encoding="utf-8")
        files[f"{folder}/{PART}"] = file_sum(target / folder / PART)
        found: dict[str, Any] = json.loads(text)
        files.update({f"{folder}/{name}": known for name, known in found["files"].items()})
        return found

    files: dict[str, list[int]] = {}
    parts = [described(f"rank_{rank}") for rank in range(ranks)]
    index = Index([PartIndex.from_plain(part["index"]) for part in parts])
    objects = objects_of(index)
    write_folder(target / "objects", list(objects.values()), {})
    stored = [[Stored(*each).below(f"rank_{rank}") for each in part["stored"]] for rank, part in enumerate(parts)]
    kept = [Stored(*each).below("objects") for each in described("objects")["stored"]]
    if not (target / ".metadata").exists():
        parent = None if isinstance(target, StoredPath) else target
        with tempfile.TemporaryDirectory(prefix=f".metadata{_UNFINISHED}", dir=parent) as unfinished:
            made = Path(unfinished)
            write_metadata(made, tensors_of(index, stored), dict(zip(objects, kept, strict=True)))
            _put_in_place(made / ".metadata", target / ".metadata")
    files[".metadata"] = file_sum(target / ".metadata")
    return files


def _put_in_place(file: Path, target: Place) -> None:
    """The first one stays. On a file system without links a later one takes its place, which says the same."""
    if isinstance(target, StoredPath):
        target.write_bytes(file.read_bytes())
        return
    try:
        os.link(file, target)
    except FileExistsError:
        return
    except OSError:
        os.replace(file, target)
    sync_folder(target.parent)


def write_manifest(target: Place, manifest: Mapping[str, Any]) -> None:
    """The last file: from now on the checkpoint is complete, and survives a crash."""
    text = json.dumps(manifest, indent=1)
    if isinstance(target, StoredPath):
        (target / MANIFEST).write_bytes(text.encode())
        return
    write_durably(target / MANIFEST, text)
    sync_folder(target.parent)
    sync_folder(target.parent.parent)


def delete_unfinished(target: Place) -> None:
    """What a life of a replica that was killed has left in a complete checkpoint's folder."""
    if isinstance(target, Path):
        for left in target.glob(f"*{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
