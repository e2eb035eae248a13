"""helixrt.compile and activation checkpointing: regions are recomputed, with eager's gradients, random numbers and memory."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import helixrt
from helixrt.bench._live_storage import LiveStorage

BLOCKS, MICROBATCHES, WIDE = 16, 2, 64


pytestmark = pytest.mark.usefixtures("one_thread")


def products_saved(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


MANNERS: dict[str, Any] = {
    "plain": None,
    "checkpointed": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, products_saved),
    },
}


class Block(nn.Module):
    """Dropout twice inside the region, on parallel branches."""

    def __init__(self, manner: str, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)
        self.manner, self.p = manner, dropout

    def body(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.dropout(F.gelu(self.up(h)), self.p)) + F.dropout(torch.tanh(h), self.p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keywords = MANNERS[self.manner]
        return self.body(x) if keywords is None else checkpoint(self.body, x, **keywords)


class Stack(nn.Module):
    def __init__(self, manner: str, dropout: float, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(Block(manner, dropout) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def alike(manner: str, model: Stack) -> Stack:
    """The same weights, checkpointed in another manner."""
    other = copy.deepcopy(model)
    for block in other.blocks:
        block.manner = manner
    return other


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, MICROBATCHES * rows, WIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind(0)


def plain_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (F.mse_loss(model(a), b) / MICROBATCHES).backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def compiled(model: nn.Module, strands: int) -> nn.Module:
    return helixrt.compile(copy.deepcopy(model), loss=F.mse_loss, microbatches=MICROBATCHES, strands=strands)


def peak(run: Any, model: nn.Module, *inputs: torch.Tensor) -> int:
    with LiveStorage([*model.parameters(), *model.buffers(), *inputs]) as live:
        run()
    return live.peak_bytes


@pytest.mark.grid
@pytest.mark.parametrize("strands", [1, 2])
@pytest.mark.parametrize("manner", ["checkpointed", "reentrant", "selective"])
def test_gradients_and_masks_are_those_of_eager(manner: str, strands: int) -> None:
    model = alike(manner, Stack("plain", 0.3, blocks=2).double())
    x, y = data(4)
    step, kept, eager = compiled(model, strands), compiled(alike("plain", model), 1), copy.deepcopy(model)
    for _ in range(2):
        torch.manual_seed(7)
        step.train_step(x, target=y)
        after = torch.get_rng_state()
        torch.manual_seed(7)
        kept.train_step(x, target=y)
        torch.manual_seed(7)
        plain_loop(eager, x, y)
        assert torch.equal(after, torch.get_rng_state())
    for one, other, expected in zip(gradients(step), gradients(kept), gradients(eager), strict=True):
        assert torch.equal(one, other), "recomputed activations are the kept ones, bit for bit"
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-13)
    assert step.explain().state == ("woven" if strands == 2 else "single strand")


@pytest.mark.system
@pytest.mark.parametrize("manner", ["checkpointed", "selective"])
def test_a_strand_needs_the_memory_of_checkpointed_eager(manner: str) -> None:
    """Within 5%, of which a generator's state for each random operator is a part; the peak of two strands is reported."""
    model = alike(manner, Stack("plain", 0.3).double())
    x, y = data(256)
    peaks = {}
    for strands in (1, 2):
        step = compiled(model, strands)
        torch.manual_seed(7)
        step.train_step(x, target=y)  # captures
        step.zero_grad()
        peaks[strands] = peak(lambda step=step: step.train_step(x, target=y), step, x, y)
    eager = copy.deepcopy(model)
    peaks["eager"] = peak(lambda: plain_loop(eager, x, y), eager, x, y)
    everything = alike("plain", model)
    peaks["everything"] = peak(lambda: plain_loop(everything, x, y), everything, x, y)
    assert peaks[1] <= 1.05 * peaks["eager"], peaks
    assert peaks["everything"] > (2.0 if manner == "checkpointed" else 1.3) * peaks["eager"], peaks
    explanation = step.explain()
    gradients_bytes = sum(gradient.nbytes for gradient in gradients(step))
    reported = explanation.woven_peak_bytes
    assert 0 < reported <= peaks[2] <= 1.05 * (reported + gradients_bytes), peaks
    assert "MiB" in str(explanation)
