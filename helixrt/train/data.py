"""The corpus: bytes of real text, its windows as a data set, and a loader of them.

In: `DataConfig` (a file, a folder, or "stdlib"). Out: a `Corpus` (train and validation bytes, size, SHA-256, order-0 entropy),
`Windows`, and torchdata's StatefulDataLoader over them. The order is that of the sampler that is given (`session.sampler`).

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from helixrt.errors import ConfigError, MissingExtra
from helixrt.job.permutation import permutation
from helixrt.train.config import DataConfig

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


class Windows(Dataset[torch.Tensor]):
    """A text in windows: `seq_len` inputs and the byte after them, which do not overlap in their targets. Item `i`: int64
    [seq_len + 1]. `content_digest` names what is read, so that a run is not resumed on other data."""

    def __init__(self, text: np.ndarray, seq_len: int, content_digest: str = "") -> None:
        self._text, self._seq_len, self.content_digest = text, seq_len, content_digest

    def __len__(self) -> int:
        return (self._text.size - 1) // self._seq_len

    def __getitem__(self, item: int) -> torch.Tensor:
        return self.batch([item])[0]

    def batch(self, items: Sequence[int] | np.ndarray) -> torch.Tensor:
        """These windows: int64 [len(items), seq_len + 1]."""
        index = np.asarray(items)[:, None] * self._seq_len + np.arange(self._seq_len + 1)[None, :]
        return torch.from_numpy(self._text[index].astype(np.int64))

    __getitems__ = batch  # how a loader asks for a whole batch


def training_windows(corpus: Corpus, data: DataConfig, streams: int) -> Windows:
    """What is trained on. Raises ConfigError (data.path) for a corpus without a batch for every stream."""
    check_size(corpus, streams, data.batch, data.seq_len)
    return Windows(corpus.train, data.seq_len, f"windows of {data.seq_len} bytes of text of SHA-256 {corpus.sha256[:16]}")


def validation_batch(corpus: Corpus, data: DataConfig, i: int) -> torch.Tensor:
    """Fixed batch `i` of validation windows, the same on every replica: int64 [batch, seq_len + 1]."""
    windows = Windows(corpus.validation, data.seq_len)
    order = permutation(len(windows), 0)
    return windows.batch(order[np.arange(i * data.batch, (i + 1) * data.batch) % len(windows)])


def text_loader(windows: Windows, sampler: Sampler[int], batch: int) -> Any:
    """A StatefulDataLoader of batches, int64 [batch, seq_len + 1], in the sampler's order. Raises MissingExtra (torchdata)."""
    with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates
        warnings.simplefilter("ignore", UserWarning)
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader
        except ImportError as error:
            raise MissingExtra("torchdata", "ft", "reading the training data") from error

        # Its own generator: a loader otherwise draws from the global one, which dropout shares.
        return StatefulDataLoader(
            windows, batch, sampler=sampler, drop_last=True, collate_fn=_as_it_is, generator=torch.Generator()
        )


def _as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch


def check_size(corpus: Corpus, streams: int, batch: int, seq_len: int) -> None:
    """Raise ConfigError unless there is at least one batch per stream, and one validation window."""
    needed = streams * batch * seq_len + 1
    if corpus.train.size < needed:
        rule = f"has {corpus.train.size} bytes to train on; one batch for every stream needs {needed}"
        raise ConfigError("data.path", corpus.path, rule)
    if corpus.validation.size < seq_len + 1:
        rule = f"has {corpus.validation.size} bytes for validation; data.seq_len={seq_len} needs {seq_len + 1}"
        raise ConfigError("data.path", corpus.path, rule)
