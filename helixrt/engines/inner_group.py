"""The ranks of one axis of a replica: what FSDP2 or DTensor cuts over, and exchanges whose result is the same on all of them.

In: a one-dimensional device mesh. Out: tensors of all ranks, in the order of their ranks, so that each rank that sums them gets
the same bits; and sums that go on while the rank computes. A rank that is lost makes every call of the others fail with
Retryable: a replica leaves and returns whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from helixrt.errors import Retryable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_FUNCTIONAL = "_c10d_functional."  # the namespace of collectives that are operators


class PendingSum:
    """A sum in place that was begun; its tensor is left alone until `wait` has returned."""

    def __init__(self, work: Any, failed: RuntimeError | None = None) -> None:
        self._work, self._failed = work, failed

    def is_done(self) -> bool:
        """Whether `wait` will not block; False for one that failed."""
        return self._failed is None and self._work.is_completed()

    def wait(self) -> None:
        """Until the sum is there; on a device, for work that is queued from now on. Raises Retryable if a rank is lost."""
        try:
            if self._failed is not None:
                raise self._failed
            self._work.wait()
        except RuntimeError as error:
            raise Retryable(f"a rank of this replica is lost: {_first_line(error)}") from error


class InnerGroup:
    """All ranks call the same methods in the same order, from the thread that computes."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group()

    def gather(self, mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`mine` of every rank, in their order; the shape and dtype must be equal everywhere. Raises Retryable if a rank is
        lost."""
        if self.size == 1 or mine.numel() == 0:
            return tuple(mine.detach().clone() for _ in range(self.size))
        everything = mine.new_empty((self.size, *mine.shape)).unbind(0)
        try:
            dist.all_gather(list(everything), mine.detach().contiguous(), group=self._group)
        except RuntimeError as error:
            raise Retryable(f"a rank of this replica is lost: {_first_line(error)}") from error
        return everything

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, added up in their order. Raises Retryable if a rank is lost."""
        first, *others = self.gather(mine)
        total = first.clone()
        for other in others:
            total += other
        return total

    def start_sum(self, flat: torch.Tensor) -> PendingSum:
        """Begin to sum a tensor in place, over all ranks. Never blocks and never raises."""
        try:
            return PendingSum(dist.all_reduce(flat, group=self._group, async_op=True))
        except RuntimeError as error:
            return PendingSum(None, error)

    def mean(self, values: list[float]) -> list[float]:
        """The mean over the ranks of each of these numbers."""
        device = self.mesh.device_type
        return (self.sum(torch.tensor(values, dtype=torch.float64, device=device)) / self.size).tolist()


def lost_rank(error: BaseException) -> str:
    """The reason of a failed collective of torch.distributed, if `error` is one; else "".

    Collectives of FSDP2 and of parallel layers run inside forward and backward, and raise a plain RuntimeError when a rank has
    gone; functional ones are operators, and so raise it where any operator does. DeepSpeed waits for its own in its modules.
    """
    traceback = error.__traceback__
    if traceback is None or not isinstance(error, RuntimeError):
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    module = frame.f_globals.get("__name__", "")
    operator = str(frame.f_locals.get("self")) if module == "torch._ops" else ""
    known = module.startswith("torch.distributed.") or operator.startswith(_FUNCTIONAL)
    if module.startswith("deepspeed."):  # which raises other errors, too
        known = isinstance(error, dist.DistError) or "/gloo/" in str(error)
    return _first_line(error) if known else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
