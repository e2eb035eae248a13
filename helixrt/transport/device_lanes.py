"""Lanes: work for a device beside what the caller has queued there, and marks that tell how far it is.

In: a device. Out: `Lane`, whose work is done in its own order, and a `Mark` behind each piece of it. On a CUDA device a lane is
a stream and a mark an event. Nothing here waits for the whole device. Any thread may use them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch


class Mark(ABC):
    """A point in a lane's work."""

    @abstractmethod
    def passed(self) -> bool:
        """Whether the work before it is done; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until it is."""

    @abstractmethod
    def since_s(self, earlier: Mark) -> float:
        """How long the device took from `earlier` to this mark; both have passed, and are of a lane that is `timed`."""


class Lane(ABC):
    """Work of one kind for a GPU, done in its order and beside everything else."""

    @abstractmethod
    def follow_caller(self, tensor: torch.Tensor) -> None:
        """Later work comes after what the caller has queued, and `tensor` (on the GPU) is kept until it is done."""

    @abstractmethod
    def mark_caller(self) -> Mark:
        """A mark behind what the caller has queued."""

    @abstractmethod
    def follow(self, mark: Mark) -> None:
        """Later work comes after `mark`."""

    @abstractmethod
    def run(self, work: Callable[[], object]) -> Mark:
        """Queue what `work` does on the GPU; the mark is behind it."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Mark:
        """Queue a copy; the mark is behind it."""
        return self.run(lambda: into.copy_(source, non_blocking=True))

    @abstractmethod
    def lead_caller(self, mark: Mark, made: torch.Tensor | None = None) -> None:
        """What the caller queues from now on comes after `mark`; it may use `made`, which is memory of this lane's work."""

    @abstractmethod
    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flat host memory that copies of this lane can use, as large as `tensor` and of its type."""

    @abstractmethod
    def hold(self, host: torch.Tensor) -> None:
        """Memory of `host_like` is not used again before this lane's work so far is done, even if nothing refers to it. Copies
        of a lane do so by themselves; torch does not see which host memory a kernel of Triton uses."""

    @abstractmethod
    def device_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory on the device for work of this lane, of the shape and type of `tensor`."""


# ---------------------------------------------------------------- on a GPU


class CudaMark(Mark):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def passed(self) -> bool:
        with torch.cuda.device(self.event.device):  # in a helper thread CUDA might begin to use the first device else
            return self.event.query()

    def wait(self) -> None:
        with torch.cuda.device(self.event.device):
            self.event.synchronize()

    def since_s(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaLane(Lane):
    """A side stream of its own. `timed`: its marks tell times, and a thread that waits for one sleeps."""

    def __init__(self, device: torch.device, timed: bool = False) -> None:
        self._device, self._timed = device, timed
        self._stream = torch.cuda.Stream(device)

    def follow_caller(self, tensor: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(self._stream)

    def mark_caller(self) -> Mark:
        return self._marked(torch.cuda.current_stream(self._device))

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    def run(self, work: Callable[[], object]) -> Mark:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            work()
            return self._marked(self._stream)

    def _marked(self, stream: torch.cuda.Stream) -> CudaMark:
        event = torch.cuda.Event(enable_timing=self._timed, blocking=self._timed)
        event.record(stream)
        return CudaMark(event)

    def lead_caller(self, mark: Mark, made: torch.Tensor | None = None) -> None:
        assert isinstance(mark, CudaMark)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark.event)
        if made is not None:
            made.record_stream(stream)

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)

    def hold(self, host: torch.Tensor) -> None:
        if host.numel():  # a copy behind the other work, which torch's cache of pinned memory sees
            self.run(lambda: torch.empty(1, dtype=host.dtype, device=self._device).copy_(host[:1], non_blocking=True))

    def device_like(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty_like(tensor, device=self._device)
