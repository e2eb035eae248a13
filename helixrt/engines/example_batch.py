"""An example of what a compiled model trains on, for `session.parallelize(model, example=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, init=False)
class ExampleBatch:
    """A batch as `step.train(model, *inputs, target=..., **named)` takes it, of any values: its shapes and dtypes count, and
    numbers, strings and None among the arguments. It is cut into micro-batches as every batch is."""

    inputs: tuple[Any, ...]
    named: Mapping[str, Any]
    target: Any

    def __init__(self, *inputs: Any, target: Any = None, **named: Any) -> None:
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "named", named)
        object.__setattr__(self, "target", target)
