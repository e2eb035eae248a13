"""The digest of a state: the same bytes whatever the layout, a part of a tensor at a time."""

from __future__ import annotations

import hashlib

import pytest
import torch

from helixrt.replica import state_shards
from helixrt.replica.contracts import State
from helixrt.replica.state_shards import digest


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


def whole(tensors: dict[str, torch.Tensor], beginning: str) -> str:
    found = hashlib.sha256()
    for name in sorted(name for name in tensors if name.startswith(beginning)):
        tensor = tensors[name].contiguous().clone(memory_format=torch.contiguous_format)
        raw = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        found.update(name.encode() + raw)
    return found.hexdigest()


@pytest.mark.parametrize("most_bytes", [1, 4, 16, 40, 1 << 20])
def test_a_digest_is_of_all_bytes_and_copies_few_at_a_time(most_bytes: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pieces = state_shards._pieces

    def watched(tensor: torch.Tensor, most: int = most_bytes) -> object:
        for piece in pieces(tensor, most_bytes):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(state_shards, "_pieces", watched)
    made = tensors(seed)
    found = digest(State(made))
    assert (found.parameters, found.state) == (whole(made, "parameter/"), whole(made, ""))
    assert max(sizes) <= max(most_bytes, 8)
