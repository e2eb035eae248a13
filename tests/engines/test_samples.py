"""A change through `.data` is found within the turns that it takes to come to the parameter, whatever its layout in memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from helixrt.engines.samples import ELEMENTS, PARAMETERS, Samples

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: torch.randn(7, 5),
    "transposed": lambda: torch.randn(7, 5).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "one of every two columns": lambda: torch.randn(6, 8)[:, ::2],
    "a number": lambda: torch.randn(()),
    "bfloat16": lambda: torch.randn(9).bfloat16(),
    "larger than a part": lambda: torch.randn(3, ELEMENTS),
    "expanded": lambda: torch.randn(1).expand(4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_is_changed_in_every_step_is_found_in_its_turn(layout: str, seed: int) -> None:
    torch.manual_seed(seed)
    others = [(f"other{i}", torch.randn(3)) for i in range(random.Random(seed).randrange(12))]
    changed = LAYOUTS[layout]()
    named = [*others[: len(others) // 2], ("changed", changed), *others[len(others) // 2 :]]
    samples, turns = Samples(named), math.ceil(len(named) / PARAMETERS)
    for _ in range(3 * turns):
        samples.record()
        assert samples.compare() is None
    for _ in range(turns):
        samples.record()
        changed.data.copy_(changed.data + 1) if layout != "expanded" else changed.data[:1].add_(1)
        if samples.compare() == "changed":
            break
    else:
        pytest.fail(f"not found in {turns} steps")


def test_the_parts_of_a_large_parameter_take_turns() -> None:
    large = torch.zeros(4 * ELEMENTS)
    samples, found = Samples([("large", large)]), set()
    for _ in range(4):
        samples.record()
        for part in range(4):
            large[part * ELEMENTS] += 1
            if samples.compare() is not None:
                found.add(part)
            large[part * ELEMENTS] -= 1
    assert found == {0, 1, 2, 3}


def test_a_parameter_that_got_other_memory_is_sampled_there() -> None:
    parameter = torch.nn.Parameter(torch.randn(4))
    samples = Samples([("p", parameter)])
    samples.record()
    parameter.data = torch.randn(4)  # by an update
    samples.record()
    assert samples.compare() is None
    parameter.data.add_(1)
    assert samples.compare() == "p"


def test_what_has_no_elements_or_no_values_is_passed_over() -> None:
    samples = Samples([("empty", torch.zeros(0, 3)), ("meta", torch.zeros(3, device="meta")), ("complex", torch.zeros(2) * 1j)])
    samples.record()
    assert samples.compare() is None and samples.result() is None
