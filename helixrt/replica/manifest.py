"""The manifest: the layout of a replicated state, without its values.

In: the shards of a state's tensors and the names of its scalars. Out: a hash that equal ranks of all replicas compare, JSON
with checked sizes, and the first entry in which two manifests differ. A layout that a peer sent is checked here before
anything is allocated for it. No torch: a dtype is its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from helixrt.errors import Retryable
from helixrt.replica.contracts import Shard

LAYOUT_LIMIT_BYTES = 64 << 20  # of a layout as JSON: about half a million tensors
SCALARS_LIMIT_BYTES = 64 << 20  # of a state's scalars as JSON
_MAX_NAME, _MAX_DIMS, _MAX_BYTES = 4096, 64, 1 << 60

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "float32": 4,
    "complex32": 4, "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """Names, shapes and dtypes of tensors, in the state's order, and the names of scalars, sorted."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    scalars: tuple[str, ...] = ()

    @staticmethod
    def of(layout: Iterable[Shard], scalars: Iterable[str] = ()) -> Manifest:
        return Manifest(tuple((s.name, tuple(s.shape), s.dtype) for s in layout), tuple(sorted(scalars)))

    @cached_property
    def tensors_hash(self) -> str:
        """Of the tensors alone: known before a state's scalars were fetched."""
        return _digest([[name, list(shape), dtype] for name, shape, dtype in self.tensors])

    @cached_property
    def hash(self) -> str:
        """`tensors_hash`, a dash, and the hash of the scalars' names."""
        return f"{self.tensors_hash}-{_digest(list(self.scalars))}"

    @property
    def layout(self) -> tuple[Shard, ...]:
        """The tensors as shards. Raises ValueError for a dtype without a known size."""
        return tuple(Shard(name, shape, dtype, _nbytes(shape, dtype)) for name, shape, dtype in self.tensors)

    def to_json(self) -> str:
        tensors = [[name, list(shape), dtype] for name, shape, dtype in self.tensors]
        return json.dumps({"tensors": tensors, "scalars": list(self.scalars)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str, limit_bytes: int = LAYOUT_LIMIT_BYTES) -> Manifest:
        """Raises ValueError for anything but what `to_json` gives, and for more than `limit_bytes` of text."""
        raw = _parse(text, limit_bytes)
        if not isinstance(raw, dict) or raw.keys() != {"tensors", "scalars"} or not isinstance(raw["tensors"], list):
            raise ValueError("a manifest is an object with tensors and scalars")
        if not isinstance(raw["scalars"], list) or not all(isinstance(name, str) for name in raw["scalars"]):
            raise ValueError("the scalars of a manifest are names")
        for entry in raw["tensors"]:
            if not isinstance(entry, list) or len(entry) != 3:
                raise ValueError("a tensor of a manifest is a name, a shape and a dtype")
            _check(*entry)
        _unique([entry[0] for entry in raw["tensors"]])
        _unique(raw["scalars"])
        return Manifest(tuple((name, tuple(shape), dtype) for name, shape, dtype in raw["tensors"]), tuple(raw["scalars"]))

    def difference(self, other: Manifest) -> str:
        """The first entry in which `other` differs, in words; empty if there is none."""
        mine = {name: (shape, dtype) for name, shape, dtype in self.tensors}
        theirs = {name: (shape, dtype) for name, shape, dtype in other.tensors}
        for name, (shape, dtype) in mine.items():
            if name not in theirs:
                return f"{name} is missing"
            if theirs[name] != (shape, dtype):
                return f"{name} is {_words(*theirs[name])}, not {_words(shape, dtype)}"
        for name in theirs:
            if name not in mine:
                return f"{name} is one too many"
        if self.tensors != other.tensors:
            place = next(i for i, (a, b) in enumerate(zip(self.tensors, other.tensors, strict=True)) if a != b)
            return f"tensor {place} is {other.tensors[place][0]}, not {self.tensors[place][0]}"
        for name in self.scalars:
            if name not in other.scalars:
                return f"the scalar {name} is missing"
        for name in other.scalars:
            if name not in self.scalars:
                return f"the scalar {name} is one too many"
        return ""


def layout_to_json(layout: Sequence[Shard]) -> str:
    return json.dumps([[s.name, list(s.shape), s.dtype] for s in layout], separators=(",", ":"))


def layout_from_json(text: str | bytes, limit_bytes: int = LAYOUT_LIMIT_BYTES) -> tuple[Shard, ...]:
    """Shards that a peer offers. Sizes follow from shapes and dtypes. Raises ValueError for a text that is none or too long."""
    raw = _parse(text, limit_bytes)
    if not isinstance(raw, list):
        raise ValueError("a layout is a list of tensors")
    shards: list[Shard] = []
    for entry in raw:
        if not isinstance(entry, list) or len(entry) != 3:
            raise ValueError("a tensor of a layout is a name, a shape and a dtype")
        name, shape, dtype = entry
        _check(name, shape, dtype)
        shards.append(Shard(name, tuple(shape), dtype, _nbytes(shape, dtype)))
    _unique([shard.name for shard in shards])
    return tuple(shards)


def check_size(layout: Sequence[Shard], limit_bytes: int) -> None:
    """Raises Retryable if what a donor offers would need more than `limit_bytes` of memory."""
    total = sum(shard.nbytes for shard in layout)
    if total > limit_bytes:
        raise Retryable(f"the offered state has {total} bytes; at most {limit_bytes} are accepted")


def _parse(text: str | bytes, limit_bytes: int) -> Any:
    if len(text) > limit_bytes:
        raise ValueError(f"a layout of {len(text)} bytes; at most {limit_bytes} are accepted")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("a layout that is nested too deeply") from error


def _check(name: object, shape: object, dtype: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise ValueError("a tensor's name is a text of at most 4096 characters")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has the unknown dtype {str(dtype)[:40]!r}")
    sizes = isinstance(shape, list) and len(shape) <= _MAX_DIMS and all(type(n) is int and 0 <= n < _MAX_BYTES for n in shape)
    if not sizes or _nbytes(shape, dtype) > _MAX_BYTES:  # type: ignore[arg-type]
        raise ValueError(f"{name} has a shape that no tensor has")


def _unique(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError(f"{next(n for i, n in enumerate(names) if n in names[:i])!r} occurs twice")


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"the size of {dtype} is not known")
    return prod(shape) * ITEM_BYTES[dtype]


def _words(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}{list(shape)}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:32]
