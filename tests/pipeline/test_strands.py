"""A single stage trained in two strands leaves what one strand leaves, bit by bit, and what a plain loop leaves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helixrt.bench._live_storage import LiveStorage
from helixrt.passes.capture import capture
from helixrt.passes.parts import Part, Port, Role
from helixrt.pipeline.gradients import ParameterGradients
from helixrt.pipeline.single_stage import SingleStage
from helixrt.pipeline.strands import Strands, build
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk

SEQ, VOCAB = 6, 17


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def model(family: str, tied: bool, dropout: bool, layers: int = 2, dim: int = 8, seq: int = SEQ) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ModelConfig(family=family, layers=layers, dim=dim, heads=2, kv_heads=1, ffn=2 * dim, vocab=VOCAB, tied=tied)
    module = build_chunk(config, seq, 0, 1, dtype=torch.float64)
    if dropout:
        for block in module.layers.values():
            block.register_forward_hook(lambda m, args, out: F.dropout(out, 0.3, m.training))
    return module


def batch(microbatches: int, seq: int = SEQ) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens, targets = torch.randint(0, VOCAB, (2, 2 * microbatches, seq), generator=torch.Generator().manual_seed(1))
    return list(zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True))


def captured(module: nn.Module, seq: int = SEQ) -> Part:
    tokens, targets = batch(1, seq)[0]
    return capture(module, (tokens,), loss=cross_entropy, target=targets)


def train(module: nn.Module, joint: Part, strands: Strands, microbatches: int, steps: int, seq: int = SEQ) -> torch.Tensor:
    inputs = [{Port(Role.INPUT, "0"): x, Port(Role.TARGET, "target"): y} for x, y in batch(microbatches, seq)]
    for _ in range(steps):
        stage = SingleStage(strands, module)
        losses = stage.run(inputs, ParameterGradients(stage.parameters(), joint.layouts))
    return losses


@pytest.mark.system
@pytest.mark.parametrize("layers", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_two_strands_need_the_memory_of_one(layers: int) -> None:
    """Activations and gradients, by counting storages; 1.03 is the most the issue allows."""
    module = model("gpt", True, False, layers=layers, dim=32, seq=32)
    joint = captured(module, seq=32)
    peaks = []
    for count in (1, 2):
        strands = build(joint, strands=count)
        module.zero_grad()
        with LiveStorage([*module.parameters(), *module.buffers()]) as live:
            train(module, joint, strands, 3, steps=1, seq=32)
        gradients_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        assert live.now_bytes == gradients_bytes, "after a step nothing but gradients is alive"
        peaks.append(live.peak_bytes)
    assert peaks[1] <= 1.03 * peaks[0], peaks
    with LiveStorage([*module.parameters(), *module.buffers()]) as live:
        module.zero_grad()
        for x, y in batch(3, 32):
            cross_entropy(module(x), y).backward()
    assert peaks[0] <= 1.03 * live.peak_bytes, "one strand needs what eager autograd needs"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.bn(self.a(x)))


def test_hooks_and_layouts_of_gradients_are_autograds() -> None:
    torch.manual_seed(0)
    module, plain = Normed(), Normed()
    plain.load_state_dict(module.state_dict())
    x, y = torch.randn(3, 8, 4), torch.randn(3, 8, 3)
    seen: dict[nn.Module, list[float]] = {module: [], plain: []}
    for each in (module, plain):
        each.a.weight.register_hook(lambda g: 2 * g)
        each.a.weight.register_post_accumulate_grad_hook(lambda p, e=each: seen[e].append(float(p.grad.sum())))
        each.b.weight.data = each.b.weight.data.t().contiguous().t()  # a parameter that is not laid out row by row
    joint = capture(module, (x[0],), loss=F.mse_loss, target=y[0])
    stage = SingleStage(build(joint), module)
    stage.run(
        [{Port(Role.INPUT, "0"): a, Port(Role.TARGET, "target"): b} for a, b in zip(x, y, strict=True)],
        ParameterGradients(stage.parameters(), joint.layouts),
    )
    for a, b in zip(x, y, strict=True):
        (F.mse_loss(plain(a), b) / 3).backward()
    assert len(seen[module]) == 3 and seen[module] == pytest.approx(seen[plain], rel=1e-5)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.stride() == other.grad.stride()
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)
