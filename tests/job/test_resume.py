"""Which run `helixrt.run(resume=)` goes on with, what is refused, and what the streams of a resumed run must agree with."""

from __future__ import annotations

import errno
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from helixrt.errors import ConfigError, MisuseError
from helixrt.job import checkpoint as checkpoints
from helixrt.job import loader_states
from helixrt.job.checkpoint_layout import Index, PartIndex
from helixrt.job.config import MeshConfig, OutputConfig
from helixrt.job.loader_states import LoaderStates
from helixrt.job.resume import keep_accumulation, keep_stream, restore_accumulation, restore_stream, run_to_resume, saved_run
from helixrt.job.sampler import stream_sampler
from helixrt.job.session_config import SessionConfig
from helixrt.job.stream import Stream, StreamSettings
from helixrt.job.train_function import TrainFunction
from helixrt.protocol.step.lineage import genesis
from helixrt.replica.store import MemoryRunStore


def config_of(root: Path, name: str = "run", replicas: int = 2, seed: int = 3) -> SessionConfig:
    return SessionConfig(name=name, seed=seed, mesh=MeshConfig(replicas, 1), output=OutputConfig(root=str(root)))


def past_run(root: Path, time: str, config: SessionConfig) -> Path:
    folder = root / "2026-01-02" / time
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run": f"{config.name}-1", "epoch_s": 0.0, "life": 0}))
    (folder / "config.json").write_text(json.dumps(config.to_plain()))
    return folder


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the folders of runs that have a whole checkpoint."""
    names: set[str] = set()

    def found(run: Path) -> checkpoints.Checkpoint | None:
        return checkpoints.Checkpoint(run, genesis("run", 2), {"pp": 1}) if run.name in names else None

    monkeypatch.setattr(checkpoints, "checkpoint_of", found)
    monkeypatch.setattr(checkpoints, "read_index", lambda found: Index([PartIndex({}, {})]))
    return names


def test_a_deepspeed_engine_over_another_number_of_ranks_is_refused(
    tmp_path: Path, saved: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.add("10-00-00")
    folder, three = past_run(tmp_path, "10-00-00", config_of(tmp_path)), replace(config_of(tmp_path), mesh=MeshConfig(2, 1, 3))
    there = checkpoints.Checkpoint(folder, genesis("run", 2), {"pp": 1, "dp_shard": 2, "cp": 1, "tp": 1})
    monkeypatch.setattr(checkpoints, "checkpoint_of", lambda run: there)
    assert run_to_resume(three, folder)[0] == folder
    monkeypatch.setattr(checkpoints, "read_index", lambda found: Index([PartIndex({}, {"engine/global_steps": 6})]))
    with pytest.raises(ConfigError, match="mesh.dp_shard=3: the state of the DeepSpeed engine in .* divided over 2 ranks"):
        run_to_resume(three, folder)
    assert run_to_resume(replace(three, mesh=MeshConfig(1, 1, 2)), folder)[0] == folder, "other replicas"


def test_the_newest_run_of_the_same_name_that_has_a_checkpoint(
    tmp_path: Path, saved: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    for time, name in (("10-00-00", "run"), ("11-00-00", "run"), ("12-00-00", "run"), ("13-00-00", "other")):
        past_run(tmp_path, time, replace(config, name=name))
    saved |= {"10-00-00", "11-00-00", "13-00-00"}
    assert run_to_resume(config, "latest")[0].name == "11-00-00"
    monkeypatch.chdir(tmp_path)
    assert run_to_resume(config_of(Path(".")), "latest")[0] == tmp_path / "2026-01-02" / "11-00-00", "not relative"
    assert run_to_resume(replace(config, name="other"), "latest")[0].name == "13-00-00"
    assert run_to_resume(config, tmp_path / "2026-01-02" / "10-00-00")[0].name == "10-00-00"
    with pytest.raises(ConfigError, match="resume=latest: no complete checkpoint in any run named third under"):
        run_to_resume(replace(config, name="third"), "latest")


def test_a_program_can_look_at_the_run_that_it_would_go_on_with(tmp_path: Path, saved: set[str]) -> None:
    function = TrainFunction("", "train", "/programs/train.py", "/programs", ("--fast",))
    config = replace(config_of(tmp_path), train=function, arguments={"layers": 3})
    folder = past_run(tmp_path, "10-00-00", config)
    with pytest.raises(ConfigError, match="resume=true: no complete checkpoint in any run under"):
        saved_run(tmp_path)
    saved.add("10-00-00")
    found = saved_run(tmp_path, "run")
    assert (found.folder, found.step, found.ranks, found.train) == (folder, 0, 1, "/programs/train.py:train")
    assert found.arguments == {"layers": 3} and found.settings["mesh"]["replicas"] == 2 and "train" not in found.settings
    (folder / "config.json").write_text(json.dumps({"name": "run", "seed": 3}))
    for look in (lambda: saved_run(tmp_path), lambda: run_to_resume(config, folder)):
        with pytest.raises(ConfigError, match="was not begun by helixrt.run of this version: its config.json cannot be read"):
            look()


def test_what_cannot_be_resumed_is_refused(tmp_path: Path, saved: set[str]) -> None:
    config = config_of(tmp_path)
    folder = past_run(tmp_path, "10-00-00", config)
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        run_to_resume(config, folder)
    saved.add("10-00-00")
    with pytest.raises(ConfigError, match="is not the folder of a run: it has no run.json"):
        run_to_resume(config, tmp_path)
    assert run_to_resume(config_of(tmp_path, replicas=3), folder)[0] == folder
    assert run_to_resume(replace(config, mesh=MeshConfig(1, 4, tp=2)), folder)[0] == folder, "other stages and shards"
    with pytest.raises(ConfigError, match="seed=4: .* was begun with seed=3"):
        run_to_resume(config_of(tmp_path, seed=4), folder)


@pytest.mark.parametrize(("accumulate", "batches"), [(2, 12), (3, 12), (2, 14)])
def test_a_resumed_run_reads_its_data_as_before(accumulate: int, batches: int, tmp_path: Path) -> None:
    store = MemoryRunStore()
    assert not keep_stream(store, tmp_path) and not restore_stream(store, tmp_path)
    Stream(list(range(12)), StreamSettings(0, 2), store)
    assert keep_stream(store, tmp_path)
    again = MemoryRunStore()
    assert restore_stream(again, tmp_path)
    if (accumulate, batches) == (2, 12):
        assert list(Stream(list(range(12)), StreamSettings(1, 2), again).take(4)) == [4, 5]
        return
    with pytest.raises(MisuseError, match="=(3|14) in stream 1/0, and (2|12) in the run that is resumed: a position counts"):
        Stream(list(range(batches)), StreamSettings(1, accumulate), again)


class Named(list[int]):
    def __init__(self, content: str) -> None:
        super().__init__(range(12))
        self.content_digest = content


def test_a_run_is_not_resumed_on_other_data_and_streams_read_the_same(tmp_path: Path) -> None:
    store = MemoryRunStore()
    Stream(Named("corpus 1"), StreamSettings(0, 2), store)
    with pytest.raises(MisuseError, match="content_digest=corpus 2 in stream 1/0, and corpus 1 in stream 0/0: all streams"):
        Stream(Named("corpus 2"), StreamSettings(1, 2), store)
    assert keep_stream(store, tmp_path)
    again = MemoryRunStore()
    assert restore_stream(again, tmp_path)
    with pytest.raises(MisuseError, match="and corpus 1 in the run that is resumed: a position counts"):
        Stream(Named(""), StreamSettings(0, 2), again)
    Stream(Named("corpus 1"), StreamSettings(0, 2), again)


class Endless(IterableDataset[int]):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def dealt(items: int, shuffle: bool = True, batch: int = 4) -> Any:
    data = list(range(items))
    return DataLoader(data, batch, sampler=stream_sampler(data, 1, 0, shuffle=shuffle, seed=3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        (lambda: dealt(14), lambda: dealt(15), "items=15 in stream 0/0, and 14 in the run that .*resume with items=14"),
        (lambda: dealt(14), lambda: dealt(14, shuffle=False), "shuffle=False.* and True in"),
        (lambda: dealt(14, batch=5), lambda: dealt(14, batch=6), "batch_size=6.* and 5 in"),
        (lambda: DataLoader(Endless(), 4), lambda: DataLoader(Endless(), 4, num_workers=2), "num_workers=2.* and 1 in"),
        (lambda: DataLoader(Endless(), 4), lambda: DataLoader(Endless(), 4, num_workers=1), ""),
        (lambda: dealt(14), lambda: dealt(14), ""),
    ],
    ids=["items", "shuffle", "batch", "workers", "one worker", "the same"],
)
def test_a_run_is_not_resumed_in_another_order_of_as_many_batches(
    before: Callable[[], Any], after: Callable[[], Any], rule: str, tmp_path: Path
) -> None:
    """Positions would stand for other items: some would be read twice in the epoch, and others never."""
    store = MemoryRunStore()
    Stream(before(), StreamSettings(0), store)
    assert keep_stream(store, tmp_path)
    again = MemoryRunStore()
    assert restore_stream(again, tmp_path)
    if not rule:
        Stream(after(), StreamSettings(0), again)
        return
    with pytest.raises(MisuseError, match=rule):
        Stream(after(), StreamSettings(0), again)


def test_states_in_the_folder_outlive_the_store(tmp_path: Path) -> None:
    states = LoaderStates(MemoryRunStore(), "0/0", print, tmp_path)
    for offset in range(0, 100, 10):
        states.put((1, offset), {"at": offset})
    states.flush()
    fresh = LoaderStates(MemoryRunStore(), "0/0", print, tmp_path)
    assert fresh.newest((1, 95)) == (90, {"at": 90}) and fresh.newest((1, 75)) == (70, {"at": 70})
    assert fresh.newest((1, 9)) == (0, {"at": 0}) and fresh.newest((0, 50)) is None and fresh.newest((2, 50)) is None
    (newest,) = (tmp_path / "streams" / "0.0").glob("1_90")
    newest.write_text("no base64")
    assert fresh.newest((1, 95)) == (80, {"at": 80}), "a damaged one is passed over"
    fresh.put((1, 72), {"at": 72})
    fresh.flush()
    assert sorted(p.name for p in (tmp_path / "streams" / "0.0").iterdir()) == ["1_0", "1_60", "1_70", "1_72"]


def test_a_run_is_not_resumed_with_another_accumulation_where_the_epoch_never_ended(tmp_path: Path) -> None:
    """A loader without a length: its streams have agreed on nothing else yet."""

    class Endless:
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    store = MemoryRunStore()
    Stream(Endless(), StreamSettings(0, 2), store)
    assert not keep_stream(store, tmp_path) and keep_accumulation(tmp_path, 2)
    again = MemoryRunStore()
    restore_accumulation(again, tmp_path)
    with pytest.raises(ConfigError, match="accumulate=4: is 2 in the streams that began first, or in the run that is resumed"):
        Stream(Endless(), StreamSettings(0, 4), again)
    assert list(Stream(Endless(), StreamSettings(0, 2), again).take(2)) == [2, 3]


def test_training_goes_on_while_the_folder_of_states_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung file server, which refuses then; the store has the states meanwhile."""
    go, said, store = threading.Event(), list[str](), MemoryRunStore()
    write, hangs = loader_states.write_durably, [True]

    def hung(path: Path, text: str) -> None:
        assert go.wait(60)
        if hangs:
            raise OSError(errno.ESTALE, "stale file handle")
        write(path, text)

    monkeypatch.setattr(loader_states, "write_durably", hung)
    states = LoaderStates(store, "0/0", said.append, tmp_path)
    for offset in range(0, 1000, 10):
        states.put((1, offset), {"at": offset})
    assert LoaderStates(store, "0/0", print).newest((1, 995)) == (990, {"at": 990})
    assert len(states._waiting) <= loader_states.KEPT + 1, "of those that wait the newest"
    go.set()
    states.flush()
    assert len(said) == 1 and "could not be written" in said[0] and "stale file handle" in said[0]
    hangs.clear()
    states.put((1, 1000), {"at": 1000})
    states.flush()
    assert LoaderStates(MemoryRunStore(), "0/0", print, tmp_path).newest((1, 1005)) == (1000, {"at": 1000})
