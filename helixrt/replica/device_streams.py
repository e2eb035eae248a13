"""Streams of accelerators for threads that work beside the one that trains.

In: tensors on accelerators. Out: streams of a thread's own, and points of another thread's streams to wait for. A thread begins
on the device's default stream. There the training thread has queued its forward and backward: whatever another thread queues
behind them waits for all of that, and holds up what comes next. In host memory nothing is queued, and nothing is done here.

The training thread queues the copies for a checkpoint on other streams, too (`copying`): they run beside the next forward and
backward, and the next update comes after them (`settle`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class DeviceStreams:
    """Of the devices of these tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {tensor.device: None for tensor in tensors if tensor.device.type != "cpu"}
        self._devices = {device: module_of(device) for device in devices}
        self._copied = Point([])  # behind what `copying` has queued last; the training thread's own
        self._copies: dict[torch.device, Any] = {}  # its streams: torch has 32 of a device, and gives them again in turn

    @contextmanager
    def own(self) -> Iterator[None]:
        """Around all work of a thread: its current streams are streams of its own. At the end that work is done."""
        with self._others():
            yield
            self.finish()

    @contextmanager
    def copying(self) -> Iterator[Point]:
        """Of the training thread: what it queues within this comes behind what it has queued before, and beside what it queues
        later. Gives the point behind these copies, to wait for after this."""
        written, copied = self.point(), Point([])
        with ExitStack() as stack:
            for device, module in self._devices.items():
                if device not in self._copies:
                    self._copies[device] = module.Stream(device)
                stack.enter_context(module.stream(self._copies[device]))
            written.follow()
            yield copied
            copied.events = self.point().events
        self._copied = copied

    def settle(self) -> None:
        """Of the training thread: what it queues from now on comes after the copies. Does not block."""
        copied, self._copied = self._copied, Point([])
        copied.follow()

    @contextmanager
    def _others(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device, module in self._devices.items():
                stack.enter_context(module.stream(module.Stream(device)))
            yield

    def finish(self) -> None:
        """Wait until what the calling thread has queued on its current streams is done."""
        for device, module in self._devices.items():
            module.current_stream(device).synchronize()

    def point(self) -> Point:
        """Behind what the calling thread has queued on its current streams."""
        return Point(
            [(device, module, module.current_stream(device).record_event()) for device, module in self._devices.items()]
        )


class Point:
    """A point in the work of a thread."""

    def __init__(self, events: list[tuple[torch.device, Any, Any]]) -> None:
        self.events = events

    def follow(self) -> None:
        """What the calling thread queues from now on comes after this point. Does not block."""
        for device, module, event in self.events:
            module.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Return when the work before this point is done; from any thread."""
        for _, _, event in self.events:
            event.synchronize()


def module_of(device: torch.device) -> Any:
    """torch's module for this kind of accelerator, such as `torch.cuda`."""
    return torch.get_device_module(device)
