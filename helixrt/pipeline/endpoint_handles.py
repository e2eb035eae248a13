"""A stage's channel to one peer over endpoints, and the handles of its messages.

In: the channels of the stage (`endpoint_channels`). Out: the contract of `channels`, each call carried out there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helixrt.pipeline.channels import RecvHandle, SelectableChannel, SendHandle, Tag
from helixrt.pipeline.endpoint_messages import Incoming, Outgoing
from helixrt.record import Kind

if TYPE_CHECKING:
    from helixrt.pipeline.endpoint_channels import StageChannels


class EndpointChannel(SelectableChannel):
    def __init__(self, channels: StageChannels, peer: int) -> None:
        self.channels, self.peer = channels, peer

    @property
    def expects_all(self) -> bool:
        return True  # else what waits for it at the sender takes up the room, or the place in the queue, of what is needed next

    def send(self, tag: Tag, tensor: torch.Tensor) -> SendHandle:
        return _EndpointSend(self.channels, self.channels.send(self.peer, tag, tensor))

    def recv(self, tag: Tag, like: torch.Tensor) -> RecvHandle:
        return _EndpointRecv(self.channels, self.channels.recv(self.peer, tag, like), like)

    def first(self, groups: Sequence[Sequence[RecvHandle]]) -> int:
        return self.channels.wait_first([[h.message for h in group if isinstance(h, _EndpointRecv)] for group in groups])

    def settle(self) -> None:
        self.channels.settle([self.peer])

    def close(self) -> None:
        self.channels.close()


@dataclass(slots=True)
class _EndpointSend(SendHandle):
    channels: StageChannels
    message: Outgoing

    def wait(self) -> None:
        self.channels.wait_copied(self.message)


@dataclass(slots=True)
class _EndpointRecv(RecvHandle):
    channels: StageChannels
    message: Incoming
    like: torch.Tensor

    def wait(self) -> torch.Tensor:
        message, record = self.message, self.channels.record
        needed_s = record.clock() if math.isnan(message.needed_s) else message.needed_s
        self.channels.wait_here(message)
        tensor = self.channels.taken(message, self.like)
        record.write(
            Kind.RECV,
            begin_s=message.posted_s,
            tag=str(message.tag),
            bytes=tensor.nbytes,
            needed_s=needed_s,
            arrived_s=message.arrived_s,
            sent_s=message.sent_s,
            queued_s=message.queued_s,
        )
        return tensor
