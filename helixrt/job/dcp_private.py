"""torch.distributed.checkpoint (torch 2.13 to 2.15), without a process group: each rank writes its files, one the metadata.

In: tensors and objects with their keys. Out: files in DCP's format, and a `.metadata` over those of all ranks, which names them
by their paths below its folder: `dcp.load`, `dcp_to_torch_save` and others read it as any checkpoint.

What is not public: `_StorageInfo`, where an entry lies in a file; `FsspecWriter` and `FsspecReader`, which take the place of
`FileSystemWriter` and `FileSystemReader` in a storage; `create_read_items_for_chunk_list`. Functions that need one of them
raise ConfigError where torch has another.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from helixrt.job.checkpoint_layout import WholeTensor, box_of, crc_of
from helixrt.job.stored_path import Place, StoredPath
from helixrt.private_api import STORAGE_FILES, STORED_PLACES, require
from helixrt.replica.portions import Portion


@dataclass(frozen=True)
class Stored:
    """Where a tensor or an object lies: file (relative to the folder that was written), first byte, number of bytes."""

    file: str
    at: int
    nbytes: int

    def below(self, folder: str) -> Stored:
        return Stored(f"{folder}/{self.file}", self.at, self.nbytes)


def write_data(folder: Place, things: Sequence[Any], written: Callable[[], None] = lambda: None) -> list[Stored]:
    """Write tensors (on the CPU) and other objects into the folder, synced. `written()` is called when the bytes are there."""
    saved: list[list[WriteResult]] = []

    class Finished:
        def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
            written()
            saved.extend(results)

    class FileWriter(Finished, dcp.FileSystemWriter):
        pass

    _alone_on_purpose()
    writer: Any
    if isinstance(folder, StoredPath):
        require(STORAGE_FILES)
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        class StorageWriter(Finished, FsspecWriter):
            pass

        # A storage has bytes for good when a file is closed; asked to sync, the writer would sync this machine's disks.
        writer = StorageWriter(str(folder), sync_files=False)
    else:
        writer = FileWriter(folder)
    dcp.save({}, storage_writer=writer, planner=_SavePlanner(things), no_dist=True)
    found = {int(each.index.fqn): each.storage_data for part in saved for each in part}
    return [Stored(found[i].relative_path, found[i].offset, found[i].length) for i in range(len(things))]


def write_metadata(
    folder: Path, tensors: Mapping[tuple[str, ...], WholeTensor], objects: Mapping[tuple[str, ...], Stored]
) -> None:
    """The `.metadata` of the checkpoint in this folder, synced. Keys are paths in the nested state. Raises ValueError for two
    with one name."""
    entries: dict[str, Any] = {}
    storage: list[WriteResult] = []
    for path, whole in tensors.items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in whole.boxes]
        _put(entries, path, dcp.TensorStorageMetadata(_properties(whole.dtype), torch.Size(whole.shape), chunks))
        for number, (chunk, stored) in enumerate(zip(chunks, whole.stored, strict=True)):
            storage.append(_result(MetadataIndex(_key(path), chunk.offsets, number), stored))
    for path, stored in objects.items():
        _put(entries, path, dcp.BytesStorageMetadata())
        storage.append(_result(MetadataIndex(_key(path)), stored))
    paths = {_key(path): path for path in (*tensors, *objects)}
    dcp.FileSystemWriter(folder).finish(dcp.Metadata(entries, planner_data=paths), [storage])


Crcs = Mapping[tuple[int, ...], int]  # of a stored tensor: the CRC-32 of each box, by the box's offset


def read(folder: Place, wanted: Mapping[str, tuple[Portion, torch.Tensor, Crcs]]) -> None:
    """Fill each tensor with what its portion names of the checkpoint in the folder; by any keys, `Portion.name` is that in the
    checkpoint. Raises what DCP raises, ValueError inside it for a box whose bytes are not those of its CRC-32."""
    _alone_on_purpose()
    require(STORED_PLACES)
    reader: Any
    if isinstance(folder, StoredPath):
        require(STORAGE_FILES)
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        reader = FsspecReader(str(folder))
    else:
        reader = dcp.FileSystemReader(folder)
    dcp.load({}, storage_reader=reader, planner=_LoadPlanner(wanted), no_dist=True)


def _key(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _put(entries: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    if _key(path) in entries:
        raise ValueError(f"two entries of the state would be called {_key(path)} in the checkpoint")
    entries[_key(path)] = value


def _result(index: MetadataIndex, stored: Stored) -> WriteResult:
    require(STORED_PLACES)
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return WriteResult(index, stored.nbytes, _StorageInfo(stored.file, stored.at, stored.nbytes))


def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, dtype))


def _alone_on_purpose() -> None:
    """Each rank saves and loads its own part: DCP need not warn of it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class _SavePlanner(dcp.SavePlanner):
    """Writes `things` under their numbers."""

    def __init__(self, things: Sequence[Any]) -> None:
        self._things = things

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> dcp.SavePlan:
        return dcp.SavePlan([self._item(str(number), thing) for number, thing in enumerate(self._things)])

    @staticmethod
    def _item(name: str, thing: Any) -> WriteItem:
        if not isinstance(thing, torch.Tensor):
            return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
        chunk = dcp.ChunkStorageMetadata(torch.Size([0] * thing.dim()), thing.size())
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(thing), thing.size())
        return WriteItem(MetadataIndex(name), WriteItemType.TENSOR, tensor_data=data)

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        return all_plans, dcp.Metadata({})

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        thing = self._things[int(write_item.index.fqn)]
        if isinstance(thing, torch.Tensor):
            return thing
        stream = io.BytesIO()
        torch.save(thing, stream)
        return stream


@dataclass(frozen=True)
class _Box:
    """A stored box that is read whole, and checked. `pieces`: boxes of it (offset and size) and where their values go."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    crc: int
    pieces: list[tuple[Sequence[int], Sequence[int], torch.Tensor]]

    def target(self) -> torch.Tensor:
        """Where DCP puts it: where it is wanted, if all of it is wanted there."""
        offset, size, there = self.pieces[0]
        return there if len(self.pieces) == 1 and tuple(size) == self.size else torch.empty(self.size, dtype=self.dtype)

    def came(self, tensor: torch.Tensor) -> None:
        """`tensor` is `target`, filled. Raises ValueError if its bytes are not those that were written."""
        if crc_of(tensor) != self.crc:
            raise ValueError(f"{self.name} is not what was written")
        for offset, size, there in self.pieces:
            if there is not tensor:
                there.copy_(box_of(tensor, offset, size))


class _LoadPlanner(dcp.LoadPlanner):
    """Reads portions of tensors into tensors."""

    def __init__(self, wanted: Mapping[str, tuple[Portion, torch.Tensor, Crcs]]) -> None:
        self._wanted = wanted
        self._metadata: dcp.Metadata | None = None
        self._boxes: list[_Box] = []
        self._targets: dict[int, torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, metadata: dcp.Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> dcp.LoadPlan:
        assert self._metadata is not None
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        items: list[dcp.ReadItem] = []
        for portion, tensor, crcs in self._wanted.values():
            stored = self._metadata.state_dict_metadata.get(portion.name)
            if not isinstance(stored, dcp.TensorStorageMetadata):
                raise ValueError(f"the checkpoint's metadata have no tensor {portion.name}")
            if (tuple(stored.size), stored.properties.dtype) != (portion.shape, tensor.dtype):
                raise ValueError(f"{portion.name} is {stored.properties.dtype}{list(stored.size)} in the checkpoint's metadata")
            sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in stored.chunks}
            found: dict[MetadataIndex, _Box] = {}
            for block in portion.blocks:
                there = box_of(tensor, block.local, block.size)
                chunk = dcp.ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.size))
                for item in create_read_items_for_chunk_list(portion.name, stored, [chunk]):
                    assert item.storage_index.offset is not None
                    at = tuple(item.storage_index.offset)
                    new = _Box(portion.name, sizes[at], tensor.dtype, crcs[at], [])
                    piece = (item.storage_offsets, item.lengths, box_of(there, item.dest_offsets, item.lengths))
                    found.setdefault(item.storage_index, new).pieces.append(piece)
            for index, box in found.items():
                zeros = torch.Size([0] * len(box.size))
                dest = MetadataIndex(str(len(self._boxes)), zeros)
                items.append(dcp.ReadItem(LoadItemType.TENSOR, dest, zeros, index, zeros, torch.Size(box.size)))
                self._boxes.append(box)
        return dcp.LoadPlan(items)

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return central_plan

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("tensors alone are asked for")

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        number = int(read_item.dest_index.fqn)
        self._targets[number] = self._boxes[number].target()
        return self._targets[number]

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        number = int(read_item.dest_index.fqn)
        self._boxes[number].came(self._targets.pop(number))  # DCP gives a detached one, which is another object
