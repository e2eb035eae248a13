"""A damaged checkpoint is found by the rank that reads it, and then an older one is taken, in every replica."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.errors import ConfigError, Retryable
from helixrt.job import checkpoint as checkpoints
from helixrt.job import dcp_private
from helixrt.job.durable_state import DurableState
from helixrt.job.stored_path import Place
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.replica.contracts import State
from helixrt.replica.store import MemoryRunStore
from tests.job.test_checkpoint import MESH, WEIGHT, Replica, files_of, place, state_of

__all__ = ["place"]  # a fixture

ROOT = genesis("run", 2)
OLDER = CommitRecord(2, 2, ROOT.hash, ((0, 0),), {0: 2}, "run")
NEWER = CommitRecord(4, 4, OLDER.hash, ((0, 0),), {0: 4}, "run")


class Rank:
    """An engine whose state is what was loaded."""

    def __init__(self, number: int, place: Place, store: MemoryRunStore, life: str) -> None:
        self.held = State(state_of(number, 0))
        self.durable: Any = DurableState(place, number, MESH, self, lambda: Log([ROOT, OLDER, NEWER]), store, life)  # type: ignore[arg-type]

    def state(self) -> State:
        return self.held

    def portions(self) -> dict[str, Any]:
        return {}

    def load(self, state: State) -> None:
        self.held = state


@pytest.fixture
def saved(place: Place) -> Place:
    replica = Replica(place)
    for record in (OLDER, NEWER):
        replica.save_and_wait(record)
    replica.close()
    return place


def damage(place: Place, record: CommitRecord, rank: int) -> None:
    """Of the same size as before."""
    folder = checkpoints.complete_of(place, record)
    assert folder is not None
    file = files_of(folder) / f"rank_{rank}" / "__0_0.distcp"
    before = file.read_bytes()
    at = before.index(state_of(rank, record.step)[WEIGHT].numpy().tobytes())
    file.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])


def test_one_replica_tells_of_other_hyperparameters_and_in_a_resumed_run_alone(saved: Place) -> None:
    """A replica that comes back to a checkpoint of the run's own life takes it as it is."""
    for resumes, told in ((0, []), (1, ["other rates"])):
        store, said = MemoryRunStore(), list[str]()
        for number, life in ((0, "0/1"), (1, "0/1"), (0, "1/1"), (0, "0/2")):
            engine: Any = Rank(number, saved, store, life)
            engine.resumed = lambda: "other rates"
            durable = DurableState(
                saved, number, MESH, engine, lambda: Log([ROOT, OLDER, NEWER]), store, life, resumes, said.append
            )
            assert durable.load(NEWER.hash, False)
        assert said == told


def test_a_rank_that_reads_what_was_not_written_has_an_older_one_taken_in_every_replica(saved: Place) -> None:
    damage(saved, NEWER, 1)
    store = MemoryRunStore()
    ranks = [Rank(number, saved, store, "0/1") for number in (0, 1)]
    other = Rank(0, saved, store, "1/1")
    assert ranks[0].durable.newest(-1) == other.durable.newest(-1) == NEWER.hash, "nobody has read its tensors"
    assert ranks[0].durable.load(NEWER.hash, False), "its own are whole"
    held = ranks[1].held
    assert not ranks[1].durable.load(NEWER.hash, False) and ranks[1].held is held
    assert ranks[0].durable.newest(-1) == other.durable.newest(-1) == OLDER.hash
    assert ranks[0].durable.newest(2) is None
    for rank in ranks:
        assert rank.durable.load(OLDER.hash, False)
    assert torch.equal(ranks[1].held.tensors[WEIGHT], state_of(1, 2)[WEIGHT])


def test_with_every_checkpoint_damaged_the_run_does_not_begin_again(saved: Place) -> None:
    store = MemoryRunStore()
    rank = Rank(1, saved, store, "0/1")
    for record in (NEWER, OLDER):
        damage(saved, record, 1)
        assert rank.durable.newest(-1) == record.hash and not rank.durable.load(record.hash, False)
    file = "rank_1/__0_0.distcp is not the file that was written"
    with pytest.raises(ConfigError, match=rf"resume=true: .*{NEWER.hash[:8]}.*{file}"):
        rank.durable.newest(-1)


def test_a_file_that_is_too_short_is_noticed_before_anything_is_read(saved: Place) -> None:
    folder = checkpoints.complete_of(saved, NEWER)
    assert folder is not None
    file = Path(files_of(folder) / "rank_1" / "__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    assert Rank(0, saved, MemoryRunStore(), "0/1").durable.newest(-1) == OLDER.hash


def test_a_whole_checkpoint_that_was_not_read_is_read_again(saved: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises RuntimeError when an allocation fails."""
    rank = Rank(1, saved, MemoryRunStore(), "0/1")
    with monkeypatch.context() as patched:
        patched.setattr(dcp_private._Box, "target", no_memory)
        with pytest.raises(Retryable, match=r"cannot load .*; its files are whole"):
            rank.durable.load(NEWER.hash, False)
    assert rank.durable.newest(-1) == NEWER.hash and rank.durable.load(NEWER.hash, False)


def no_memory(box: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("place", ["folder"], indirect=True)
def test_a_block_that_cannot_be_read_is_damage(saved: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(1, saved, MemoryRunStore(), "0/1")
    assert isinstance(saved, Path)
    opened = open

    def bad_sector(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if f"{checkpoints.folder_name(NEWER)}/rank_1/__0_0" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, *arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", bad_sector)
        patched.setattr(Path, "open", lambda path, *a, **k: bad_sector(path, *a, **k))
        assert not rank.durable.load(NEWER.hash, False)
    assert rank.durable.newest(-1) == OLDER.hash
