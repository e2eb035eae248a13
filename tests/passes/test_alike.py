"""Graphs are alike when they compute the same, whatever things are called; anything else that counts tells them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from helixrt.passes.alike import structure
from helixrt.passes.capture import capture
from helixrt.passes.cut import cut
from helixrt.passes.parts import Part


class Stack(nn.Module):
    """Layers of the activations given, with other names than a Sequential has."""

    def __init__(self, width: int, activations: tuple[Callable[[torch.Tensor], torch.Tensor], ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in activations)
        self.activations = activations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, activation in zip(self.blocks, self.activations, strict=True):
            x = activation(block(x))
        return x


def whole(model: nn.Module, width: int = 4, rows: int = 3, dtype: torch.dtype = torch.float32) -> Part:
    x = torch.zeros(rows, width, dtype=dtype)
    return capture(model.to(dtype), (x,), loss=mse_loss, target=x)


def tanh_layers(width: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)))


def test_layers_that_repeat_are_alike() -> None:
    layers = Stack(4, (torch.tanh, torch.tanh, torch.tanh, torch.relu))
    first, second, third, fourth = (structure(chunk.part) for chunk in cut(whole(layers), (2, 3, 4)).chunks)
    assert second == third and len({first, second, fourth}) == 3  # the first has no boundary before it


def test_names_do_not_count() -> None:
    assert structure(whole(Stack(4, (torch.tanh, torch.tanh)))) == structure(whole(tanh_layers()))


@pytest.mark.parametrize(
    "other",
    [
        lambda: whole(tanh_layers(6), 6),
        lambda: whole(tanh_layers(), rows=5),
        lambda: whole(tanh_layers(), dtype=torch.float64),
        lambda: whole(Stack(4, (torch.tanh, torch.relu))),
        lambda: whole(Stack(4, (torch.tanh, lambda x: torch.tanh(x * 2.0)))),
    ],
    ids=["width", "rows", "dtype", "operator", "factor"],
)
def test_what_counts_tells_graphs_apart(other: Callable[[], Part]) -> None:
    assert structure(whole(tanh_layers())) != structure(other())


def test_constants_count() -> None:
    one, other = (Stack(4, (torch.tanh, lambda x, by=by: x * by)) for by in (2.0, 3.0))
    assert structure(whole(one)) != structure(whole(other))
