"""What stages of one replica say to each other: tensors with a tag, matched by tag alone.

In: `send(tag, tensor)` and `recv(tag, like)` on either end of a channel, in any order. Out: handles, and a
SEND or RECV event in the flight record for every message. The implementation here stands on the
point-to-point calls of a torch.distributed process group (Gloo).
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist

from helixrt.errors import Cause, Retryable
from helixrt.record import FlightRecord, Kind


class Lane(StrEnum):
    """What a message is: activations forward, gradients backward, or what is shared once a step."""

    F = "F"
    B = "B"
    LOSS = "loss"
    TIED = "tied"
    NORM = "norm"


@dataclass(frozen=True)
class Tag:
    """The name of a message between two stages. `chunk` is the chunk that takes the tensor in.

    `step` numbers the passes through the pipeline (training, evaluation and update alike).
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

    @abstractmethod
    def send(self, tag: Tag, tensor: torch.Tensor) -> SendHandle:
        """Start sending a contiguous tensor."""

    @abstractmethod
    def recv(self, tag: Tag, like: torch.Tensor) -> RecvHandle:
        """Expect a tensor of the shape and dtype of `like` (whose contents do not matter)."""

    @abstractmethod
    def close(self) -> None:
        """Give up threads; idempotent. Messages that have not arrived may be lost."""


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
        raise ValueError(f"tag {tag}: at most {MAX_CHUNKS} chunks and {MAX_MICROBATCHES} micro-batches can be told apart")
    number = tag.step % (1 << _STEP_BITS)
    number = number << _MICROBATCH_BITS | tag.microbatch
    number = number << _CHUNK_BITS | tag.chunk
    return number << 3 | _LANES.index(tag.lane)


class GroupChannel(Channel):
    """A channel to rank `peer` of a process group.

    A thread waits for sends in the order they were queued, so that tensors are let go and times are
    taken when messages leave, not when somebody asks. `detail` of a SEND event has `begun_s`, of a RECV
    event `needed_s` (when the receiver began to wait: an arrival right after it may have been earlier).
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, record: FlightRecord) -> None:
        self.group, self.peer, self.record = group, peer, record
        self._sends: queue.SimpleQueue[_GroupSend | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, tag: Tag, tensor: torch.Tensor) -> SendHandle:
        if self._thread is None:
            self._thread = threading.Thread(target=self._let_go, name=f"sends-to-stage-{self.peer}", daemon=True)
            self._thread.start()
        tensor = tensor.detach()
        queued_s = self.record.clock()
        handle = _GroupSend(self, tag, tensor, queued_s)
        try:
            handle.work = self.group.send([tensor], self.peer, wire_tag(tag))
        except RuntimeError as error:
            raise self.lost(error) from error
        self._sends.put(handle)
        return handle

    def recv(self, tag: Tag, like: torch.Tensor) -> RecvHandle:
        tensor = torch.empty(like.shape, dtype=like.dtype)
        posted_s = self.record.clock()
        try:
            work = self.group.recv([tensor], self.peer, wire_tag(tag))
        except RuntimeError as error:
            raise self.lost(error) from error
        return _GroupRecv(self, tag, tensor, work, posted_s)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._sends.put(None)
            thread.join(timeout=5.0)  # one that waits for a lost peer ends with the group's own timeout

    def lost(self, error: Exception) -> Retryable:
        what = f"stage {self.peer} of this replica cannot be reached: {error}".splitlines()[0]
        return Retryable(Cause(what, self.record.rank))

    def _let_go(self) -> None:
        while (handle := self._sends.get()) is not None:
            begun_s = self.record.clock()
            try:
                assert handle.work is not None
                handle.work.wait()
            except RuntimeError as error:
                handle.error = self.lost(error)
            else:
                self.record.write(
                    Kind.SEND,
                    begin_s=handle.queued_s,
                    tag=str(handle.tag),
                    bytes=handle.nbytes,
                    begun_s=begun_s,
                )
            handle.tensor = handle.work = None
            handle.gone.set()


class _GroupSend(SendHandle):
    def __init__(self, channel: GroupChannel, tag: Tag, tensor: torch.Tensor, queued_s: float) -> None:
        self.channel, self.tag, self.queued_s = channel, tag, queued_s
        self.tensor: torch.Tensor | None = tensor  # keeps the memory alive
        self.nbytes = tensor.nbytes
        self.work: dist.Work | None = None
        self.error: Retryable | None = None
        self.gone = threading.Event()

    def wait(self) -> None:
        self.gone.wait()  # bounded by the group's timeout
        if self.error is not None:
            raise self.error


class _GroupRecv(RecvHandle):
    def __init__(self, channel: GroupChannel, tag: Tag, tensor: torch.Tensor, work: dist.Work, posted_s: float) -> None:
        self.channel, self.tag, self.tensor, self.work, self.posted_s = channel, tag, tensor, work, posted_s

    def wait(self) -> torch.Tensor:
        record = self.channel.record
        needed_s = record.clock()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.channel.lost(error) from error
        record.write(Kind.RECV, begin_s=self.posted_s, tag=str(self.tag), bytes=self.tensor.nbytes, needed_s=needed_s)
        return self.tensor
