"""Two states of an engine are equal, bit for bit."""

from __future__ import annotations

import torch

from helixrt.replica.contracts import State


def same_state(one: State, other: State) -> None:
    """Asserts equal names, scalars and tensors."""
    assert list(one.tensors) == list(other.tensors)
    differ = {n: (one.scalars.get(n), other.scalars.get(n)) for n in {*one.scalars, *other.scalars}}
    assert dict(one.scalars) == dict(other.scalars), {n: pair for n, pair in differ.items() if pair[0] != pair[1]}
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
