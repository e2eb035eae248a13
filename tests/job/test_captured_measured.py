"""`profile="measure"`: chunks are balanced by measured times, which all ranks of a run have alike, also when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import helixrt
from helixrt.engines.captured import CapturedModel
from helixrt.engines.example_batch import ExampleBatch
from helixrt.engines.staged import StagePlace
from helixrt.errors import ConfigError
from helixrt.job.captured import agreed_times
from helixrt.passes.chunk_times import ChunkTimes
from helixrt.passes.parts import Part
from helixrt.passes.units import units
from helixrt.record import FlightRecord
from helixrt.replica.store import MemoryRunStore
from tests.job.test_captured import MICROBATCHES, WIDTH, Perceptron, StageHost


def taking(forward_ms: float) -> ChunkTimes:
    return ChunkTimes(forward_ms, forward_ms, forward_ms, 2 * forward_ms)


ONE, TWO, NINE = taking(1.0), taking(2.0), taking(9.0)


class FolderHost(StageHost):
    def __init__(self, folder: Path, store: MemoryRunStore) -> None:
        super().__init__(store=store)
        self._folder = folder

    @property
    def folder(self) -> Path | None:
        return self._folder


def begins(slow: str, **options: str) -> str:
    """Where the second of two stages begins if one unit is as slow as all others together."""

    def times(joint: Part) -> Mapping[str, ChunkTimes]:
        return {name: taking(5.0 if name == slow else 1.0) for name in units(joint).names}

    model = helixrt.compile(Perceptron(), loss=mse_loss, microbatches=MICROBATCHES, **options)
    x = torch.zeros(MICROBATCHES, WIDTH)
    place = StagePlace(0, 2, None, FlightRecord("pp0"))
    return CapturedModel(model.train_step, ExampleBatch(x, target=x[:, :2]), place, times=times).cut.chunks[1].first


def test_chunks_are_balanced_by_the_times_that_were_measured() -> None:
    assert begins("layers.0", profile="measure") == "layers.1"
    assert begins("layers.3", profile="measure") == "layers.3"
    assert begins("layers.0") == begins("layers.3")  # by estimates


def test_all_ranks_take_the_times_of_the_first(tmp_path: Path) -> None:
    store = MemoryRunStore()
    first, second = FolderHost(tmp_path, store), FolderHost(tmp_path, store)
    assert agreed_times(first, {"": ONE, "a": TWO}) == {"": ONE, "a": TWO}
    assert agreed_times(second, {"": NINE, "a": NINE}) == {"": ONE, "a": TWO}
    assert agreed_times(second, {"": NINE, "b": NINE}) == {"": NINE, "b": NINE}  # of another model


def test_a_resumed_run_is_cut_as_before(tmp_path: Path) -> None:
    agreed_times(FolderHost(tmp_path, MemoryRunStore()), {"": ONE, "a": TWO})
    assert agreed_times(FolderHost(tmp_path, MemoryRunStore()), {"": NINE, "a": NINE}) == {"": ONE, "a": TWO}
    (kept,) = tmp_path.iterdir()
    kept.write_text(kept.read_text(encoding="utf-8")[:-2], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unit_times_.*cannot be read"):
        agreed_times(FolderHost(tmp_path, MemoryRunStore()), {"": NINE, "a": NINE})
