"""Flat gradient buckets of one rank.

In: parameters in the model's order. Out: flat tensors in that order, of which every `p.grad` becomes a view
with a step's first backward, so that later ones add in place; and a call for each bucket as soon as it
is final, while the rest of backward still runs. The layout depends on parameters and bucket size alone, never on the schedule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from helixrt.errors import MisuseError


@dataclass(frozen=True)
class Slot:
    """The place of a parameter's gradient: elements [start, start + numel) of bucket `bucket`."""

    name: str
    bucket: int
    start: int
    shape: torch.Size

    def view(self, buckets: Sequence[torch.Tensor]) -> torch.Tensor:
        """This parameter's part of buckets with this layout."""
        return buckets[self.bucket].narrow(0, self.start, self.shape.numel()).view(self.shape)


def lay_out(
    parameters: Sequence[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    alone: Collection[str] = (),
    first_bytes: int | None = None,
    kinds: Sequence[Hashable] = (),
    counted: Sequence[int] = (),
) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    """Slots for parameters (name, tensor), in order, and the elements of each bucket.

    A bucket is full with the parameter that brings it to `bucket_bytes`, the first one with `first_bytes` if that is given.
    Those `alone` get one of their own. Parameters of different `kinds` (one for each parameter, if given) share no bucket;
    buckets are in the order of their first parameters, whose gradients are their last to be final. `counted`: as how many
    elements each parameter fills its bucket, if that is not how many it has.
    """
    slots: list[Slot] = []
    sizes: list[int] = []
    filled: list[int] = []
    fills = counted or [parameter.numel() for _, parameter in parameters]
    filling: dict[Hashable, int] = {}  # the bucket of each kind that is not full
    for (name, parameter), kind, fill in zip(parameters, kinds or (None,) * len(parameters), fills, strict=True):
        bucket = len(sizes) if name in alone else filling.get(kind, len(sizes))
        if bucket == len(sizes):
            sizes.append(0)
            filled.append(0)
        slots.append(Slot(name, bucket, sizes[bucket], parameter.shape))
        sizes[bucket] += parameter.numel()
        filled[bucket] += fill
        limit = bucket_bytes if first_bytes is None or bucket else first_bytes
        filling[kind] = bucket
        if filled[bucket] * parameter.element_size() >= limit or name in alone:
            del filling[kind]
    return tuple(slots), tuple(sizes)


class GradientBuckets:
    """The buckets of the chunks on this rank (all parameters of one dtype and on one device).

    `named` are their trainable parameters in the model's order, each once: one that several chunks share (a tied embedding,
    where the first and the last chunk meet) stands where the first of them has it, and is final when the last
    backwards of all of them are done. Parameters of different `kinds` share no bucket.

    A step is `begin`, backwards, `last_backward(chunk)` before the last one of each chunk and
    `finish(chunk)` after it, `complete(parameter)` for each of `withheld`. Buckets are handed out from the last
    to the first, which is nearly the order in which backward finishes them, and the same everywhere.
    """

    def __init__(
        self,
        chunks: dict[int, nn.Module],
        bucket_bytes: int,
        withheld: Collection[nn.Parameter] = (),
        kinds: Mapping[nn.Parameter, Hashable] | None = None,
    ) -> None:
        self.named: list[tuple[str, nn.Parameter]] = []  # the names are unique
        users: dict[nn.Parameter, set[int]] = {}
        taken: set[str] = set()
        for chunk in sorted(chunks):
            for name, parameter in chunks[chunk].named_parameters():
                if not parameter.requires_grad:
                    continue
                if parameter not in users:
                    unique = f"chunk{chunk}.{name}" if name in taken else name
                    taken.add(unique)
                    self.named.append((unique, parameter))
                users.setdefault(parameter, set()).add(chunk)
        by_parameter = kinds or {}
        each = [by_parameter.get(parameter) for _, parameter in self.named]
        parts = [(name, self.part(parameter)) for name, parameter in self.named]
        counted = [self.counted(parameter) for _, parameter in self.named]
        if len(types := sorted({str(parameter.dtype) for _, parameter in self.named})) > 1:
            raise MisuseError(f"the parameters to train of a stage are of {' and '.join(types)}; they must be of one type")
        alone = {name for name, parameter in self.named if any(parameter is each for each in withheld)}
        self.slots, sizes = lay_out(parts, bucket_bytes, alone=alone, kinds=each, counted=counted)
        self.flat = [parts[0][1].new_zeros(max(1, size), requires_grad=False) for size in sizes]
        self.grads = [slot.view(self.flat) for slot in self.slots]  # of the parts on this rank
        self._parameters = [parameter for _, parameter in self.named]
        self._given = [self.gradient(p, grad) for p, grad in zip(self._parameters, self.grads, strict=True)]
        self.index = {parameter: index for index, parameter in enumerate(self._parameters)}  # among the slots
        self._withheld = {self.index[parameter] for parameter in withheld}
        self._users = [users[parameter] for parameter in self._parameters]
        self._hooks = []
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._given[index]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))
        self._sizes = [sum(s.bucket == b for s in self.slots) for b in range(len(sizes))]
        self._last: set[int] = set()
        self._final: set[int] = set()
        self._open: list[int] = []
        self._next = -1
        self._on_bucket: Callable[[int], None] = lambda bucket: None
        self._thread = 0

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank has of a parameter or a gradient."""
        return tensor

    def counted(self, parameter: nn.Parameter) -> int:
        """As how many elements it fills a bucket: the same number on all ranks that share the stage."""
        return parameter.numel()

    def gradient(self, parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """The tensor for the parameter's `.grad`, whose part on this rank is in a bucket."""
        return part

    def gradients_in(self, bucket: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients of a bucket, by name."""
        return ((slot.name, grad) for slot, grad in zip(self.slots, self.grads, strict=True) if slot.bucket == bucket)

    def close(self) -> None:
        """Leave the parameters without hooks and gradients. Their hooks refer to this object, so without it its memory would
        last until the garbage collector finds the cycle."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None

    def begin(self, on_bucket: Callable[[int], None]) -> None:
        """Discard the gradients of the last step; from now on `on_bucket` is called from this thread."""
        for parameter in self._parameters:
            parameter.grad = None
        self._on_bucket, self._thread = on_bucket, threading.get_ident()
        self._last.clear()
        self._final.clear()
        self._open = list(self._sizes)
        self._next = len(self.flat) - 1

    @torch.no_grad()
    def install(self, sums: Sequence[torch.Tensor], count: float) -> None:
        """Copy `sums / count`, laid out as `flat`, over the gradients of the step; every parameter has one."""
        for local, total in zip(self.flat, sums, strict=True):
            if total.device != local.device:  # kept or fetched in host memory
                local.copy_(total).div_(count)
            elif count != 1:
                torch.div(total, count, out=local)
            elif total is not local:
                local.copy_(total)
        for parameter, grad in zip(self._parameters, self._given, strict=True):
            parameter.grad = grad

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for local in self.flat:
            local.mul_(factor)

    def last_backward(self, chunk: int) -> None:
        """The next backward of this chunk is its last: a gradient that it adds to is final."""
        self._last.add(chunk)

    def finish(self, chunk: int) -> None:
        """The last backward is done: gradients it did not add to are final as well."""
        for index in range(len(self.slots)):
            if chunk in self._users[index] and self._users[index] <= self._last:
                if self._parameters[index].grad is None:
                    self.grads[index].zero_()
                    self._parameters[index].grad = self._given[index]
                if index not in self._withheld:
                    self._mark(index)
        self._release()

    def complete(self, parameter: nn.Parameter) -> None:
        """The gradient of a withheld one is final."""
        self._mark(self.index[parameter])
        self._release()

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient (that requires none) without autograd. Other hooks on the parameter are not called."""
        index = self.index[parameter]
        if parameter.grad is None:
            self.grads[index].copy_(gradient)
            parameter.grad = self._given[index]
        else:
            parameter.grad.add_(gradient)
        self._added(index)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        grad, given = self.grads[index], self._given[index]

        def added(parameter: torch.Tensor) -> None:
            first = parameter.grad
            if first is not None and first is not given:  # one copy costs less than zeroing and adding
                grad.copy_(self.part(first.to_dense() if first.is_sparse else first))
                parameter.grad = given
            self._added(index)

        return added

    def _added(self, index: int) -> None:
        if index in self._final:
            raise MisuseError(
                f"the gradient of {self.slots[index].name} was added to after it was final: a module that several regions of "
                "torch.utils.checkpoint share needs checkpoint(..., use_reentrant=False)"
            )
        if self._users[index] <= self._last and index not in self._withheld:
            self._mark(index)  # chunks run in turns: all but the running one have finished
            # On an accelerator backward has threads of its own; `finish` hands out in the right one.
            if threading.get_ident() == self._thread:
                self._release()

    def _mark(self, index: int) -> None:
        if index not in self._final:
            self._final.add(index)
            self._open[self.slots[index].bucket] -= 1

    def _release(self) -> None:
        while self._next >= 0 and self._open[self._next] == 0:
            self._next -= 1
            self._on_bucket(self._next + 1)
