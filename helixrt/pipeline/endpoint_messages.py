"""Messages of stage channels over endpoints: what one looks like on its way, and what both sides know of it.

In: a tensor and its tag. Out: the name that endpoints match it by, the header before its bytes, and the state of a message that
goes out or comes in.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import torch

from helixrt.pipeline.channels import Tag, wire_tag
from helixrt.pipeline.in_order import Communication
from helixrt.pipeline.stage_queue import Name
from helixrt.transport.contract import Buffer
from helixrt.transport.device_lanes import Mark

HEADER = struct.Struct("<ddq?")  # queued, begun (Unix times), the sender's step, whether the arrival is to be reported
HEADER_BYTES = 64  # tensors behind it are aligned
_INDEX_BITS = 20  # of `wire_tag`, without its step
ACKNOWLEDGES = 1 << _INDEX_BITS  # in a name: reports to the sender of the message of the same name that it arrived


def name_of(tag: Tag) -> Name:
    return tag.step, wire_tag(tag) % (1 << _INDEX_BITS)


def bytes_of(buffer: torch.Tensor) -> Buffer:
    return buffer.numpy().data


def tensor_in(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[HEADER_BYTES:].view(like.dtype).view(like.shape)


@dataclass(eq=False)
class Outgoing:
    """`tensor` is the stage's until it is copied, then None; on a device it is there once `made` has passed."""

    peer: int
    tag: Tag
    step: int
    queued_s: float
    tensor: torch.Tensor | None
    bytes: int
    wants_arrival: bool
    made: Mark | None = None
    begun_s: float = math.nan
    copy_s: float = math.nan
    communication: Communication = field(default_factory=Communication)


@dataclass(eq=False)
class Incoming:
    """`due_s`: when it may be seen (monotonic), `arrived_s` the same as Unix time; NaN until it is here. `needed_s`: since when
    the stage waits for it, NaN until it does."""

    peer: int
    tag: Tag
    buffer: torch.Tensor
    posted_s: float
    sent_s: float = math.nan
    queued_s: float = math.nan
    arrived_s: float = math.nan
    due_s: float = math.nan
    needed_s: float = math.nan
    communication: Communication = field(default_factory=Communication)

    @property
    def here(self) -> bool:
        return self.due_s == self.due_s
