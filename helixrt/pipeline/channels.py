"""What stages of one replica say to each other: tensors with a tag, matched by tag alone.

In: `send(tag, tensor)` and `recv(tag, like)` on either end of a channel, in any order. Out: handles, and a
SEND or RECV event in the flight record for every message. The implementation here stands on the
point-to-point calls of a torch.distributed process group (Gloo); `endpoint_channels` stands on the project's endpoints.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist

from helixrt.errors import Cause, Retryable
from helixrt.record import FlightRecord, Kind

CPU = torch.device("cpu")
AHEAD_BYTES = 1 << 30  # of messages that a stage expects before it needs them, at most


class Lane(StrEnum):
    """What a message is: activations forward, gradients backward, or what is shared once a step."""

    F = "F"
    B = "B"
    LOSS = "loss"
    TIED = "tied"
    NORM = "norm"
    BATCH = "batch"  # what a batch is like


@dataclass(frozen=True)
class Tag:
    """The name of a message between two stages. `chunk` is the chunk that takes the tensor in.

    `step` numbers the passes through the pipeline (training, evaluation and update).
    """

    generation: int
    step: int
    chunk: int
    microbatch: int
    lane: Lane

    def __str__(self) -> str:
        return f"g{self.generation}.s{self.step}.c{self.chunk}.m{self.microbatch}.{self.lane.value}"


class SendHandle(ABC):
    """A message on its way out. The tensor belongs to the channel until `wait` has returned."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the tensor may be reused. Raises Retryable when the peer is lost."""


class RecvHandle(ABC):
    """A message that is expected."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """The tensor, once it is there; it is the caller's. Raises Retryable when the peer is lost."""


class Channel(ABC):
    """A way to one peer and back. Calls come from one thread; neither `send` nor `recv` waits for the peer.

    A tag is used once in each direction. Messages may overtake each other. To expect a message before
    it is needed costs its memory and saves the peer's waiting.
    """

    @property
    def expects_all(self) -> bool:
        """Whether every message must be expected that the peer can have sent: else others of its messages may wait for that
        one for ever."""
        return False

    @abstractmethod
    def send(self, tag: Tag, tensor: torch.Tensor) -> SendHandle:
        """Start sending a contiguous tensor."""

    @abstractmethod
    def recv(self, tag: Tag, like: torch.Tensor) -> RecvHandle:
        """Expect a tensor of the shape and dtype of `like` (whose contents do not matter)."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for all sends that were not waited for. Raises Retryable when the peer is lost."""

    @abstractmethod
    def close(self) -> None:
        """Settle, unless the peer is lost, and give up what is held; idempotent."""


class SelectableChannel(Channel):
    """One of a stage's channels that can wait for messages together."""

    @abstractmethod
    def first(self, groups: Sequence[Sequence[RecvHandle]]) -> int:
        """Wait until all messages of one group are there, from whatever peers of these channels; its number. Their handles then
        return at once, and nobody has to wait for those of the others. The first group has what peers tell of themselves:
        raises Retryable when one of them is lost before that came."""


_LANES = tuple(Lane)
_CHUNK_BITS, _MICROBATCH_BITS, _STEP_BITS = 6, 11, 11
MAX_CHUNKS, MAX_MICROBATCHES = 1 << _CHUNK_BITS, 1 << _MICROBATCH_BITS


def wire_tag(tag: Tag) -> int:
    """The tag as the 31-bit number that a process group matches by.

    Different for any two messages less than 2048 steps apart, and stages are never more than one step
    apart. The generation is left out: a replica's group does not outlive the replica's processes, and a
    replica never keeps messages from one generation to the next.
    """
    if not (0 <= tag.chunk < MAX_CHUNKS and 0 <= tag.microbatch < MAX_MICROBATCHES):
        raise ValueError(f"tag {tag}: at most {MAX_CHUNKS} chunks and {MAX_MICROBATCHES} micro-batches can be distinguished")
    number = tag.step % (1 << _STEP_BITS)
    number = number << _MICROBATCH_BITS | tag.microbatch
    number = number << _CHUNK_BITS | tag.chunk
    return number << 3 | _LANES.index(tag.lane)


class GroupChannel(Channel):
    """A channel to rank `peer` of a process group.

    Gloo does not say when a send is done other than by waiting for it. So a send is let go when its owner waits
    for it, having seen that the peer got it, or in `settle`; its SEND event lasts until then. A message's delay is
    the time from the beginning of its SEND event to the end of its RECV event; where `needed_s` (when the receiver
    began to wait) is just before that end, the message may have come earlier, and was not waited for.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, record: FlightRecord) -> None:
        self.group, self.peer, self.record = group, peer, record
        self._broken = False
        self._unsettled: dict[Tag, _GroupSend] = {}  # keeps works and tensors alive

    def send(self, tag: Tag, tensor: torch.Tensor) -> SendHandle:
        tensor = tensor.detach()
        queued_s = self.record.clock()
        try:
            work = self.group.send([tensor], self.peer, wire_tag(tag))
        except RuntimeError as error:
            raise self._lost(error) from error
        handle = self._unsettled[tag] = _GroupSend(self, tag, tensor, work, queued_s)
        return handle

    def recv(self, tag: Tag, like: torch.Tensor) -> RecvHandle:
        tensor = torch.empty(like.shape, dtype=like.dtype)
        posted_s = self.record.clock()
        try:
            work = self.group.recv([tensor], self.peer, wire_tag(tag))
        except RuntimeError as error:
            raise self._lost(error) from error
        return _GroupRecv(self, tag, tensor, work, posted_s)

    def settle(self) -> None:
        for handle in list(self._unsettled.values()):
            handle.wait()

    def close(self) -> None:
        if not self._broken:
            with contextlib.suppress(Retryable):
                self.settle()
        self._unsettled.clear()

    def wait(self, work: dist.Work) -> None:
        """Wait for one of this channel's works, at most as long as the group's timeout."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def let_go(self, tag: Tag) -> None:
        """Drop a send that is done."""
        self._unsettled.pop(tag, None)

    def _lost(self, error: Exception) -> Retryable:
        self._broken = True
        what = f"stage {self.peer} of this replica cannot be reached: {error}".splitlines()[0]
        return Retryable(Cause(what, self.record.rank))


class _GroupSend(SendHandle):
    def __init__(self, channel: GroupChannel, tag: Tag, tensor: torch.Tensor, work: dist.Work, queued_s: float) -> None:
        self.channel, self.tag, self.queued_s = channel, tag, queued_s
        self._pending: tuple[torch.Tensor, dist.Work] | None = (tensor, work)

    def wait(self) -> None:
        if self._pending is None:
            return
        tensor, work = self._pending
        self.channel.wait(work)
        self._pending = None
        self.channel.let_go(self.tag)
        self.channel.record.write(Kind.SEND, begin_s=self.queued_s, tag=str(self.tag), bytes=tensor.nbytes)


class _GroupRecv(RecvHandle):
    def __init__(self, channel: GroupChannel, tag: Tag, tensor: torch.Tensor, work: dist.Work, posted_s: float) -> None:
        self.channel, self.tag, self.tensor, self.work, self.posted_s = channel, tag, tensor, work, posted_s

    def wait(self) -> torch.Tensor:
        record = self.channel.record
        needed_s = record.clock()
        self.channel.wait(self.work)
        record.write(Kind.RECV, begin_s=self.posted_s, tag=str(self.tag), bytes=self.tensor.nbytes, needed_s=needed_s)
        return self.tensor
