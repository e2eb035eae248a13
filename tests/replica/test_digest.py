"""The digest of a whole state: of the same bytes whatever the layout, and of each entry."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from helixrt.replica.contracts import State
from helixrt.replica.state_digest import digest


def tensors(seed: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        "parameter/plain": torch.randn(7, 5, generator=source),
        "parameter/turned": torch.randn(7, 5, 3, generator=source).transpose(0, 2),
        "parameter/half": torch.randn(6, 8, generator=source).bfloat16().t(),
        "optimizer/strided": torch.randn(40, generator=source)[::3],
        "optimizer/one": torch.tensor(3.0, dtype=torch.float64),
        "optimizer/none": torch.zeros(0, 4),
        "optimizer/moved": torch.randint(0, 9, (3, 4, 5), generator=source).permute(1, 2, 0),
    }


def test_a_digest_is_of_all_bytes_in_their_logical_order(seed: int) -> None:
    made = tensors(seed)
    found = digest(State(made), entries=True)
    copied = {name: made[name].clone(memory_format=torch.contiguous_format) for name in reversed(made)}
    assert digest(State(copied)) == digest(State(made)) and found.state == digest(State(made)).state
    assert [name for name, _ in found.entries] == list(made)
    for name, tensor in copied.items():
        before = tensor.clone()
        if tensor.numel():
            tensor.view(-1).view(torch.uint8)[-1] ^= 1
        changed = digest(State(copied), entries=True)
        assert {one for one, other in zip(found.entries, sorted_as(changed.entries, made), strict=True) if one != other} == (
            {(name, dict(found.entries)[name])} if tensor.numel() else set()
        )
        assert (changed.state != found.state) == bool(tensor.numel())
        assert (changed.parameters != found.parameters) == name.startswith("parameter/")
        tensor.copy_(before)


def sorted_as(entries: tuple[tuple[str, int], ...], names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, dict(entries)[name]) for name in names]


def test_names_and_shapes_belong_to_it() -> None:
    ones = torch.ones(4, 2)
    states = [{"parameter/a": ones}, {"parameter/b": ones}, {"parameter/a": ones.view(2, 4)}]
    assert len({digest(State(each)).state for each in states}) == 3
    assert digest(State({"parameter/a": ones}, {"lr": 0.1})).state != digest(State({"parameter/a": ones}, {"lr": 0.2})).state
