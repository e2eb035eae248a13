"""What is timed is the work of a step: with floating-point operations in place of time, units add up to plain PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from helixrt.passes.capture import capture
from helixrt.passes.chunk_times import ChunkTimes
from helixrt.passes.cut import cut
from helixrt.passes.example_values import Pool
from helixrt.passes.measure import Stopwatch
from helixrt.passes.unit_costs import balanced
from helixrt.pipeline.chunk_timer import WARM_UP, ChunkTimer
from helixrt.pipeline.unit_times import times_of, unit_times
from helixrt.schedule.ir import Op

WORDS, WIDTH, ROWS = 11, 4, 6


class Words(nn.Module):
    """An embedding, layers of which the third is wider than the others, a head."""

    def __init__(self, embeds: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if embeds else None
        hidden = (WIDTH, WIDTH, 8 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, h), nn.Tanh(), nn.Linear(h, WIDTH)) for h in hidden)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) if self.words is not None else tokens
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def flops_for_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(self: Stopwatch, run: Any) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        return float(counter.get_total_flops())

    monkeypatch.setattr(Stopwatch, "work_us", counted)


def call(model: Words) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(ROWS, dtype=torch.int64)
    return (tokens if model.words is not None else torch.zeros(ROWS, WIDTH)), tokens


def plain_flops(model: Words) -> float:
    x, target = call(model)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(x), target).backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("embeds", [True, False])
def test_units_add_up_to_the_work_of_plain_pytorch(embeds: bool) -> None:
    model = Words(embeds)
    x, target = call(model)
    joint = capture(model, (x,), loss=cross_entropy, target=target)
    times = unit_times(joint, passes=2, rounds=2)
    assert list(times) == ["", "layers.0", "layers.1", "layers.2", "layers.3", "head"] and times[""].total_ms == 0.0
    assert ChunkTimes.sum(list(times.values())).total_ms * 1e3 == pytest.approx(plain_flops(model), rel=1e-9)
    assert times["layers.1"] == times["layers.3"] and times["layers.3"].total_ms < times["layers.2"].total_ms
    assert balanced(joint, (0, 1), measured=times).starts == (4,)  # behind the wide layer, which is most of all work


def test_operations_are_timed_apart_and_as_one() -> None:
    model = Words()
    x, target = call(model)
    joint = capture(model, (x,), loss=cross_entropy, target=target)
    for one in times_of(cut(joint, (2, 4)).chunks, passes=1, rounds=1):
        assert one.whole_ms == pytest.approx(one.backward_ms + one.weight_ms) and one.total_ms > one.forward_ms > 0


class Counted(nn.Module):
    """Layers with running buffers, and one that is set without being read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.last.copy_(x.detach().mean(0))
        return x


def test_buffers_that_a_forward_changes_have_values() -> None:
    target = torch.zeros(ROWS, dtype=torch.int64)
    joint = capture(Counted(), (torch.zeros(ROWS, WIDTH),), loss=cross_entropy, target=target)
    times = unit_times(joint, passes=1, rounds=1)
    assert times["layers.0"].total_ms > 0 and times["layers.1"] == times["layers.2"]


def test_casts_of_parameters_are_not_in_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made once per step, and not in each micro-batch."""
    cast: list[torch.dtype] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].shape == (8 * WIDTH, WIDTH):
                cast.append(kwargs["dtype"])
            return func(*args, **(kwargs or {}))

    def counted(self: Stopwatch, run: Any) -> float:
        with Counting():
            run()
        return 1.0

    monkeypatch.setattr(Stopwatch, "work_us", counted)
    model = Words()
    x, target = call(model)
    with torch.autocast("cpu", torch.bfloat16):
        joint = capture(model, (x,), loss=cross_entropy, target=target)
    rounds, runs = 2, WARM_UP + 2
    unit_times(joint, passes=1, rounds=rounds)
    assert cast == [torch.float32] * 2 * runs  # of the gradient, in W and in BW; none of the weight


def test_memory_for_gradients_is_given_back_and_rounds_are_counted() -> None:
    model = Words()
    x, target = call(model)
    (chunk,) = cut(capture(model, (x,), loss=cross_entropy, target=target)).chunks
    timer = ChunkTimer(chunk, Pool())
    for rounds in (1, 3):  # a second time, too: parameters have no hooks left from the first
        taken = timer.run(rounds)
        assert {op: len(values) for op, values in taken.items()} == {
            Op.F: 2 * rounds,
            Op.B: rounds,
            Op.W: rounds,
            Op.BW: rounds,
        }
        assert all(parameter.grad is None for parameter in timer._stage.parameters.values())
