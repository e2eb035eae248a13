"""The corpus and the replicas' streams: deterministic, disjoint, restorable at any position."""

import hashlib
import random
from pathlib import Path

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from helixrt.errors import ConfigError
from helixrt.job.permutation import permutation
from helixrt.train.config import DataConfig
from helixrt.train.data import ReplicaStream, load_corpus


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


def stream(folder: Path, replica: int = 0, **changes: int) -> ReplicaStream:
    settings = {"replicas": 2, "batch": 3, "seq_len": 16, "seed": 5, **changes}
    return ReplicaStream(load_corpus(DataConfig(path=str(folder))), replica, **settings)


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


def test_sequential_reading_equals_restoring_at_any_position(folder: Path, seed: int) -> None:
    reader = stream(folder)
    positions = 3 * reader.batches_per_epoch
    batches = [reader.batch_at(k) for k in range(positions)]
    assert all(b.shape == (3, 17) and b.dtype == torch.int64 for b in batches)
    rng = random.Random(seed)
    jumper = stream(folder)
    for k in [rng.randrange(positions) for _ in range(50)]:
        assert torch.equal(jumper.batch_at(k), batches[k])
        assert torch.equal(jumper.batch_at(k), batches[k]), "a position asked again"
        if k + 1 < positions:
            assert torch.equal(jumper.batch_at(k + 1), batches[k + 1]), "and the one after it"


def test_state_dict_restores_another_stream(folder: Path) -> None:
    one, two = stream(folder), stream(folder)
    for k in range(5):
        one.batch_at(k)
    two.load_state_dict(one.state_dict())
    assert torch.equal(next(two._iterator), one.batch_at(5))


def test_reading_goes_through_the_stateful_loader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[dict] = []
    load = StatefulDataLoader.load_state_dict
    monkeypatch.setattr(StatefulDataLoader, "load_state_dict", lambda self, s: (loaded.append(s), load(self, s))[1])
    reader = stream(folder)
    for k in (0, 1, 2, 9, 10):
        reader.batch_at(k)
    assert len(loaded) == 1, "only the jump to 9 moves the loader"
    assert isinstance(reader._loader, StatefulDataLoader)


def test_reading_leaves_the_global_random_state_alone(folder: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    stream(folder).batch_at(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_replicas_share_no_window_within_an_epoch_and_epochs_differ(folder: Path) -> None:
    streams = [stream(folder, r, replicas=3) for r in range(3)]
    n = streams[0].batches_per_epoch
    firsts = [[s._order[(k * 3 + r) * 3 : (k * 3 + r) * 3 + 3] for k in range(n) if s.windows_of(k) is not None]
              for r, s in enumerate(streams)]  # fmt: skip
    ids = [int(w) for replica in firsts for batch in replica for w in batch]
    assert len(ids) == len(set(ids)) == 9 * n
    assert not torch.equal(streams[0].batch_at(0), streams[0].batch_at(n))


def test_other_seeds_give_other_batches_and_validation_is_the_same_for_all(folder: Path) -> None:
    assert not torch.equal(stream(folder).batch_at(0), stream(folder, seed=6).batch_at(0))
    assert torch.equal(stream(folder, 0).validation_batch(2), stream(folder, 1, seed=9).validation_batch(2))


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
    with pytest.raises(ConfigError, match=r"data\.path=.* needs 1024001"):
        stream(folder, batch=500, seq_len=1024)
