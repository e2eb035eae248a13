"""Figures that a user logs: numbers and tensors with one element, as floats."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from helixrt.engines.sharded import is_sharded
from helixrt.errors import MisuseError


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Reads tensors, so it waits for their device. Raises MisuseError for anything else, with its name."""
    if not isinstance(values, Mapping):
        raise MisuseError(f"session.log takes {{name: number}}, not a {type(values).__name__}")
    found = {}
    for name, value in values.items():
        if type(value) is not torch.Tensor and is_sharded(value):
            value = value.full_tensor()  # all ranks of the replica log the same names
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(name, str) or not isinstance(value, numbers.Real):
            raise MisuseError(f"{name!r} is a {type(value).__name__}; what is logged are numbers and tensors with one element")
        found[name] = float(value)
    return found
