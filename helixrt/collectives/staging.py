"""CUDA tensors through pinned host memory, so that a communicator and its links see host memory only.

In: the tensors of one call on a card, and which bytes of them the call reads and writes. Out: `Staged`, host tensors to
run the call on and what moves bytes between them and the card: copies in chunks, on side streams, with an event behind
each chunk, so that a chunk can be sent when it has come while later ones are on their way, and a part of the result goes
back while others are still summed (FT-HSDP section 4.2: the GPU stream copies to the send buffer and notifies the CPU).
Nothing synchronises with the whole device. Sums are made on the GPU, of its own memory and the data received in pinned memory
(`staged_operation`), on a third stream.

The order of calls, from the thread that has the caller's current stream unless said otherwise:

    staged = staging.stage(source, out, reads, writes)
    staged.ready(begin, end)          # any thread: may these bytes of `staged.source` be read yet?
    staged.landed(begin, end)         # any thread: these bytes of `staged.out` are final; optional
    staged.finish()                   # any thread: all of `staged.out` is final
    staged.join()                     # what the caller queues from now on sees the result; also after a failure

Pinned memory comes from torch's own cache of it, which keeps a block until the copies that use it are done. Tests
simulate a GPU on the host, with copies in any order; tests marked `gpu` use the lanes of a real one (`CudaLane`).
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from helixrt.collectives.memory import flat, overlap
from helixrt.transport.device_lanes import CudaLane, Lane, Mark
from helixrt.triton_kernels.warm_up import Variant, warm_up

CHUNK_BYTES = 8 << 20  # FT-HSDP section 4.2


Spans = Sequence[tuple[int, int]]  # (begin, end) in bytes, whole elements, sorted and disjoint
Lanes = tuple[Lane, Lane, Lane]  # card to host, host to card, sums


class Staging:
    """Stages the calls of one communicator. Owns three lanes for each card that it has met: in, out, and sums."""

    def __init__(
        self,
        chunk_bytes: int = CHUNK_BYTES,
        make_lane: Callable[[torch.device], Lane] | None = None,
        compile_kernel: Callable[[Variant, torch.device], None] = warm_up,
    ) -> None:
        assert chunk_bytes >= 16, chunk_bytes
        self._compile = compile_kernel
        self._compiled: set[tuple[Variant, torch.device]] = set()
        self._chunk_bytes = chunk_bytes
        self._make_lane = make_lane or CudaLane
        self._lanes: dict[torch.device, Lanes] = {}
        self._lock = threading.Lock()

    def serves(self, tensor: torch.Tensor) -> bool:
        """Whether a call on this tensor needs staging: links reach host memory only."""
        return not tensor.is_cpu

    def stage(self, source: torch.Tensor, out: torch.Tensor, reads: Spans | None = None, writes: Spans | None = None) -> Staged:
        """For a call on contiguous tensors of one device, which may overlap; `reads` of the source and `writes` of the
        result are all that moves (None: everything).

        The source begins to move at once, behind what the current stream of the card has queued. On the host a staged
        call is never in place: a chunk of the result may arrive before a chunk of the source.
        """
        if source.device != out.device:
            raise ValueError(f"source and result must be on one device, got {source.device} and {out.device}")
        if not source.is_contiguous() or not out.is_contiguous():
            raise ValueError("source and result must be contiguous")
        return Staged(flat(source), flat(out), self._lanes_of(source.device), self._chunk_bytes, reads, writes)

    def compile(self, variants: Iterable[Variant], device: torch.device) -> None:
        """See to it that these kernels need not be compiled when they are launched. May take seconds the first time."""
        for variant in variants:
            if (variant, device) not in self._compiled:
                self._compile(variant, device)
                self._compiled.add((variant, device))

    def _lanes_of(self, device: torch.device) -> Lanes:
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = (self._make_lane(device), self._make_lane(device), self._make_lane(device))
            return self._lanes[device]


class Staged:
    """One call's tensors: `source` and `out` are flat host tensors that stand for the caller's.

    Bytes of the source that are not read, and of the result that are not written, are undefined on the host.
    """

    def __init__(
        self,
        source: torch.Tensor,
        out: torch.Tensor,
        lanes: Lanes,
        chunk_bytes: int,
        reads: Spans | None = None,
        writes: Spans | None = None,
    ) -> None:
        self._element = out.element_size()
        self._device_source, self._device_out = source, out
        self._writes = [(0, out.numel() * self._element)] if writes is None else writes
        self._shared = overlap(source, out)
        self._inward, self._outward, self._summing = lanes
        self._lock = threading.Lock()  # of the two below
        self._landed: list[tuple[int, int]] = []  # elements of `out` whose copies are queued: sorted, disjoint
        self._last: Mark | None = None
        self._last_sum: Mark | None = None
        self.source, self.out = self._inward.host_like(source), self._outward.host_like(out)
        self._inward.follow_caller(source)
        self._outward.follow_caller(out)
        for tensor in (source, out):
            self._summing.follow_caller(tensor)
        self._begins: list[int] = []  # bytes of the source: of each chunk that moves
        self._ends: list[int] = []
        self._marks: list[Mark] = []
        chunk = max(1, chunk_bytes // self._element)
        for first, last in [(0, source.numel() * self._element)] if reads is None else reads:
            assert first % self._element == 0 and last % self._element == 0, (first, last)
            for begin in range(first // self._element, last // self._element, chunk):
                end = min(begin + chunk, last // self._element)
                self._begins.append(begin * self._element)
                self._ends.append(end * self._element)
                self._marks.append(self._inward.copy(self.source[begin:end], source[begin:end]))

    def ready(self, begin: int, end: int) -> bool:
        """Whether bytes `begin` to `end` of `source` have come; never blocks."""
        return all(mark.passed() for mark in self._marks_of(begin, end))

    def wait(self) -> None:
        """Block this thread until all of `source` has come."""
        for mark in self._marks:
            mark.wait()

    def landed(self, begin: int, end: int) -> None:
        """Bytes `begin` to `end` of `out`, whole elements, are final: their copy to the card is queued.

        Bytes that landed before are left out.
        """
        assert begin % self._element == 0 and end % self._element == 0, (begin, end)
        with self._lock:
            for first, last in self._missing(begin // self._element, end // self._element):
                if self._shared:  # it replaces what is still to come from there: two lanes have no order between them
                    for mark in self._marks:
                        self._outward.follow(mark)
                self._last = self._outward.copy(self._device_out[first:last], self.out[first:last])
                self._landed = _with(self._landed, first, last)

    def on_card(self, source: bool, begin: int, end: int) -> torch.Tensor:
        """Bytes `begin` to `end` of the caller's source, or of its result."""
        tensor = self._device_source if source else self._device_out
        return tensor[begin // self._element : end // self._element]

    def sum(self, work: Callable[[], object], written: tuple[int, int] | None) -> Mark:
        """Queue a reduction behind what the caller had queued; it writes these bytes of the caller's result as well."""
        with self._lock:
            if written is not None:
                first, last = written[0] // self._element, written[1] // self._element
                assert self._missing(first, last) == [(first, last)], "written twice"
                if self._shared:  # it replaces what is still to come from there
                    for mark in self._marks:
                        self._summing.follow(mark)
                self._landed = _with(self._landed, first, last)
            self._last_sum = self._summing.run(work)
            return self._last_sum

    def scratch(self, size: int) -> torch.Tensor:
        """Host memory of so many bytes that the card reaches."""
        return self._inward.host_like(torch.empty(size, dtype=torch.uint8, device="meta"))

    def finish(self, then: Callable[[], object] | None = None) -> None:
        """All of `out` is final: what has not landed yet does; `then` works on it on the card. Not for a call that failed."""
        for begin, end in self._writes:
            self.landed(begin, end)
        if then is not None:
            if self._last_sum is not None:
                self._outward.follow(self._last_sum)
            self._last = self._outward.run(then)

    def give_up(self, *scratch: torch.Tensor) -> None:
        """The call failed. Sums that are queued end by themselves and use host memory until then."""
        for host in (self.out, *scratch):
            self._summing.hold(host)

    def join(self) -> None:
        """What the caller's current stream does next sees the result, or, of a call that failed, is not written over by
        what was queued for it. Does not block."""
        for lane, last in ((self._outward, self._last), (self._summing, self._last_sum)):
            if last is not None:
                lane.lead_caller(last)

    def _marks_of(self, begin: int, end: int) -> list[Mark]:
        if begin >= end:
            return []
        return self._marks[bisect.bisect_right(self._ends, begin) : bisect.bisect_left(self._begins, end)]

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
