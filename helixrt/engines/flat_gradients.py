"""Gradients of any module in flat sets, handed out while backward still runs.

In: named parameters. Out: flat tensors, one sequence per dtype and device, cut into buckets in parameter order, of which
every `p.grad` becomes a view with a batch's first backward; and a call for each bucket once the gradients in it are final.
Of a DTensor parameter this is the rank's local part; `p.grad` is a DTensor over the view. Parameters that tp or dp_shard ranks
hold whole have buckets of their own, which are summed over these ranks before they are handed out, and are handed out last.

A post-accumulate-gradient hook per parameter does this. It never blocks, communicates or raises: what it finds wrong is kept
and raised by `check`. In the last backward of a batch a gradient is final when its hook has run; those that no backward has
reached are final at `end`, as zeros. Every `p.grad` has a version counter of its own, so that a change of a gradient outside
backward is found, and is reported with the parameter's name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.sharded import is_scalar, is_sharded, local, over, version, versions
from helixrt.engines.stream_marks import HostMarks, StreamMarks
from helixrt.engines.tensor_gradients import TensorGradients
from helixrt.errors import MisuseError
from helixrt.pipeline.buckets import Slot, lay_out

FIRST_BYTES = 1 << 20  # of the bucket that backward finishes last: nothing is left to hide its exchange behind

Named = Sequence[tuple[str, nn.Parameter]]


class FlatGradients:
    """The local gradient set. `begin`, for each backward `before_backward` and `after_backward`, `end`; all from one thread.

    `on_bucket(i)` is called from whatever thread finishes bucket i, in the order from the last bucket to the first.
    """

    def __init__(
        self,
        named: Named,
        bucket_bytes: int,
        marks: StreamMarks,
        tensor: TensorGradients | None = None,
        group: InnerGroup | None = None,
    ) -> None:
        """`tensor`: what is summed over tp ranks; `group`: the ranks over which FSDP2 sums the gradients of DTensors, and gives
        them in their placements; the others are summed here."""
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        parts = [(name, local(parameter)) for name, parameter in named]
        self._tensor, self._group = tensor, group
        whole = [False] * len(parts) if tensor is None else tensor.whole
        scalar = [group is not None and is_scalar(parameter) for parameter in self.parameters]
        slots, shapes = _lay_out(parts, bucket_bytes, list(zip(scalar, whole, strict=True)))
        self._bucket_of, self._starts = [slot.bucket for slot in slots], [slot.start for slot in slots]
        self._summed = {bucket for bucket, there in zip(self._bucket_of, whole, strict=True) if there}
        self._summed_last = {bucket for bucket, there in zip(self._bucket_of, scalar, strict=True) if there}
        # DTensors whose gradient autograd accumulates: in a placement that may be another than theirs, so it is added here
        self._added = {i for i, p in enumerate(self.parameters) if tensor is not None and group is None and is_sharded(p)}
        self.flat = [torch.zeros(max(1, size), dtype=dtype, device=device) for size, dtype, device in shapes]
        # `data` has a version counter of its own, and so has each view of it; the local part of a DTensor shares its view's.
        self.views = [_like(p, self.flat[s.bucket].data, s.start) for (_, p), s in zip(parts, slots, strict=True)]
        self._grads = [over(v, p) if is_sharded(p) else v for p, v in zip(self.parameters, self.views, strict=True)]
        self._sizes = [self._bucket_of.count(bucket) for bucket in range(len(self.flat))]
        self._marks, self._lock = marks, threading.RLock()
        self._on_bucket: Callable[[int], None] = lambda bucket: None
        self._working = self._backward = self._last = self._own = False
        self._reached: set[int] = set()  # parameters with a gradient of the newest backward
        self._several: Collection[int] = ()  # ids of parameters of which it may give several
        self._fault = ""  # the first thing a hook found wrong
        self.present = [False] * len(self.parameters)  # has a gradient in this batch
        self._final = [False] * len(self.parameters)
        self._versions = [0] * len(self.parameters)
        self._open: list[int] = []
        self._next = -1
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(index)) for index, parameter in enumerate(self.parameters)
        ]

    @property
    def nbytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flat)

    def begin(self, on_bucket: Callable[[int], None]) -> None:
        """A batch begins: discard the gradients of the one before."""
        with self._lock:
            for parameter in self.parameters:
                parameter.grad = None
            count = len(self.parameters)
            self.present, self._final = [False] * count, [False] * count
            self._versions = versions(self._grads)
            self._open, self._next = list(self._sizes), len(self.flat) - 1
            self._on_bucket, self._fault = on_bucket, ""
            self._working, self._backward, self._last = True, False, False
            if self._tensor is not None:
                self._tensor.begin()

    @property
    def expects(self) -> bool:
        """Between `before_backward` and `after_backward`."""
        return self._backward

    @property
    def reached(self) -> bool:
        """The newest backward has given a gradient."""
        return bool(self._reached)

    def before_backward(self, last: bool, own: bool = False, several: Collection[int] = ()) -> None:
        """A backward begins; `last`: gradients that it gives are final, those of parameters `several` (ids) once it has ended.
        `own`: the user calls it, once, at some later time."""
        if not self._working:
            raise MisuseError("backward was called outside a step; call it once per micro-batch, before the step's commit")
        if self._last:
            raise MisuseError("backward was called after the step's last micro-batch, whose gradients are being exchanged")
        self.check()
        self._backward, self._last, self._own, self._several = True, last, own, several
        self._reached.clear()
        for index in self._added:
            self.parameters[index].grad = None

    def after_backward(self) -> None:
        self._backward = False
        for index in self._added:
            if self.present[index]:
                self.parameters[index].grad = self._grads[index]

    def end(self) -> None:
        """All backwards are done: gradients that none has given are zero, and final. Every bucket is handed out on return.
        Raises Retryable if a rank of the replica is lost."""
        if not self._last:
            raise MisuseError("the step ends without a backward of its last micro-batch; call step.backward(loss) for each")
        self.check()
        with self._lock:
            for index, present in enumerate(self.present):
                if not present:
                    self.views[index].zero_()
                    self._marks.wrote(self._bucket_of[index], self.views[index].device)
                if not self._final[index]:
                    self._finish(index)
            self._hand_out(wait=True)
            self._working = False
        if self._tensor is not None:
            self._tensor.check()

    def check(self) -> None:
        """Raises MisuseError for a gradient that was not made by the step's backwards alone."""
        self.check_fault()
        now = versions(self._grads)
        for index, (parameter, mine, present) in enumerate(zip(self.parameters, self._grads, self.present, strict=True)):
            gradient = parameter.grad
            if present and (gradient is not mine or now[index] != self._versions[index]):
                raise MisuseError(self._changed(index))
            if not present and gradient is not None:
                raise MisuseError(f"the gradient of {self.names[index]} was set by hand; gradients come from step.backward")

    def check_fault(self) -> None:
        """Raises MisuseError for what a hook found wrong since `begin`."""
        if self._fault:
            raise MisuseError(self._fault)

    def _changed(self, index: int) -> str:
        when = "after its bucket was handed out" if self._final[index] else "within the step"
        return (
            f"the gradient of {self.names[index]} was changed {when}: it is one replica's part, and not the mean that the "
            "update uses. Clip with register(clip_norm=...) or prepare(clip_norm=...), change gradients in a function "
            "registered as the session's update, and do not call zero_grad() in the loop"
        )

    def install(self, sums: Sequence[torch.Tensor], weight: float, present: Sequence[bool]) -> None:
        """Copy `sums / weight`, laid out as `flat`, over the local set; a parameter without gradient anywhere gets None."""
        for flat, total in zip(self.flat, sums, strict=True):
            if total.device != flat.device:  # kept or fetched in host memory
                flat.copy_(total).div_(weight)
            elif weight != 1.0:
                torch.div(total, weight, out=flat)
            elif total is not flat:
                flat.copy_(total)
        self._set(present)

    def drop(self) -> None:
        """No parameter has a gradient."""
        self._set([False] * len(self.parameters))

    def _set(self, present: Sequence[bool]) -> None:
        self._working = False
        for parameter, gradient, there in zip(self.parameters, self._grads, present, strict=True):
            parameter.grad = gradient if there else None

    def close(self) -> None:
        """Take the hooks away; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---------------------------------------------------------------- in backward, on any thread

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        view, mine, bucket = self.views[index], self._grads[index], self._bucket_of[index]
        tensor = self._tensor if index in self._added else None
        plain, device, wrote = not is_sharded(mine), view.device, self._marks.wrote
        on_host = isinstance(self._marks, HostMarks)  # which marks nothing

        def accumulated(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if not self._backward:
                self._found(self._outside(index))
            elif self._own and index in self._reached:
                self._found(
                    f"a second backward in one micro-batch reached {self.names[index]}; add the losses, and call it once"
                )
            elif self._final[index]:
                self._found(
                    f"the gradient of {self.names[index]} was added to after its bucket was handed out (a second pass within "
                    "one backward: use torch.utils.checkpoint with use_reentrant=False)"
                )
            elif tensor is not None and index in self._reached:
                self._found(
                    f"one backward gave {self.names[index]}, which is cut over tp ranks, two gradients (use "
                    "torch.utils.checkpoint with use_reentrant=False)"
                )
            elif gradient is None or gradient.layout is not torch.strided:
                self._found(f"{self.names[index]} has a sparse gradient, which replicas cannot sum; use sparse=False")
            elif gradient is not mine and self.present[index] and tensor is None:
                self._found(self._changed(index))
            else:
                if gradient is not mine:  # one copy costs less than zeroing and adding, and keeps the sign of zeros
                    given = gradient.detach() if gradient.requires_grad else gradient
                    if tensor is not None:
                        given = tensor.part(index, given, parameter)
                    elif not plain:
                        given = local(given)
                    view.copy_(given) if not self.present[index] else view.add_(given)
                    parameter.grad = mine
                self.present[index], self._versions[index] = True, mine._version if plain else version(mine)
                self._reached.add(index)
                if not on_host:
                    wrote(bucket, device)
                if self._last and id(parameter) not in self._several:
                    with self._lock:
                        self._finish(index)

        return accumulated

    def _outside(self, index: int) -> str:
        if self._own:
            return f"a backward after optimizer.step() reached {self.names[index]}; call it before, once in each micro-batch"
        more = ", nor torch.autograd.grad through the model: with dp_shard, gradients are summed in every backward"
        return (
            f"a backward outside step.backward(loss) reached {self.names[index]}; do not call loss.backward()"
            f"{'' if self._group is None else more}"
        )

    def _found(self, fault: str) -> None:
        self._fault = self._fault or fault

    def _finish(self, index: int) -> None:
        self._final[index] = True
        bucket = self._bucket_of[index]
        self._open[bucket] -= 1
        if self._open[bucket] == 0 and bucket in self._summed:
            self._start_sum(bucket)
        self._hand_out()

    def _start_sum(self, bucket: int) -> None:
        assert self._tensor is not None
        members = [index for index, its in enumerate(self._bucket_of) if its == bucket]
        self._marks.handed_out(bucket)
        self._marks.wait(bucket)  # for what other streams have written
        views = [(index, self._starts[index], self.views[index], self.present[index]) for index in members]
        self._tensor.start(bucket, self.flat[bucket], views)

    def _hand_out(self, wait: bool = False) -> None:
        """Buckets that are final, in their order; `wait` for sums over tp ranks."""
        while self._next >= 0 and self._open[self._next] == 0:
            bucket = self._next
            if self._tensor is not None and bucket in self._summed:
                if not self._tensor.finished(bucket, wait):
                    return
                self._marks.wrote(bucket, self.flat[bucket].device)
            if self._group is not None and bucket in self._summed_last:
                if not wait:  # no collective in backward, where FSDP2 has its own
                    return
                self._marks.handed_out(bucket)
                self._marks.wait(bucket)
                self.flat[bucket].copy_(self._group.sum(self.flat[bucket]))
                self._marks.wrote(bucket, self.flat[bucket].device)
            self._next -= 1
            self._marks.handed_out(bucket)
            self._on_bucket(bucket)


def _lay_out(
    named: Sequence[tuple[str, torch.Tensor]], bucket_bytes: int, whole: Sequence[tuple[bool, bool]]
) -> tuple[list[Slot], list[tuple[int, torch.dtype, torch.device]]]:
    """A slot for each parameter, and (elements, dtype, device) of each bucket: first the buckets of parameters that
    dp_shard ranks hold whole, which have no others, then those that tp ranks do, then the rest, in the order of their first
    parameters. `whole`: over dp_shard, over tp."""
    kinds: dict[tuple[torch.dtype, torch.device, tuple[bool, bool]], list[int]] = {}
    for index, (_, parameter) in enumerate(named):
        kinds.setdefault((parameter.dtype, parameter.device, whole[index]), []).append(index)
    found: list[tuple[int, int, torch.dtype, torch.device, list[tuple[int, Slot]]]] = []  # first parameter, …
    for (dtype, device, _), members in kinds.items():
        slots, sizes = lay_out([named[index] for index in members], bucket_bytes, first_bytes=min(FIRST_BYTES, bucket_bytes))
        for bucket, size in enumerate(sizes):
            inside = [(index, slot) for index, slot in zip(members, slots, strict=True) if slot.bucket == bucket]
            found.append((inside[0][0], size, dtype, device, inside))
    found.sort(key=lambda each: ([not there for there in whole[each[0]]], each[0]))
    placed: dict[int, Slot] = {}
    for number, (_, _, _, _, inside) in enumerate(found):
        placed |= {index: Slot(slot.name, number, slot.start, slot.shape) for index, slot in inside}
    return [placed[index] for index in range(len(named))], [(size, dtype, device) for _, size, dtype, device, _ in found]


def _like(parameter: torch.Tensor, flat: torch.Tensor, start: int) -> torch.Tensor:
    """The part of `flat` from `start`, with the parameter's shape, and its strides where these leave no gaps: sums over
    elements depend on the order in memory."""
    stride = torch.empty_like(parameter, device="meta").stride()
    return torch.as_strided(flat, parameter.shape, stride, start)
