"""Compares, bit for bit, what must be equal on several ranks of a replica.

In: entries of a rank's state by name, which axes of the mesh cut each of them, the ranks to compare. Out: nothing, or an error
that names the first entry that differs, and two ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.replicated_state import ReplicatedState
from helixrt.engines.sharded import local
from helixrt.errors import Fatal
from helixrt.replica.contracts import Scalar
from helixrt.replica.state_digest import Sums

_OTHERS = ("extra/", "dtensor/")  # what a user's own object holds may be parts
_REMEDY = (
    "build the same model on all ranks, and let the update depend on registered state, gradients and record alone; else "
    "suspect the memory of one of the two"
)


@dataclass(frozen=True)
class Held:
    """An entry of a rank's state. `cut`: the axes whose ranks hold other parts of it; ranks of all others hold the same."""

    name: str
    value: torch.Tensor | Scalar
    cut: tuple[str, ...] = ()


def held_in(state: ReplicatedState, cut: Callable[[str, torch.Tensor | None], tuple[str, ...] | None]) -> Iterator[Held]:
    """The entries of a state but a user's own; `cut(name, tensor)` gives the axes that cut one (None in place of the tensor for
    a scalar), or None for an entry that is not to be compared."""
    tensors, scalars = state.entries()
    for name, value in (*scalars.items(), *tensors.items()):
        if not name.startswith(_OTHERS):
            axes = cut(name, value if isinstance(value, torch.Tensor) else None)
            if axes is not None:
                yield Held(name, value, axes)


class Copies:
    """The ranks of `group`, of which all call the same methods with entries of the same names. `places`: of each rank, its
    number on each axis in which they differ."""

    def __init__(self, group: InnerGroup, places: Sequence[Mapping[str, int]]) -> None:
        assert len(places) == group.size
        self._group, self._places = group, places

    def check(self, entries: Iterable[Held], remedy: str = _REMEDY) -> None:
        """Raises Fatal for the first entry that is not the same on all ranks that hold a copy of it."""
        held = list(entries)
        device = self._group.mesh.device_type
        counts = [int(count) for count in self._group.gather(torch.tensor([len(held)], device=device))]
        if len(set(counts)) > 1:
            raise Fatal(f"ranks of this replica hold {counts} entries of the state; they must hold the same: {remedy}")
        mine = _digests((entry.value for entry in held), device)
        table = torch.stack(self._group.gather(mine)).cpu()
        for entry, values in zip(held, table.T.tolist(), strict=True):
            if found := self.unequal(values, entry.cut):
                one, other = found
                whole = "whole" if not entry.cut else f"whole but for {', '.join(entry.cut)}"
                raise Fatal(
                    f"{entry.name} differs between {one} and {other} of this replica, which hold it {whole} and must hold the "
                    f"same bits: {remedy}"
                )

    def unequal(self, values: Sequence[int], cut: tuple[str, ...]) -> tuple[str, str] | None:
        """Two ranks that should have the same value and do not; `values` of each rank, of an entry that these axes cut."""
        first: dict[tuple[int, ...], int] = {}  # by place on the axes that cut it: the first rank that holds this part
        for rank, place in enumerate(self._places):
            one = first.setdefault(tuple(place[axis] for axis in cut), rank)
            if values[rank] != values[one]:
                return self._called(one), self._called(rank)
        return None

    def _called(self, rank: int) -> str:
        return "rank " + ", ".join(f"{axis} {number}" for axis, number in self._places[rank].items())


def _digests(values: Iterable[torch.Tensor | Scalar], device: str) -> torch.Tensor:
    """int64 [values] on this device; sums where the tensors are (`state_digest`)."""
    sums, found = Sums(), list[torch.Tensor]()
    for value in values:
        if isinstance(value, torch.Tensor):
            part = local(value.detach())
            found.append(sums.of(part, 0, part.numel() * part.element_size()).to(device, non_blocking=True))
        else:
            found.append(torch.tensor(zlib.crc32(json.dumps(value).encode()), device=device))
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)
