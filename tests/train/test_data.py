"""The corpus, and its loader as streams read it (`tests/job/test_stream.py` has what holds for every loader)."""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from helixrt.bench._two_sides import text_batches
from helixrt.errors import ConfigError
from helixrt.job.permutation import permutation
from helixrt.job.session import Session
from helixrt.job.session_host import SessionSettings
from helixrt.job.stream import Stream
from helixrt.replica.store import MemoryRunStore
from helixrt.train.config import DataConfig
from helixrt.train.data import Windows, load_corpus, text_loader, training_windows, validation_batch
from tests.job.session_world import LocalHost


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(7)
    for i in range(40):
        text = "".join(rng.choice("abcdefgh \n") for _ in range(rng.randint(100, 900)))
        (tmp_path / f"f{i % 4}").mkdir(exist_ok=True)
        (tmp_path / f"f{i % 4}" / f"{i}.txt").write_text(text)
    (tmp_path / ".hidden").write_text("hidden" * 100)
    (tmp_path / "binary").write_bytes(b"\0\1\2" * 100)
    return tmp_path


SEED, SEQ, BATCH = 5, 16, 3


@dataclass
class Reader:
    """Stream `stream` of `streams`, as a session reads it."""

    folder: Path
    stream: int = 0
    streams: int = 2
    seed: int = SEED

    def __post_init__(self) -> None:
        data = DataConfig(path=str(self.folder), batch=BATCH, seq_len=SEQ)
        windows = training_windows(load_corpus(data), data, self.streams)
        settings = SessionSettings(self.stream, replicas=self.streams, seed=self.seed)
        self.loader = text_loader(windows, Session(settings, LocalHost()).sampler(windows, shuffle=True), BATCH)
        self.source = Stream(self.loader, settings.stream(1), MemoryRunStore())
        self.per_epoch = self.source.usable or 0

    def batch_at(self, position: int) -> torch.Tensor:
        (batch,) = self.source.take(position)
        return cast(torch.Tensor, batch)


def batch_of(text: np.ndarray, position: int, data: DataConfig, seed: int, streams: int = 1, stream: int = 0) -> torch.Tensor:
    """The batch at this position of a stream of a run that was not resumed with another number of them."""
    windows = (len(text) - 1) // data.seq_len
    epoch, place = divmod(position, windows // streams // data.batch)
    order = permutation(windows, seed, epoch)
    ids = [order[stream + streams * (place * data.batch + row)] for row in range(data.batch)]
    return torch.tensor(np.array([text[i * data.seq_len : (i + 1) * data.seq_len + 1] for i in ids], dtype=np.int64))


def test_folder_is_read_whole_in_path_order_without_hidden_and_binary_files(folder: Path) -> None:
    corpus = load_corpus(DataConfig(path=str(folder)))
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.txt"))
    whole = b"".join((folder / n).read_bytes() for n in names)
    assert (corpus.nbytes, corpus.files) == (len(whole), 40)
    assert corpus.sha256 == hashlib.sha256(whole).hexdigest()
    assert 0 < corpus.validation.size < corpus.train.size
    assert 3.0 < corpus.order0_bits_per_byte < 3.33  # ten symbols, nearly uniform: log2(10) = 3.32


def test_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    text = bytes(range(200)) * 10
    (tmp_path / "one").write_bytes(text)
    corpus = load_corpus(DataConfig(path=str(tmp_path / "one"), validation=0.1))
    assert corpus.train.tobytes() + corpus.validation.tobytes() == text
    assert corpus.validation.size == 200


def test_standard_library_is_text_of_some_size_and_always_the_same() -> None:
    one, two = load_corpus(DataConfig()), load_corpus(DataConfig())
    assert one.sha256 == two.sha256 and (one.train == two.train).all()
    assert one.nbytes > 3_000_000 and one.files > 200
    assert 4.0 < one.order0_bits_per_byte < 5.5
    assert 0.005 < one.validation.size / one.nbytes < 0.2


def test_a_batch_is_a_function_of_seed_stream_and_position(folder: Path) -> None:
    data = DataConfig(path=str(folder), batch=BATCH, seq_len=SEQ)
    text = load_corpus(data).train
    for streams, stream in ((1, 0), (2, 1), (3, 2)):
        reader = Reader(folder, stream, streams)
        source = text_batches(data, stream, streams, SEED)
        for k, without_session in zip(range(2 * reader.per_epoch + 2), source, strict=False):
            expected = batch_of(text, k, data, SEED, streams, stream)
            found = reader.batch_at(k)
            assert found.shape == (BATCH, SEQ + 1) and found.dtype == torch.int64
            assert torch.equal(found, expected) and torch.equal(without_session, expected)


def test_a_state_of_the_loader_restores_another(folder: Path) -> None:
    one, two = Reader(folder).loader, Reader(folder).loader
    read = iter(one)
    for _ in range(5):
        next(read)
    two.load_state_dict(one.state_dict())
    assert torch.equal(next(iter(two)), next(read))


def test_other_seeds_give_other_batches(folder: Path) -> None:
    assert not torch.equal(Reader(folder).batch_at(0), Reader(folder, seed=6).batch_at(0))


def test_validation_takes_each_window_before_one_comes_again(folder: Path) -> None:
    data = DataConfig(path=str(folder), batch=BATCH, seq_len=SEQ)
    corpus = load_corpus(data)
    windows = Windows(corpus.validation, SEQ)
    batches = [validation_batch(corpus, data, i) for i in range(len(windows))]
    rows = [row.numpy().tobytes() for batch in batches for row in batch]
    expected = sorted(windows[i].numpy().tobytes() for i in range(len(windows)))
    assert sorted(rows[: len(windows)]) == expected and rows[len(windows) :] == 2 * rows[: len(windows)]
    assert torch.equal(validation_batch(corpus, data, 2), batches[2])


def test_permutation_is_one_and_pinned() -> None:
    assert sorted(permutation(1000, 3, 4)) == list(range(1000))
    assert permutation(8, 0, 0).tolist() == PINNED


PINNED = [4, 2, 0, 7, 5, 6, 1, 3]  # streams of resumed runs depend on it


@pytest.mark.parametrize("make", ["missing", "empty_folder", "empty_file", "only_hidden"])
def test_nothing_to_read_is_a_wrong_setting(tmp_path: Path, make: str) -> None:
    path = tmp_path / "corpus"
    if make == "empty_file":
        path.touch()
    elif make != "missing":
        path.mkdir()
        if make == "only_hidden":
            (path / ".secret").write_text("x" * 1000)
    with pytest.raises(ConfigError, match=r"^data\.path="):
        load_corpus(DataConfig(path=str(path)))


def test_too_little_text_says_how_much_is_needed(folder: Path) -> None:
    data = DataConfig(path=str(folder), batch=500, seq_len=1024)
    with pytest.raises(ConfigError, match=r"data\.path=.* needs 1024001"):
        training_windows(load_corpus(data), data, streams=2)
