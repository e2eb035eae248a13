"""CUDA tensors through pinned host memory, so that a communicator and its links see host memory only.

In: the tensors of one call, on a card or not. Out: `Staged`, host tensors to run the call on and what moves bytes between
them and the card: copies in chunks, on side streams, with an event behind each chunk, so that a chunk can be sent when
it has come while later ones are on their way (FT-HSDP section 4.2: the GPU stream copies to the send buffer and notifies
the CPU). Nothing synchronises with the whole device. CPU tensors are their own host tensors: nothing is copied.

The order of calls, from the thread that has the caller's current stream unless said otherwise:

    staged = staging.stage(source, out)
    staged.ready(begin, end)          # any thread: may these bytes of `staged.source` be read yet?
    staged.landed(begin, end)         # any thread: these bytes of `staged.out` are final; optional
    staged.finish()                   # any thread: all of `staged.out` is final
    staged.join()                     # what the caller queues from now on sees the result

Pinned memory comes from torch's own cache of it, which keeps a block until the copies that use it are done.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from helixrt.collectives.memory import flat

CHUNK_BYTES = 8 << 20  # FT-HSDP section 4.2


class Mark(ABC):
    """A point in a lane's work."""

    @abstractmethod
    def passed(self) -> bool:
        """Whether the work before it is done; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until it is."""


class Lane(ABC):
    """Copies in one direction between a card and host memory, done in their order and beside everything else."""

    @abstractmethod
    def follow_caller(self, tensor: torch.Tensor) -> None:
        """Later copies come after what the caller has queued, and `tensor` (on the card) lives until they are done."""

    @abstractmethod
    def follow(self, mark: Mark) -> None:
        """Later copies come after `mark`."""

    @abstractmethod
    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Mark:
        """Queue a copy; the mark is behind it."""

    @abstractmethod
    def lead_caller(self, mark: Mark) -> None:
        """What the caller queues from now on comes after `mark`."""

    @abstractmethod
    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flat host memory that copies of this lane can use, as large as `tensor` and of its type."""


class Staging:
    """Stages the calls of one communicator. Owns two lanes for each card that it has met."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, make_lane: Callable[[torch.device], Lane] | None = None) -> None:
        assert chunk_bytes >= 16, chunk_bytes
        self._chunk_bytes = chunk_bytes
        self._make_lane = make_lane or CudaLane
        self._lanes: dict[torch.device, tuple[Lane, Lane]] = {}
        self._lock = threading.Lock()

    def stage(self, source: torch.Tensor, out: torch.Tensor) -> Staged:
        """For a call on contiguous tensors of one device; the same tensor twice for a call in place.

        A source on a card begins to move at once, behind what the current stream of the card has queued. On the host a
        staged call is never in place: a chunk of the result may arrive before a chunk of the source.
        """
        if source.device != out.device:
            raise ValueError(f"source and result must be on one device, got {source.device} and {out.device}")
        if not source.is_contiguous() or not out.is_contiguous():
            raise ValueError("source and result must be contiguous")
        flat_source = flat(source)
        flat_out = flat_source if out is source else flat(out)
        if source.device.type == "cpu":
            return Staged(flat_source, flat_out, None, self._chunk_bytes)
        return Staged(flat_source, flat_out, self._lanes_of(source.device), self._chunk_bytes)

    def _lanes_of(self, device: torch.device) -> tuple[Lane, Lane]:
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = (self._make_lane(device), self._make_lane(device))
            return self._lanes[device]


class Staged:
    """One call's tensors: `source` and `out` are flat host tensors, the caller's own when those are on the host."""

    def __init__(self, source: torch.Tensor, out: torch.Tensor, lanes: tuple[Lane, Lane] | None, chunk_bytes: int) -> None:
        self.source, self.out = source, out
        self._element = out.element_size()
        self._device_out = out
        self._lanes = lanes
        self._chunk = max(1, chunk_bytes // self._element)  # elements
        self._marks: list[Mark] = []  # of the source's chunks
        self._in_place = source.data_ptr() == out.data_ptr()
        self._lock = threading.Lock()  # of the two below
        self._landed: list[tuple[int, int]] = []  # elements of `out` whose copies are queued: sorted, disjoint
        self._last: Mark | None = None
        if lanes is None:
            return
        inward, outward = lanes
        self.source, self.out = inward.host_like(source), outward.host_like(out)
        inward.follow_caller(source)
        outward.follow_caller(out)
        for begin in range(0, source.numel(), self._chunk):
            end = min(begin + self._chunk, source.numel())
            self._marks.append(inward.copy(self.source[begin:end], source[begin:end]))

    def ready(self, begin: int, end: int) -> bool:
        """Whether bytes `begin` to `end` of `source` have come; never blocks."""
        return all(mark.passed() for mark in self._marks_of(begin, end))

    def wait(self) -> None:
        """Block this thread until all of `source` has come."""
        for mark in self._marks:
            mark.wait()

    def landed(self, begin: int, end: int) -> None:
        """Bytes `begin` to `end` of `out`, whole elements, are final: their copy to the card is queued.

        Bytes that landed before are left out. In place, they must not land before the source's have come.
        """
        if self._lanes is None:
            return
        assert begin % self._element == 0 and end % self._element == 0, (begin, end)
        outward = self._lanes[1]
        with self._lock:
            for first, last in self._missing(begin // self._element, end // self._element):
                if self._in_place:  # nor on the card: two lanes have no order between them
                    for mark in self._marks_of(first * self._element, last * self._element):
                        outward.follow(mark)
                self._last = outward.copy(self._device_out[first:last], self.out[first:last])
                self._landed = _with(self._landed, first, last)

    def finish(self) -> None:
        """All of `out` is final: what has not landed yet does. Not to be called for a call that failed."""
        self.landed(0, self.out.numel() * self._element)

    def join(self) -> None:
        """After `finish`: what the caller's current stream does next sees the result. Does not block."""
        if self._lanes is not None and self._last is not None:
            self._lanes[1].lead_caller(self._last)

    def _marks_of(self, begin: int, end: int) -> list[Mark]:
        if not self._marks or begin >= end:
            return []
        chunk = self._chunk * self._element
        return self._marks[begin // chunk : (end - 1) // chunk + 1]

    def _missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of [begin, end) that have not landed."""
        missing = []
        for first, last in self._landed:
            if begin < first and begin < end:
                missing.append((begin, min(first, end)))
            begin = max(begin, last)
        if begin < end:
            missing.append((begin, end))
        return missing


def _with(spans: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Sorted disjoint spans and one more that overlaps none; neighbours become one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted([*spans, (first, last)]):
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


# ---------------------------------------------------------------- on a card


class CudaMark(Mark):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def passed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaLane(Lane):
    """A side stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def follow_caller(self, tensor: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(self._stream)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Mark:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return CudaMark(event)

    def lead_caller(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
