"""The corpus: bytes of real text, and each replica's own stream of batches from it.

In: `DataConfig` (a file, a folder, or "stdlib"). Out: a `Corpus` (train and validation bytes, size,
SHA-256, order-0 entropy) and `ReplicaStream`, whose batch ids are consecutive: 0, 1, 2 …

Batch (replica, position) is a pure function of (corpus, seed, replicas, batch, seq_len), so a stream
can be restored at any position: that position is the `loader_state` a commit record carries
(FT-HSDP section 4.4). Reading goes through torchdata's StatefulDataLoader.

- "stdlib" is every `*.py` of the running Python's standard library, without `site-packages` and the
  test folders (`test`, `tests`, `idle_test`): about 12 MB.
- A folder is every regular file under it, without hidden ones, `__pycache__` and binaries (a NUL byte
  in the first 8 KiB). Files follow each other in the order of their relative paths; the SHA-256 is
  that of their concatenation.
- Validation files are chosen by a hash of the relative path; a single file is split at its end.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from helixrt.errors import ConfigError, MissingExtra
from helixrt.job.permutation import permutation
from helixrt.train.config import DataConfig

BatchAt = Callable[[int], torch.Tensor]  # position -> int64 tokens [batch, seq_len + 1]

STDLIB = "stdlib"
_STDLIB_SKIPS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_SNIFF_BYTES = 8192


@dataclass(frozen=True)
class Corpus:
    """Text as bytes. `train` and `validation` are uint8 arrays of one dimension."""

    train: np.ndarray = field(repr=False)
    validation: np.ndarray = field(repr=False)
    sha256: str  # of all bytes, in file order
    files: int
    path: str

    @property
    def nbytes(self) -> int:
        return self.train.size + self.validation.size

    @cached_property
    def order0_bits_per_byte(self) -> float:
        """Entropy of the byte distribution of the whole corpus: what knowing frequencies alone reaches."""
        counts = np.bincount(self.train, minlength=256) + np.bincount(self.validation, minlength=256)
        p = counts[counts > 0] / self.nbytes
        return float(-(p * np.log2(p)).sum())


def load_corpus(config: DataConfig) -> Corpus:
    """Read the corpus into memory. Raises ConfigError (data.path) when it is missing, unreadable or empty."""
    root, names = _files(config.path)
    texts = [_read(root / name, config.path) for name in names]
    if config.path != STDLIB and not root.is_file():
        names, texts = _drop_binaries(names, texts)
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text)
    if not any(texts):
        raise ConfigError("data.path", config.path, "holds no text to train on")
    if len(texts) == 1:
        whole = np.frombuffer(texts[0], dtype=np.uint8)
        cut = len(whole) - max(1, round(len(whole) * config.validation))
        train, validation = whole[:cut], whole[cut:]
    else:
        held_out = _held_out(names, config.validation)
        train = _join(text for name, text in zip(names, texts, strict=True) if name not in held_out)
        validation = _join(text for name, text in zip(names, texts, strict=True) if name in held_out)
    return Corpus(train, validation, digest.hexdigest(), len(texts), config.path)


def _files(path: str) -> tuple[Path, list[str]]:
    """The folder (or single file) and the relative paths to read under it, sorted."""
    root = Path(sysconfig.get_path("stdlib") if path == STDLIB else path)
    if root.is_file():
        return root, [""]
    if not root.is_dir():
        raise ConfigError("data.path", path, "no such file or folder")
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        if path == STDLIB:
            subfolders[:] = [s for s in subfolders if s not in _STDLIB_SKIPS]
            files = [f for f in files if f.endswith(".py")]
        else:
            subfolders[:] = [s for s in subfolders if not s.startswith(".") and s != "__pycache__"]
            files = [f for f in files if not f.startswith(".") and os.path.isfile(os.path.join(folder, f))]
        names += [Path(folder, f).relative_to(root).as_posix() for f in files]
    return root, sorted(names)


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError("data.path", setting, f"cannot read {path}: {error.strerror or error}") from error


def _drop_binaries(names: list[str], texts: list[bytes]) -> tuple[list[str], list[bytes]]:
    kept = [(name, text) for name, text in zip(names, texts, strict=True) if b"\0" not in text[:_SNIFF_BYTES]]
    return [name for name, _ in kept], [text for _, text in kept]


def _held_out(names: list[str], fraction: float) -> set[str]:
    """The validation files: those whose hash falls below the fraction; at least one, never all."""
    place = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64 for name in names}
    ranked = sorted(names, key=lambda name: place[name])
    chosen = sum(1 for name in names if place[name] < fraction)
    return set(ranked[: min(max(chosen, 1), len(names) - 1)])


def _join(texts: Iterator[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), dtype=np.uint8)


class _Batches:
    """Iterator over one replica's batches from a position on; its state is that position."""

    def __init__(self, stream: ReplicaStream, position: int) -> None:
        self._stream, self.position = stream, position

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> torch.Tensor:
        batch = self._stream.windows_of(self.position)
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class _Dataset(IterableDataset[torch.Tensor]):
    def __init__(self, stream: ReplicaStream, start: int = 0) -> None:
        self._stream, self._start = stream, start

    def __iter__(self) -> Iterator[torch.Tensor]:
        return _Batches(self._stream, self._start)


class ReplicaStream:
    """Replica `replica`'s batches, or those of a dp_shard rank: stream number `replica` of `replicas`. One thread at a time.

    In an epoch the training windows (`seq_len` inputs and the byte after them, not overlapping in
    their targets) are permuted by (seed, epoch) and dealt to the streams, so that no two streams have
    the same window within an epoch. What does not fill a batch for every stream is left out of it.
    """

    def __init__(self, corpus: Corpus, replica: int, replicas: int, batch: int, seq_len: int, seed: int) -> None:
        check_size(corpus, replicas, batch, seq_len)
        self._corpus, self._replica, self._replicas = corpus, replica, replicas
        self._batch, self._seq_len, self._seed = batch, seq_len, seed
        self._windows = (corpus.train.size - 1) // seq_len
        self.batches_per_epoch = self._windows // (replicas * batch)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)
        self._loader = self._loader_from(0)
        self._iterator = iter(self._loader)
        self._next = 0
        self._last: tuple[int, torch.Tensor] | None = None

    def batch_at(self, position: int) -> torch.Tensor:
        """Batch number `position` of this stream: int64 [batch, seq_len + 1].

        Consecutive positions are read one after the other; the last one may be asked again (a retried
        step); any other moves the loader there first.
        """
        if self._last is not None and self._last[0] == position:
            return self._last[1]
        if position != self._next:
            self.load_state_dict(self._state_at(position))
            self._next = position
        batch = next(self._iterator)
        self._next += 1
        self._last = (position, batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's state: what comes next."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self._loader.load_state_dict(state)
        self._iterator = iter(self._loader)
        self._last = None

    def validation_batch(self, i: int) -> torch.Tensor:
        """Fixed batch `i` of validation windows, the same on every replica: int64 [batch, seq_len + 1]."""
        windows = (self._corpus.validation.size - 1) // self._seq_len
        order = permutation(windows, 0)
        ids = order[np.arange(i * self._batch, (i + 1) * self._batch) % windows]
        return _cut(self._corpus.validation, ids, self._seq_len)

    def windows_of(self, position: int) -> torch.Tensor:
        """The batch at `position` straight from the corpus, past the loader."""
        epoch, place = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self._windows, self._seed, epoch)
        first = (place * self._replicas + self._replica) * self._batch
        return _cut(self._corpus.train, self._order[first : first + self._batch], self._seq_len)

    def _state_at(self, position: int) -> dict[str, Any]:
        """A loader's state at `position`, taken from a loader that starts there: its format stays torchdata's."""
        loader = self._loader_from(position)
        iter(loader)
        return loader.state_dict()

    def _loader_from(self, start: int) -> Any:
        with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates
            warnings.simplefilter("ignore", UserWarning)
            try:
                from torchdata.stateful_dataloader import StatefulDataLoader
            except ImportError as error:
                raise MissingExtra("torchdata", "ft", "reading the training data") from error

            # Its own generator: a loader otherwise draws from the global one, which dropout shares.
            return StatefulDataLoader(_Dataset(self, start), batch_size=None, num_workers=0, generator=torch.Generator())


class EpochLoader:
    """Batches by position as a loader of epochs, for `session.steps`: it has a length, `set_epoch` and a state.
    `content_digest` names what is read, so that a run is not resumed on other data."""

    def __init__(self, batch_at: BatchAt, batches: int, content_digest: str = "") -> None:
        self._batch_at, self._batches, self.content_digest = batch_at, batches, content_digest
        self._epoch = self._first = self._next = 0  # batches of the epoch: where the next iteration begins, what it gives next

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """The next iteration gives the batches of this epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._next, self._first = self._first, 0
        return self._read(self._epoch * self._batches)

    def _read(self, start: int) -> Iterator[torch.Tensor]:
        while self._next < self._batches:
            self._next += 1
            yield self._batch_at(start + self._next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins where the state was taken."""
        self._first = state["next"]


def check_size(corpus: Corpus, replicas: int, batch: int, seq_len: int) -> None:
    """Raise ConfigError unless there is at least one batch per replica, and one validation window."""
    needed = replicas * batch * seq_len + 1
    if corpus.train.size < needed:
        rule = f"has {corpus.train.size} bytes to train on; one batch for every replica needs {needed}"
        raise ConfigError("data.path", corpus.path, rule)
    if corpus.validation.size < seq_len + 1:
        rule = f"has {corpus.validation.size} bytes for validation; data.seq_len={seq_len} needs {seq_len + 1}"
        raise ConfigError("data.path", corpus.path, rule)


def _cut(text: np.ndarray, windows: np.ndarray, seq_len: int) -> torch.Tensor:
    index = windows[:, None] * seq_len + np.arange(seq_len + 1)[None, :]
    return torch.from_numpy(text[index].astype(np.int64))
