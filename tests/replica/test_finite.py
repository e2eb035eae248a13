"""Numbers that are not finite are found wherever they are, and only they."""

from __future__ import annotations

import math

import pytest
import torch

from helixrt.replica.finite import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_number_is_enough_and_the_largest_are_finite(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for count in (1, 7, 1000, 4099):
        numbers = torch.randn(count, generator=generator).to(dtype)
        numbers[0] = torch.finfo(dtype).max
        numbers[-1] = torch.finfo(dtype).min
        assert all_finite(numbers) and all_finite(torch.full((count,), torch.finfo(dtype).max, dtype=dtype))
        for odd in (math.nan, math.inf, -math.inf):
            spoilt = numbers.clone()
            spoilt[int(torch.randint(count, (), generator=generator))] = odd
            assert not all_finite(spoilt), (count, odd)
            assert all_finite(numbers)


def test_an_empty_bucket_is_finite() -> None:
    assert all_finite(torch.empty(0))
