"""The manifest: equal hashes for equal layouts only, the first difference in words, and texts of peers that are none."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helixrt.errors import Retryable
from helixrt.replica.contracts import layout_of
from helixrt.replica.manifest import ITEM_BYTES, Manifest, check_size, layout_from_json, layout_to_json

TENSORS = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.int64), "c": torch.zeros(0, dtype=torch.bfloat16)}


def manifest(scalars: tuple[str, ...] = ("x", "y"), **changed: torch.Tensor | None) -> Manifest:
    tensors = {name: tensor for name, tensor in {**TENSORS, **changed}.items() if tensor is not None}
    return Manifest.of(layout_of(tensors), scalars)


def test_the_hash_covers_names_shapes_dtypes_order_and_the_names_of_scalars() -> None:
    reordered = Manifest.of(layout_of({name: TENSORS[name] for name in ("b", "a", "c")}), ("x", "y"))
    different = [
        manifest(),
        manifest(a=torch.zeros(3, 2)),
        manifest(a=torch.zeros(2, 3).half()),
        manifest(b=None),
        manifest(d=torch.zeros(1)),
        manifest(("x",)),
        manifest(("x", "z")),
        reordered,
    ]
    assert len({each.hash for each in different}) == len(different)
    assert manifest(("y", "x")).hash == manifest().hash == manifest(a=torch.ones(2, 3)).hash
    assert manifest(("x",)).tensors_hash == manifest().tensors_hash, "known before the scalars are"
    assert manifest().hash.startswith(manifest().tensors_hash)
    assert [manifest().difference(each) for each in different] == [
        "",
        "a is float32[3, 2], not float32[2, 3]",
        "a is float16[2, 3], not float32[2, 3]",
        "b is missing",
        "d is one too many",
        "the scalar y is missing",
        "the scalar y is missing",
        "tensor 0 is b, not a",
    ]
    assert manifest(("x",)).difference(manifest()) == "the scalar y is one too many"


def test_a_manifest_and_a_layout_travel_as_json() -> None:
    assert Manifest.from_json(manifest().to_json()) == manifest()
    assert Manifest.from_json(manifest().to_json()).layout == layout_of(TENSORS)
    assert layout_from_json(layout_to_json(layout_of(TENSORS))) == layout_of(TENSORS)


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_sizes_are_those_of_torch(dtype: str) -> None:
    assert getattr(torch, dtype).itemsize == ITEM_BYTES[dtype]


def test_sizes_are_limited() -> None:
    text = manifest().to_json()
    with pytest.raises(ValueError, match="at most 10 are accepted"):
        Manifest.from_json(text, limit_bytes=10)
    with pytest.raises(ValueError, match="at most 10 are accepted"):
        layout_from_json(layout_to_json(layout_of(TENSORS)), limit_bytes=10)
    check_size(layout_of(TENSORS), 32)
    with pytest.raises(Retryable, match="has 32 bytes; at most 31"):
        check_size(layout_of(TENSORS), 31)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["float32", "tensors"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["tensors", "scalars"]), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_any_text_is_a_layout_or_a_value_error(value: object) -> None:
    for parse in (Manifest.from_json, layout_from_json):
        try:
            parse(json.dumps(value))
        except ValueError:
            pass
