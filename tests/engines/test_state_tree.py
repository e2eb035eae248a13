"""Nested state as names and back: any structure of tensors and JSON scalars, in any order of its names."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helixrt.engines.random_state import micro_batch_seed, set_random_state
from helixrt.engines.state_tree import Tree, flatten, placed
from helixrt.errors import Fatal, MisuseError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text(max_size=6) | st.integers() | st.sampled_from(["a/b", "#5", "[2]", "(0)", "{}", "[]", "%2F", "", ".", "params"])
NESTED = st.recursive(
    SCALARS | st.integers(0, 5).map(lambda n: torch.arange(n)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """Comparable: tensors as their numbers, types kept."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(item) for item in value])
    return (type(value).__name__, value)


@given(NESTED, st.randoms())
def test_names_rebuild_any_structure(value: Any, shuffle: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    flatten("top", value, tensors, scalars)
    entries = [*tensors.items(), *json.loads(json.dumps(scalars)).items()]
    shuffle.shuffle(entries)
    assert plain(Tree(entries).under("top")) == plain(value)


def test_what_is_not_there_is_none_and_what_is_incomplete_is_an_error() -> None:
    tree = Tree([("a/[0]", 1), ("a/[2]", 2), ("b", 3)])
    assert tree.under("c") is None and tree.under("b/x") is None and tree.under("b") == 3
    with pytest.raises(Fatal, match="lacks elements of a"):
        tree.under("a")
    with pytest.raises(Fatal, match="b/x below a tensor or a scalar"):
        Tree([("b", 3), ("b/x", 4)])


def test_loaded_values_are_copies_with_the_types_and_devices_of_what_is_there() -> None:
    value = {"a": {"1": 2}, "b": torch.ones(2), "c": [torch.ones(1)]}
    like = {"a": Counter({"1": 5}), "b": torch.zeros(2, device="meta"), "c": [torch.zeros(1)]}
    made = placed(value, like)
    assert type(made["a"]) is Counter and made["a"]["missing"] == 0 and made["b"].device.type == "meta"
    made["c"][0].zero_()
    assert value["c"][0].item() == 1


@pytest.mark.parametrize("value", [b"", {1, 2}, torch.float32, numpy.int64(3), {True: 1}, torch.ones(2).to_sparse()])
def test_anything_else_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(MisuseError, match=r"^top/x/\[1\]"):
        flatten("top", {"x": [0, value]}, {}, {})


def drawn() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), random.random(), numpy.random.rand()


def test_random_state_follows_from_seed_stream_and_position_alone() -> None:
    places = list(itertools.product((0, 1), repeat=4))
    seen = []
    for place in places:
        set_random_state(*place)
        first = drawn()
        drawn()
        set_random_state(*place)
        assert drawn() == first
        torch.manual_seed(micro_batch_seed(*place))
        assert torch.rand(2).tolist() == first[0], "as torch.manual_seed sets it"
        seen.append(first)
    assert len({repr(each[0]) for each in seen}) == len({each[1] for each in seen}) == len({each[2] for each in seen}) == 16
