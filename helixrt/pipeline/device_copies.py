"""Copies between a stage's CUDA device and pinned host memory, beside the stage's work (ADAPTRA, Section 5.2).

In: tensors on the device that a stage sends, and messages in pinned memory that it takes in. Out: the bytes in host memory, and
a call when they are there; tensors on the device, which the caller's later work may use. The thread that computes waits for
neither. A thread of this object waits for the copies to the host, in their order, so that no thread that moves messages does.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from helixrt.errors import Cause
from helixrt.transport.device_lanes import CudaLane, Lane, Mark

_JOIN_S = 5.0

_log = logging.getLogger("helixrt.pipeline")

Copied = Callable[[float], None]  # with the seconds that the copy took
MakeLane = Callable[[torch.device], Lane]  # a timed one


def use(device: torch.device) -> None:
    """The calling thread will work for this device alone: else its calls might begin to use the first one as well."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@dataclass(frozen=True, slots=True)
class _ToHost:
    begin: Mark
    end: Mark
    copied: Copied
    held: tuple[torch.Tensor, torch.Tensor]  # the GPU uses them until `end`


class DeviceCopies:
    """Of the channels of one stage. `failed(cause)` is called in its thread when the device has failed; no copy ends after
    that."""

    def __init__(
        self, device: torch.device, name: str, failed: Callable[[Cause], None], make_lane: MakeLane | None = None
    ) -> None:
        lane = make_lane or (lambda device: CudaLane(device, timed=True))
        self.device, self._out, self._in = device, lane(device), lane(device)
        self._failed, self._lock = failed, threading.Lock()
        self._begun: queue.SimpleQueue[_ToHost | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def mark(self) -> Mark:
        """Behind what the calling thread has queued on the device."""
        return self._out.mark_caller()

    def buffer(self, size: int) -> torch.Tensor:
        """Pinned memory of so many bytes."""
        return self._in.host_like(torch.empty(size, dtype=torch.uint8, device="meta"))

    def to_host(self, made: Mark, into: torch.Tensor, tensor: torch.Tensor, copied: Copied) -> None:
        """Copy a tensor, which is there when `made` has passed, to pinned memory. `copied` is called in the thread of this
        object. Any thread; never blocks."""
        with self._lock:  # so that no copy comes between
            self._out.follow(made)
            begin = self._out.run(lambda: None)
            self._begun.put(_ToHost(begin, self._out.copy(into, tensor), copied, (into, tensor)))

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        """A copy on the device of pinned memory, for what the calling thread queues from now on. Never blocks."""
        made = self._in.device_like(source)
        self._in.lead_caller(self._in.copy(made, source), made)
        return made

    def close(self) -> None:
        """End the thread when all copies to the host are done; idempotent."""
        self._begun.put(None)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.error("%s did not end within %g s: the device does not finish its work", self._thread.name, _JOIN_S)

    def _run(self) -> None:
        try:
            use(self.device)
            while (copy := self._begun.get()) is not None:
                copy.end.wait()
                copy.copied(copy.end.since_s(copy.begin))
                del copy
        except Exception as error:  # raised in the thread that waits for messages, and not reported elsewhere
            _log.exception("%s", self._thread.name)
            self._failed(Cause(f"{self._thread.name} failed: {error!r}"))
