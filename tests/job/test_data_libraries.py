"""Data sets of webdataset, litdata and mosaicml-streaming: each item once, over kills, a resume, and under torchrun."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from helixrt.errors import ConfigError
from helixrt.job.loader_checks import check_reproducible, set_epoch
from helixrt.job.shared_data import ShardSplitter, over_streams
from tests import programs
from tests.examples.test_existing_loop import run_under_torchrun

SCRIPT = Path(__file__).with_name("data_libraries_script.py")
PACKAGES = Path(sys.prefix) / "data-libraries"  # `make test-system` installs them
LIBRARIES = ("webdataset", "litdata", "streaming")
ITEMS, BATCH = 96, 4


# ---------------------------------------------------------------- the parts


def test_shards_go_to_all_streams_each_once_and_each_epoch_has_another_order() -> None:
    splitters = [ShardSplitter(3, stream, shuffle=True, seed=5) for stream in range(3)]
    files = [{"url": str(number)} for number in range(12)]
    epochs = []
    for epoch in range(3):
        for each in splitters:
            each.set_epoch(epoch)
        parts = [[file["url"] for file in each(iter(files))] for each in splitters]
        assert parts == [[file["url"] for file in each(files)] for each in splitters], "the same when it is read again"
        assert sorted(sum(parts, []), key=int) == [str(number) for number in range(12)]
        epochs.append(parts)
    assert epochs[0] != epochs[1] != epochs[2]
    in_order = [list(ShardSplitter(3, stream, shuffle=False, seed=5)(range(6))) for stream in range(3)]
    assert in_order == [[0, 3], [1, 4], [2, 5]]


def test_items_are_shuffled_anew_in_each_epoch_and_alike_after_a_restart() -> None:
    def drawn(epoch: int, stream: int = 0) -> list[int]:
        splitter = ShardSplitter(2, stream, shuffle=True, seed=5)
        splitter.set_epoch(epoch)
        return [splitter.random.randint(0, 999) for _ in range(4)]

    assert drawn(1) == drawn(1) != drawn(2) != drawn(2, 1)


@pytest.mark.parametrize("files", [0, 7])
def test_files_that_do_not_fill_all_streams_are_refused(files: int) -> None:
    with pytest.raises(ConfigError, match=f"shards={files} files: there are 2 streams; each needs as many files"):
        ShardSplitter(2, 0, shuffle=True, seed=0)(range(files))


class Pipeline(IterableDataset[Any]):
    """As webdataset's: its stages are in a list."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)

    def __iter__(self) -> Any:
        return iter(())


def test_the_epoch_reaches_a_splitter_in_a_pipeline() -> None:
    splitter = ShardSplitter(2, 0, shuffle=True, seed=0)
    set_epoch(DataLoader(Pipeline(splitter)), 3)
    assert splitter.epoch == 3
    set_epoch(Pipeline(DataLoader(Pipeline(splitter))), 4)
    assert splitter.epoch == 4
    with pytest.raises(ConfigError, match="persistent_workers=True: its workers keep a copy"):
        check_reproducible(DataLoader(Pipeline(splitter), num_workers=1, persistent_workers=True))


def test_other_data_sets_are_refused() -> None:
    for data in ([1, 2], SimpleNamespace(distributed_env=1)):
        with pytest.raises(ConfigError, match="is no StreamingDataset of litdata or mosaicml-streaming"):
            over_streams(data, 2, 0)


# ---------------------------------------------------------------- the libraries


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with them. torchvision, which mosaicml-streaming imports for data sets of images, has no build for a processor
    alone on PyPI: its names stand in for it."""
    if not (PACKAGES / ".installed").exists():
        missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        missing(f"no data libraries in {PACKAGES} -> make test-system installs them")
    stub = tmp_path_factory.mktemp("stub") / "torchvision"
    (stub / "transforms").mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "transforms" / "__init__.py").touch()
    (stub / "datasets.py").write_text("VisionDataset = CIFAR10 = object\n")
    (stub / "transforms" / "functional.py").write_text("to_tensor = None\n")
    return os.pathsep.join((str(PACKAGES), str(stub.parent), str(Path.cwd())))


Trained = Callable[..., list[list[int]]]


@pytest.fixture
def trained(packages: str, tmp_path: Path) -> Trained:
    """The ids that each replica has trained on, in their order. All runs of a test have the same data."""

    def run(name: str, library: str, replicas: int, *options: object) -> list[list[int]]:
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            if (tmp_path / "data").exists():
                (folder / "data").symlink_to(tmp_path / "data")
        programs.succeeded(SCRIPT, folder, library, str(replicas), *map(str, options), PYTHONPATH=packages, timeout=200)
        if not (tmp_path / "data").exists():
            (folder / "data").rename(tmp_path / "data")
            (folder / "data").symlink_to(tmp_path / "data")
        return ids_in(folder, replicas)

    return run


def ids_in(folder: Path, replicas: int) -> list[list[int]]:
    """A step that was computed again counts once: its first line was superseded."""
    found = []
    for replica in range(replicas):
        lines = [line.split() for line in (folder / f"ids.{replica}").read_text().splitlines()]
        steps = {int(step): [int(each) for each in ids] for step, *ids in lines}
        found.append([each for _, ids in sorted(steps.items()) for each in ids])
    return found


def left_out(found: list[int], usual: list[int]) -> int:
    """How many batches of the usual order are missing in what was noted: a replica may be killed between the commit of a step
    and its note. Fails for a batch that is not in the rest of that order."""
    batches = [[tuple(ids[at : at + BATCH]) for at in range(0, len(ids), BATCH)] for ids in (found, usual)]
    places, at = [], 0
    for batch in batches[0]:
        at = batches[1].index(batch, at) + 1
        places.append(at)
    return at - len(places)


@pytest.mark.system
@pytest.mark.timeout(500)
@pytest.mark.parametrize("library", LIBRARIES)
def test_each_item_is_trained_on_once_over_kills_and_a_resume(library: str, trained: Trained) -> None:
    usual = trained("usual", library, 3, 24, "workers")
    assert Counter(sum(usual, [])) == dict.fromkeys(range(ITEMS), 3), "three epochs"
    killed = trained("killed", library, 3, 16, "kill", "workers")
    resumed = trained("killed", library, 3, 24, "resume", "workers")
    for of_usual, of_killed, of_resumed in zip(usual, killed, resumed, strict=True):
        assert left_out(of_killed, of_usual) <= 1 and left_out(of_resumed, of_usual) <= 1
    assert [len(each) for each in (killed[0], resumed[0])] == [16 * BATCH, 24 * BATCH] and len(killed[1]) < 16 * BATCH


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", LIBRARIES)
def test_each_item_is_trained_on_once_under_torchrun(library: str, trained: Trained, packages: str, tmp_path: Path) -> None:
    usual = trained("usual", library, 2, 24)
    assert Counter(sum(usual, [])) == dict.fromkeys(range(ITEMS), 2), "two epochs"
    served = tmp_path / "served"
    served.mkdir()
    (served / "data").symlink_to(tmp_path / "data")
    options = ("--checkpoint-every", "5")
    run_under_torchrun(served, SCRIPT, served, library, "2", "24", options=options, more={"PYTHONPATH": packages})
    assert ids_in(served, 2) == usual
