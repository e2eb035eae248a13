"""Validation in a user's loop: by one replica over all data, or by all replicas over a part each.

In: a user's function, and the leader's order to evaluate the state. Out: figures of this replica, for the driver. Parts are
described by sums and weights, so that the mean over all parts is the mean over all items, whatever the sizes of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from helixrt.engines.inner_group import InnerGroup
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.scalars import scalars
from helixrt.replica.commands import Evaluate


@dataclass(frozen=True)
class Part:
    """Which part of the validation data a replica evaluates: number `index` of `count` parts, which together are all data."""

    index: int
    count: int

    def of(self, items: int) -> range:
        """The numbers of this part's items, of so many items in all: a `sampler` for a DataLoader, or batch numbers."""
        return range(self.index, items, self.count)


@dataclass(frozen=True)
class PartSums:
    """What a function of `Session.evaluate_shared` returns for its part: by name the sums over `weight` items. What is logged
    is the sum of the sums over the sum of the weights."""

    sums: Mapping[str, Any]
    weight: float


@dataclass(frozen=True)
class Measured:
    """What a replica has measured: means, or with `weight` sums over so many items of its part."""

    values: dict[str, float]
    weight: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """A user's function, and after how many updates it runs. `shared`: it takes a `Part` and returns `PartSums`. `at_start`: it
    also runs before the first update."""

    function: Callable[..., Any]
    every: int
    shared: bool = False
    at_start: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError("every", self.every, "must be at least 1")

    def run(self, order: Evaluate, inner: InnerGroup | None) -> Measured:
        """On a rank of the replica; the result is the mean over its dp_shard ranks (`inner`). Raises MisuseError for a result
        of another kind."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            found = self.function(part_of(order)) if self.shared else self.function()
        if not self.shared:
            return Measured(_mean(scalars(found if isinstance(found, Mapping) else {"value": found}), inner))
        if not isinstance(found, PartSums):
            rule = "must return helixrt.PartSums(sums, weight): means of parts of other sizes have no common mean"
            raise MisuseError(f"the function of session.evaluate_shared returned a {type(found).__name__}; it {rule}")
        values = scalars({**found.sums, "": found.weight})
        if not values[""] >= 0:
            given = f"the function of session.evaluate_shared returned weight={found.weight}"
            raise MisuseError(f"{given}; it must not be negative")
        sums = _mean(values, inner)  # of the weight, too: their quotient is that over all that the ranks have evaluated
        weight = sums.pop("")
        return Measured(sums, weight)


def part_of(order: Evaluate) -> Part:
    """What the replica is to evaluate."""
    return Part(order.among.index(order.of), len(order.among))


def _mean(values: dict[str, float], inner: InnerGroup | None) -> dict[str, float]:
    return values if inner is None else dict(zip(values, inner.mean(list(values.values())), strict=True))
