"""When a bucket (of gradients, or of the book) is final on an accelerator: events of the streams that wrote it.

Calls return before the device has computed. So each hook of backward notes the stream it ran on, and `end` the one on which it
filled the book. The hand-out of a bucket records an event on each of them, and the exchange thread makes its own stream wait
for these events before it reads. Nobody blocks the host. On the CPU a tensor is final when the call returns, and nothing is
recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class StreamMarks(ABC):
    """Marks of one set of buckets. `wrote` and `handed_out` come from threads that compute, `wait` from the exchange thread."""

    @abstractmethod
    def wrote(self, bucket: int, device: torch.device) -> None:
        """The current stream of the calling thread has work that writes into this bucket."""

    @abstractmethod
    def handed_out(self, bucket: int) -> None:
        """The bucket is final once the work so far is done."""

    @abstractmethod
    def wait(self, bucket: int) -> None:
        """Work that is queued from now on, on the calling thread's current streams, comes after the hand-out."""


class HostMarks(StreamMarks):
    """For tensors that are computed when the call returns."""

    def wrote(self, bucket: int, device: torch.device) -> None:
        pass

    def handed_out(self, bucket: int) -> None:
        pass

    def wait(self, bucket: int) -> None:
        pass


class CudaMarks(StreamMarks):
    """For CUDA devices; buckets elsewhere need no marks and get none."""

    def __init__(self) -> None:
        self._streams: dict[int, dict[int, torch.cuda.Stream]] = {}
        self._events: dict[int, list[tuple[torch.device, Any]]] = {}

    def wrote(self, bucket: int, device: torch.device) -> None:
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._streams.setdefault(bucket, {})[stream.cuda_stream] = stream

    def handed_out(self, bucket: int) -> None:
        events = []
        for stream in self._streams.pop(bucket, {}).values():
            event = torch.cuda.Event()
            event.record(stream)
            events.append((stream.device, event))
        self._events[bucket] = events

    def wait(self, bucket: int) -> None:
        for device, event in self._events.get(bucket, ()):
            torch.cuda.current_stream(device).wait_event(event)


def marks_for(devices: set[torch.device]) -> StreamMarks:
    return CudaMarks() if any(device.type == "cuda" for device in devices) else HostMarks()
