"""What travels beside the gradients: weight, loss, which parameters have gradients, running buffers.

In: losses and weights of a batch's micro-batches, a presence mask, buffers. Out: a float64 bucket (and an int64 one, if there
are integer buffers) that is summed over replicas as gradients are, and is read at commit. Nothing is read on the host before.

    [weight, loss, ranks with a loss that is not finite, a 1 per present gradient, a 1 per changed buffer, buffers]

In a replica of several ranks each rank's book holds the whole replica's entries: they are united over its ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from helixrt.engines.buffers import Buffers
from helixrt.engines.inner_group import InnerGroup
from helixrt.errors import MisuseError

_HEAD = 3


@dataclass(frozen=True)
class Totals:
    """Sums over contributors; `loss` is the mean over all items."""

    weight: float
    loss: float
    present: tuple[bool, ...]
    changed: tuple[float, ...]
    floats: torch.Tensor
    integers: torch.Tensor | None


def check_weight(weight: float | torch.Tensor | None) -> None:
    """Raises MisuseError for a weight that is none; the value of a tensor is not read."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise MisuseError(f"the weight of a micro-batch is one number, not a tensor of shape {list(weight.shape)}")
    elif weight is not None and (not isinstance(weight, Real) or not 0 <= weight < math.inf):
        raise MisuseError(f"the weight of a micro-batch is a number of at least 0, not {weight!r}")


class ExchangeBook:
    def __init__(self, parameters: int, buffers: Buffers, device: torch.device, group: InnerGroup | None = None) -> None:
        self._parameters, self._buffers, self._device, self._group = parameters, buffers, device, group
        self._room = _HEAD + parameters + buffers.marks
        self.tensors = [torch.zeros(self._room + buffers.float_room, dtype=torch.float64, device=device)]
        if buffers.integer_room:
            self.tensors.append(torch.zeros(buffers.integer_room, dtype=torch.int64, device=device))
        self._host = self.tensors[0].numpy() if self.tensors[0].is_cpu else None  # the same memory: entries cost no operation
        self._weight = 0.0
        self._more_weight: torch.Tensor | None = None  # of weights that are tensors on a device
        self._loss: torch.Tensor | float | None = None  # a number in host memory, where reading waits for nothing
        self._mask: tuple[tuple[bool, ...], torch.Tensor] | None = None  # the newest presence mask, on the device

    def begin(self) -> None:
        self._weight, self._more_weight, self._loss = 0.0, None, None

    def add(self, loss: torch.Tensor | None, weight: float | torch.Tensor | None) -> None:
        """Count a micro-batch: its summed loss (None: not known) and over how many items. Raises MisuseError for a weight that
        is none."""
        check_weight(weight)
        if isinstance(weight, torch.Tensor):
            if self._host is not None:
                self._weight += weight.item()
            else:
                more = weight.detach().reshape(()).to(self._device, torch.float64)
                self._more_weight = more if self._more_weight is None else self._more_weight + more
        else:
            self._weight += 1.0 if weight is None else float(weight)
        if self._host is not None:
            self._loss = (self._loss or 0.0) + (math.nan if loss is None else loss.item())
            return
        if loss is None:
            loss = torch.full((), math.nan)
        value = loss.detach().reshape(()).to(self._device, torch.float64)
        self._loss = value if self._loss is None else self._loss + value

    @property
    def weight(self) -> float | torch.Tensor:
        """Of the batch so far; a tensor if one of the weights was."""
        return self._weight if self._more_weight is None else self._more_weight + self._weight

    @property
    def mean_loss(self) -> torch.Tensor | float:
        assert self._loss is not None
        weight = self.weight
        if isinstance(self._loss, torch.Tensor) or isinstance(weight, torch.Tensor):
            return self._loss / weight
        return self._loss / weight if weight else math.nan

    def fill(self, present: Sequence[bool]) -> None:
        """Write the batch's entries. From then on `weight` and `mean_loss` are those of the whole replica. Raises Retryable if
        a rank of the replica is lost."""
        self._fill_head(tuple(present))
        self._fill_buffers()
        if self._group is not None:
            self._unite(self._group)

    def _fill_head(self, marks: tuple[bool, ...]) -> None:
        book, loss = self.tensors[0], self._loss
        assert loss is not None
        same = self._mask is not None and marks == self._mask[0]
        if self._mask is None or not same:
            self._mask = marks, torch.tensor(marks, dtype=torch.float64, device=self._device)
        if not same or self._group is not None:  # whose sum stands in the place of it
            book[_HEAD : _HEAD + self._parameters] = self._mask[1]
        if self._host is not None:
            assert not isinstance(loss, torch.Tensor)
            finite = math.isfinite(loss)
            self._host[:_HEAD] = (self._weight, loss if finite else 0.0, not finite)
            return
        assert isinstance(loss, torch.Tensor)
        loss = loss.detach()
        known = torch.isfinite(loss)
        book[0].fill_(self.weight)  # `book[0] = number` is a copy from host memory, which waits for the device
        book[1] = torch.where(known, loss, 0.0)
        book[2] = ~known

    def _fill_buffers(self) -> None:
        book = self.tensors[0]
        if self._buffers.marks:
            book[_HEAD + self._parameters : self._room] = self._buffers.changed(self._device)
            for room in (book[self._room :], *self.tensors[1:]):
                room.zero_()
            self._buffers.write(book[self._room :], self.tensors[1] if len(self.tensors) > 1 else None)

    def _unite(self, group: InnerGroup) -> None:
        book = self.tensors[0]
        parts = group.gather(book)
        torch.sum(torch.stack([part[: self._room] for part in parts]), 0, out=book[: self._room])
        book[self._room :] = self._buffers.united([part[self._room :] for part in parts])
        if len(self.tensors) > 1:
            self.tensors[1].copy_(self._buffers.united_integers(group.gather(self.tensors[1])))
        self._weight, self._more_weight = 0.0, book[0].clone()
        self._loss = torch.where(book[2] > 0, torch.full_like(book[1], math.nan), book[1])

    def finite_part(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """What of `values`, laid out as tensor `index`, is finite where the weight is: all but buffers, which may hold any
        value."""
        return values[: self._room] if index == 0 and self._buffers.float_room else values

    def read(self, sums: Sequence[torch.Tensor]) -> Totals:
        """Sums of `tensors` over contributors; reads the head on the host."""
        book = sums[0]
        head = self.finite_part(0, book).tolist()
        return Totals(
            weight=head[0],
            loss=head[1] / head[0] if head[0] and not head[2] else math.nan,
            present=tuple([mark > 0 for mark in head[_HEAD : _HEAD + self._parameters]]),
            changed=tuple(head[_HEAD + self._parameters :]),
            floats=book[self._room :],
            integers=sums[1] if len(self.tensors) > 1 else None,
        )
