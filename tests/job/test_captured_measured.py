"""Chunks are balanced by measured times of the layers, which all ranks of a run have alike, also when it is resumed.

Nothing is measured in these tests: what a rank finds is given.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import helixrt
from helixrt.compile.whole_model import WholeModel
from helixrt.engines.captured import CapturedModel
from helixrt.engines.example_batch import ExampleBatch
from helixrt.engines.first_order import Planned, planned_by
from helixrt.engines.staged import StagePlace
from helixrt.errors import ConfigError
from helixrt.job import captured
from helixrt.job.captured import agreed_times, times_to_cut_by
from helixrt.passes.chunk_times import ChunkTimes
from helixrt.passes.parts import Part
from helixrt.passes.unit_costs import chunk_times
from helixrt.passes.units import units
from helixrt.pipeline import measured_units
from helixrt.pipeline.measured_units import Found, expected
from helixrt.record import FlightRecord
from helixrt.replica.store import MemoryRunStore
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Schedule
from tests.job.test_captured import MICROBATCHES, WIDTH, Perceptron, StageHost


def taking(forward_ms: float) -> ChunkTimes:
    return ChunkTimes(forward_ms, forward_ms, forward_ms, 2 * forward_ms)


ONE, TWO, NINE = taking(1.0), taking(2.0), taking(9.0)


class FolderHost(StageHost):
    def __init__(self, folder: Path | None, store: MemoryRunStore, stage: int = 0, stages: int = 1) -> None:
        super().__init__(store=store)
        self.place = StagePlace(stage, stages, None, FlightRecord(f"pp{stage}"))
        self._folder = folder

    @property
    def folder(self) -> Path | None:
        return self._folder


def joint() -> Part:
    x = torch.zeros(1, WIDTH)
    return WholeModel(Perceptron(), mse_loss, ((x,), {}, x[:, :2])).joint()


def slow_at(slow: str, given: Part) -> Mapping[str, ChunkTimes]:
    """One unit is as slow as all others together."""
    return {name: taking(5.0 if name == slow else 1.0) for name in units(given).names}


def begins(slow: str | None, **options: str) -> str:
    """Where the second of two stages begins."""

    def times(given: Part, schedule: Schedule) -> Mapping[str, ChunkTimes] | None:
        return None if slow is None else slow_at(slow, given)

    model = helixrt.compile(Perceptron(), loss=mse_loss, microbatches=MICROBATCHES, **options)
    x = torch.zeros(MICROBATCHES, WIDTH)
    place = StagePlace(0, 2, None, FlightRecord("pp0"))
    return CapturedModel(model.train_step, ExampleBatch(x, target=x[:, :2]), place, times=times).cut.chunks[1].first


def test_chunks_are_balanced_by_the_times_that_were_measured() -> None:
    for options in ({}, {"profile": "measure"}):
        assert begins("layers.0", **options) == "layers.1"
        assert begins("layers.3", **options) == "layers.3"


def test_without_measured_times_estimates_are_taken() -> None:
    by_estimates = begins(None)
    assert begins("layers.0", profile="estimate") == begins("layers.3", profile="estimate") == by_estimates


# ---------------------------------------------------------------- the first order


def captured_with(slow: str | None, **options: Any) -> CapturedModel:
    def times(given: Part, schedule: Schedule) -> Mapping[str, ChunkTimes] | None:
        return None if slow is None else slow_at(slow, given)

    model = helixrt.compile(Perceptron(), loss=mse_loss, microbatches=MICROBATCHES, **options)
    x = torch.zeros(MICROBATCHES, WIDTH)
    place = StagePlace(0, 4, None, FlightRecord("pp0"))
    return CapturedModel(model.train_step, ExampleBatch(x, target=x[:, :2]), place, times=times)


def test_the_first_order_is_planned_from_the_times_that_were_measured() -> None:
    """It is faster, and the stages behind the slow one hold less."""
    planned, equal = captured_with("layers.0", schedule="helix").planned, build("helix", 4, MICROBATCHES)
    assert planned is not None and planned.makespan_ms < planned.equal_ms
    assert planned.held == sum(planned.schedule.in_flight) < planned.equal_held == sum(equal.in_flight)
    assert all(now <= before for now, before in zip(planned.schedule.in_flight, equal.in_flight, strict=True))


def test_an_order_that_holds_more_than_that_for_equal_times_is_not_taken() -> None:
    """zb does not ask what memory there is; chunks were balanced for the order for equal times."""
    times = [taking(1.0), taking(1.0), taking(1.0), taking(6.0)]
    equal = build("1f1b", 4, 16)  # it holds less than zb's
    planned = Planned.of("zb", times, equal)
    assert planned.makespan_ms <= planned.equal_ms and planned.held > planned.equal_held, "else this test shows nothing"
    options = helixrt.compile(Perceptron(), loss=mse_loss, microbatches=16, schedule="zb").train_step.options
    assert planned_by(times, options, equal) is None


def test_the_order_for_equal_times_stays_without_times_without_a_policy_that_plans_and_with_other_costs(
    tmp_path: Path,
) -> None:
    (tmp_path / "profile.json").write_text(json.dumps({key: [1, 5, 1, 1] for key in "fbw"}))
    for slow, options in (
        (None, {"schedule": "helix"}),
        ("layers.0", {"schedule": "1f1b"}),
        ("layers.0", {"schedule": build("helix", 4, MICROBATCHES)}),
        ("layers.0", {"schedule": "helix", "profile": "estimate"}),
        ("layers.0", {"schedule": "helix", "costs": tmp_path / "profile.json"}),
    ):
        assert captured_with(slow, **options).planned is None, options


def test_times_of_chunks_are_the_sums_of_their_layers() -> None:
    given = joint()
    names, times = units(given).names, slow_at("layers.0", joint())
    whole = chunk_times(given, [], times)
    assert whole == (ChunkTimes.sum([times[name] for name in names]),)
    first, second, third = chunk_times(given, [2, 3], times)
    assert second == times[names[2]] and first == ChunkTimes.sum([times[names[0]], times[names[1]]])
    assert ChunkTimes.sum([first, second, third]) == whole[0]


# ---------------------------------------------------------------- which rank measures, and what the others take


def finding(*found: Found) -> Callable[[], Found]:
    """Each call gives the next one; more calls are wrong."""
    left = list(found)
    return lambda: left.pop(0)


def timed(**times: ChunkTimes) -> Found:
    return Found({name or "": one for name, one in times.items()}, "", 1.5)


def test_all_ranks_take_what_the_first_has_found(tmp_path: Path) -> None:
    store = MemoryRunStore()
    first, second = FolderHost(tmp_path / "a", store), FolderHost(tmp_path / "b", store)
    for host in (first, second):
        assert host.folder is not None
        host.folder.mkdir()
    assert agreed_times(first, "k", finding(timed(a=ONE)), measures=True) == timed(a=ONE)
    assert agreed_times(second, "k", finding(), measures=True) == timed(a=ONE)  # it is known before it measures
    assert agreed_times(second, "other", finding(timed(a=NINE)), measures=True) == timed(a=NINE)  # of another model


def test_of_ranks_that_measure_at_once_one_decides() -> None:
    store = MemoryRunStore()

    def late() -> Found:
        agreed_times(FolderHost(None, store), "k", finding(timed(a=ONE)), measures=True)  # is faster
        return timed(a=NINE)

    assert agreed_times(FolderHost(None, store), "k", late, measures=True) == timed(a=ONE)


def test_ranks_that_do_not_measure_wait_for_one_that_does() -> None:
    store, results = MemoryRunStore(), list[Found]()

    def wait() -> None:
        results.append(agreed_times(FolderHost(None, store, 1, 2), "k", finding(), measures=False))

    waiting = threading.Thread(target=wait)
    waiting.start()
    agreed_times(FolderHost(None, store), "k", finding(timed(a=TWO)), measures=True)
    waiting.join(timeout=60.0)
    assert results == [timed(a=TWO)]


def test_ranks_of_a_stage_that_measure_together_all_do(tmp_path: Path) -> None:
    """Their layers communicate: one that did not would leave the others waiting."""
    store, calls = MemoryRunStore(), list[str]()

    def measured() -> Found:
        calls.append("measured")
        return timed(a=NINE)

    for life in (store, MemoryRunStore()):
        for _ in range(2):
            agreed_times(FolderHost(tmp_path, life), "k", measured, measures=True, together=True)
    assert len(calls) == 4


def test_a_resumed_run_is_cut_as_before(tmp_path: Path) -> None:
    for found in (timed(a=ONE), Found(None, "the machine is too busy")):
        key = "times" if found.times else "none"
        agreed_times(FolderHost(tmp_path, MemoryRunStore()), key, finding(found), measures=True)
        again = FolderHost(tmp_path, MemoryRunStore())
        assert agreed_times(again, key, finding(), measures=True) == found
        assert agreed_times(FolderHost(tmp_path, again.store, 1, 2), key, finding(), measures=False) == found
    kept = tmp_path / "layer_times_times.json"
    kept.write_text(kept.read_text(encoding="utf-8")[:-2], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"layer_times_.*cannot be read"):
        agreed_times(FolderHost(tmp_path, MemoryRunStore()), "times", finding(), measures=True)


# ---------------------------------------------------------------- a run's start


@pytest.fixture
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut of any model is worth measuring."""
    monkeypatch.setattr(measured_units, "LEAST_STEP_S", 0.0)


def cut_by(host: FolderHost, always: bool = False) -> Mapping[str, ChunkTimes] | None:
    return times_to_cut_by(host, host.place, joint(), build("1f1b", 2, MICROBATCHES), always)


def hosts(store: MemoryRunStore) -> tuple[FolderHost, FolderHost]:
    """Of the stage that measures, and of the other one."""
    stage = expected(joint(), build("1f1b", 2, MICROBATCHES)).stage
    return FolderHost(None, store, stage, 2), FolderHost(None, store, 1 - stage, 2)


@pytest.mark.usefixtures("long_steps")
def test_one_stage_measures_and_the_others_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, given = MemoryRunStore(), slow_at("layers.3", joint())
    monkeypatch.setattr(measured_units, "measure_units", lambda *_: Found(given, "", 2.0))
    first, second = hosts(store)
    assert cut_by(first) == given
    monkeypatch.setattr(measured_units, "measure_units", lambda *_: pytest.fail("a second rank measures"))
    assert cut_by(second) == given
    assert first.said == ["stages are balanced by measured times of the layers (2.0 s)"] and second.said == []


@pytest.mark.usefixtures("long_steps")
def test_on_a_busy_machine_all_ranks_take_estimates_and_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryRunStore()
    monkeypatch.setattr(measured_units, "measure_units", lambda *_: Found(None, "the machine is too busy"))
    first, second = hosts(store)
    assert cut_by(first) is None and cut_by(second) is None
    (said,) = first.said
    assert said.startswith("stages are balanced by estimated times of the layers: the machine is too busy")


def test_the_start_of_a_small_model_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "agreed_times", lambda *_, **__: pytest.fail("asked"))
    host, _ = hosts(MemoryRunStore())
    assert cut_by(host) is None and host.said == []


def test_with_profile_measure_it_is_measured_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = slow_at("layers.0", joint())
    monkeypatch.setattr("helixrt.pipeline.unit_times.unit_times", lambda joint: given)
    host, _ = hosts(MemoryRunStore())
    assert cut_by(host, always=True) == given
