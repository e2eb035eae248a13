"""Channels between stages over the project's endpoints: TCP rails, shared memory, RDMA verbs.

In: connected endpoints, one per queue; which stage this is. Out: a `Channel` to every other stage, and how they communicate:

- **Delegated** (ADAPTRA, Section 5.2): each queue has a thread that copies what is sent to host memory (`host_tier`) and moves
  it; micro-batch m goes by queue m modulo their number, in both directions, so both ends know it without a word. Compute waits
  for what it receives, and for nothing else.
- **Direct** (Sections 3.2 and 5.1): all sends and receives of the stage form one queue in the order of its program
  (`in_order`); compute waits where `helixrt.schedule.simulate.Direct` says so. A send is over when its receiver has reported
  that it arrived. What stages tell each other by several ways (`SelectableChannel.first`) is in no order.

A message is a header (when it was queued and begun, by the sender's clock; the sender's step) and the tensor's bytes. It
arrives when the endpoint has all of it, whether or not it is waited for; `delay` later where a slow link is injected.
Endpoints check names and sizes against what was agreed, and peers prove the run's secret.

Tensors on a CUDA device go through pinned host memory (`device_copies`). What is sent is copied behind the work that was queued
before it, and goes to the endpoint when it is copied. What comes in is copied to the device when it is waited for; the device
does later work after that copy, and the host waits for the arrival alone. Times and order of messages are those of the host.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from helixrt.errors import Cause, MisuseError, Retryable
from helixrt.pipeline.channels import CPU, Lane, SelectableChannel, Tag
from helixrt.pipeline.device_copies import DeviceCopies, MakeLane, use
from helixrt.pipeline.endpoint_handles import EndpointChannel
from helixrt.pipeline.endpoint_messages import (
    ACKNOWLEDGES,
    HEADER,
    HEADER_BYTES,
    Incoming,
    Outgoing,
    bytes_of,
    name_of,
    tensor_in,
)
from helixrt.pipeline.host_tier import HostTier
from helixrt.pipeline.in_order import Communication, InOrder
from helixrt.pipeline.stage_queue import LINGER_S, StageQueue
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.simulate import DELEGATED, Comm, Direct
from helixrt.transport.contract import Endpoint

HOST_BYTES = 1 << 30
TIMEOUT_S = 60.0

_CLOSE_S = 60.0  # `close` waits so long for room for what was begun, at most
_ARRIVED_S = 5.0  # and so long for the word that what was sent directly has arrived
_LINGER_LOST_S = 1.0  # as `LINGER_S`, with a lost peer
_UNORDERED = (Lane.LOSS, Lane.NORM, Lane.BATCH)

Delay = Callable[[int, int], float]  # seconds, by sending stage and its step


class StageChannels:
    """All channels of one stage; closed together. `endpoints` are connected to all other stages, ranks being stages, and are
    closed with them.

    Calls come from the thread that computes. A wait for a peer is at most `timeout_s`. `host_bytes` bounds the host memory of
    messages on their way out; what comes in is bounded by the schedule. `device`: where the stage computes; what it shares once
    a step (`_UNORDERED`) is on the CPU. Raises MisuseError for tensors elsewhere. `make_lane` is for tests.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        stage: int,
        stages: int,
        record: FlightRecord,
        *,
        timeout_s: float = TIMEOUT_S,
        host_bytes: int = HOST_BYTES,
        delay: Delay = lambda source, step: 0.0,
        comm: Comm = DELEGATED,
        device: torch.device = CPU,
        make_lane: MakeLane | None = None,
    ) -> None:
        self.record, self.host = record, HostTier(host_bytes, pinned=device.type == "cuda")
        self.released_s = -math.inf
        """When the newest of those things came about that compute had to wait for, as Unix time."""
        self._timeout_s, self._delay = timeout_s, delay
        self._changed = threading.Condition()
        self._lost: dict[int, Cause] = {}
        self._uncopied: set[Outgoing] = set()
        self._unarrived: set[Outgoing] = set()  # of those that were sent directly
        self._in_order: InOrder | None = None
        self._set(comm)
        self._closed = False
        self._copies: DeviceCopies | None = None
        if device.type != "cpu" or make_lane is not None:
            failed = partial(self._peer_lost, None)
            self._copies = DeviceCopies(device, f"helixrt-stage{stage}-copies", failed, make_lane)
        self._queues = [StageQueue(e, f"helixrt-stage{stage}-queue{i}", self._peer_lost) for i, e in enumerate(endpoints)]
        for queue in self._queues:
            queue.call(lambda queue: use(device))
        self._peers = [peer for peer in range(stages) if peer != stage]
        self.channels: dict[int, SelectableChannel] = {peer: EndpointChannel(self, peer) for peer in self._peers}

    def use(self, comm: Comm) -> None:
        """Communicate so from now on: between two steps, when every message that was sent is taken in or will be. Each stage
        may do so by itself. Raises Retryable when a peer is lost."""
        if (in_order := self._in_order) is not None:
            self._wait(lambda: not in_order, in_order)
        self._set(comm)

    def _set(self, comm: Comm) -> None:
        self._in_order = InOrder(comm.depth) if isinstance(comm, Direct) else None

    def close(self) -> None:
        """Send what was begun to peers that are not lost, and end the threads; idempotent. A peer that has ended its part and
        closed counts as lost, too. This waits for arrivals: a peer that sends its notice of one to a closed end would take this
        stage for lost, possibly in the middle of the peer's work."""
        if self._closed:
            return
        self._closed = True
        living = [peer for peer in self._peers if peer not in self._lost]
        limit_s = linger_s = LINGER_S if len(living) == len(self._peers) else _LINGER_LOST_S if living else 0.0
        with contextlib.suppress(Retryable):
            limit_s = min(self._timeout_s, _CLOSE_S) if linger_s == LINGER_S else linger_s
            self._wait(lambda: not self._uncopied_to(living), living, limit_s)
        with contextlib.suppress(Retryable):
            self._wait(lambda: all(message.peer in self._lost for message in self._unarrived), [], min(limit_s, _ARRIVED_S))
        for queue in self._queues:
            queue.close(linger_s)
        if self._copies is not None:
            self._copies.close()

    # ---- what the channels call, in the thread that computes

    def send(self, peer: int, tag: Tag, tensor: torch.Tensor) -> Outgoing:
        copies = self._copies_of(tag)
        if tensor.device != (where := CPU if copies is None else copies.device):
            raise MisuseError(f"{tag}: the channels of this stage carry tensors on {where}, not on {tensor.device}")
        record, in_order = self.record, None if tag.lane in _UNORDERED else self._in_order
        size, made = tensor.nbytes, None if copies is None else copies.mark()
        message = Outgoing(peer, tag, record.step, record.clock(), tensor.detach(), size, in_order is not None, made)
        with self._changed:
            self._uncopied.add(message)
            if in_order is not None:
                self._unarrived.add(message)
        if in_order is None:
            self._begin(message)
        else:
            message.communication.begin = partial(self._begin, message)
            self._put(in_order, message.communication, peer)
        return message

    def recv(self, peer: int, tag: Tag, like: torch.Tensor) -> Incoming:
        size, copies = HEADER_BYTES + like.nbytes, self._copies_of(tag)
        buffer = torch.empty(size, dtype=torch.uint8, device=CPU) if copies is None else copies.buffer(size)
        message = Incoming(peer, tag, buffer, self.record.clock())
        name, into = name_of(tag), bytes_of(message.buffer)
        self._queue_of(tag).call(lambda queue: queue.receive(peer, name, into, partial(self._came, queue, message)))
        return message

    def taken(self, message: Incoming, like: torch.Tensor) -> torch.Tensor:
        """The tensor of a message that has arrived."""
        tensor, copies = tensor_in(message.buffer, like), self._copies_of(message.tag)
        return tensor if copies is None else copies.to_device(tensor)

    def wait_copied(self, message: Outgoing) -> None:
        """Until the tensor may be reused."""
        if message.tensor is not None:
            self._wait(lambda: message.tensor is None, [message.peer])

    def wait_here(self, message: Incoming) -> None:
        """Until it has arrived, and where communication is direct until its turn has come."""
        if (in_order := self._in_order) is not None and message.tag.lane not in _UNORDERED:
            self._put(in_order, message.communication, message.peer)
            self._wait(lambda: message.communication.finished, in_order)
            self.released_s = max(self.released_s, message.communication.finished_s)
            return
        if not message.here:
            self._wait(lambda: message.here, [message.peer])
        if (rest_s := message.due_s - time.monotonic()) > 0.0:
            time.sleep(rest_s)
        self.released_s = max(self.released_s, message.arrived_s)

    def wait_first(self, groups: Sequence[Sequence[Incoming]]) -> int:
        """Until all messages of one group have arrived; its number. Raises as `_wait`, of the peers of the first group."""
        until_s, needed_s = time.monotonic() + self._timeout_s, self.record.clock()
        for message in (message for group in groups for message in group):
            message.needed_s = needed_s
        with self._changed:
            while True:
                due_s = [_due_s(group) for group in groups]
                now_s, first_s = time.monotonic(), min(due_s)
                if first_s <= now_s:
                    return due_s.index(first_s)
                absent = [message.peer for message in groups[0] if not message.here]
                if self._lost.keys() & set(absent):
                    raise self._unreachable(absent)
                if first_s == math.inf and now_s >= until_s:
                    raise self._silent(absent)
                self._changed.wait((until_s if first_s == math.inf else first_s) - now_s)

    def settle(self, peers: Sequence[int]) -> None:
        self._wait(lambda: not self._uncopied_to(peers), peers)

    def _uncopied_to(self, peers: Sequence[int]) -> bool:
        return any(message.peer in peers for message in self._uncopied)

    def _copies_of(self, tag: Tag) -> DeviceCopies | None:
        """What copies messages of this kind from and to the device; None where they are on the CPU."""
        return None if tag.lane in _UNORDERED else self._copies

    def _put(self, in_order: InOrder, communication: Communication, peer: int) -> None:
        """Into the queue of direct communication, when there is room."""
        if in_order.full:
            self._wait(lambda: not in_order.full, in_order)
            self.released_s = max(self.released_s, in_order.freed_s)
        communication.peer = peer
        with self._changed:
            in_order.put(communication)
        self._advance(in_order)

    def _wait(self, there: Callable[[], bool], whom: Sequence[int] | InOrder, limit_s: float | None = None) -> None:
        """Raises Retryable if one of the peers is lost first, or nothing happens in time. `whom`: these peers, or those that
        the queue waits for, each time that something has happened."""
        until_s = time.monotonic() + (self._timeout_s if limit_s is None else limit_s)
        with self._changed:
            while not there():
                peers = sorted(whom.awaited) if isinstance(whom, InOrder) else whom
                if self._lost.keys() & set(peers):
                    raise self._unreachable(peers)
                if (rest_s := until_s - time.monotonic()) <= 0.0:
                    raise self._silent(peers)
                self._changed.wait(rest_s)

    def _unreachable(self, peers: Sequence[int]) -> Retryable:
        peer = next(peer for peer in peers if peer in self._lost)
        return Retryable(Cause(f"stage {peer} of this replica cannot be reached: {self._lost[peer]}", self.record.rank))

    def _silent(self, peers: Sequence[int]) -> Retryable:
        what = f"stage {' or '.join(map(str, peers))} of this replica sent or took nothing in {self._timeout_s:g} s"
        return Retryable(Cause(what, self.record.rank))

    # ---- what threads of queues call as well

    def _queue_of(self, tag: Tag) -> StageQueue:
        return self._queues[tag.microbatch % len(self._queues)]

    def _begin(self, message: Outgoing) -> None:
        self._queue_of(message.tag).call(partial(self._enter, message))

    def _enter(self, message: Outgoing, queue: StageQueue) -> None:
        """Copy it to host memory, if there is room; then it goes to the endpoint."""
        tensor = message.tensor
        assert tensor is not None
        buffer = self.host.take(HEADER_BYTES + tensor.nbytes, partial(self._begin, message))
        if buffer is None:
            return
        into = tensor_in(buffer, tensor)
        if message.made is not None:
            assert self._copies is not None
            hand_over = partial(self._copied, message, buffer)
            self._copies.to_host(message.made, into, tensor, lambda copy_s: queue.call(partial(hand_over, copy_s)))
            return
        begun = time.perf_counter()
        into.copy_(tensor)
        self._copied(message, buffer, time.perf_counter() - begun, queue)

    def _copied(self, message: Outgoing, buffer: torch.Tensor, copy_s: float, queue: StageQueue) -> None:
        record, name, data = self.record, name_of(message.tag), bytes_of(buffer)
        message.copy_s = copy_s
        if message.wants_arrival:
            told = bytearray(1)
            answer = (name[0], name[1] | ACKNOWLEDGES)
            queue.receive(message.peer, answer, memoryview(told), partial(self._arrived_there, message))
        message.begun_s = record.clock()
        HEADER.pack_into(data, 0, message.queued_s, message.begun_s, message.step, message.wants_arrival)
        with self._changed:
            message.tensor = None
            self._uncopied.discard(message)
            self._changed.notify_all()
        queue.send(message.peer, name, data, partial(self._sent, message, buffer))

    def _sent(self, message: Outgoing, buffer: torch.Tensor) -> None:
        self.host.give(buffer)
        if not message.wants_arrival:
            self._note_send(message)

    def _arrived_there(self, message: Outgoing, came_s: float) -> None:
        with self._changed:
            self._unarrived.discard(message)
            self._changed.notify_all()
        self._note_send(message)
        self._over(message.communication)

    def _came(self, queue: StageQueue, message: Incoming, came_s: float) -> None:
        """All of it is there, since `came_s` (monotonic)."""
        wall_s = self.record.clock() - (time.monotonic() - came_s)
        message.queued_s, message.sent_s, step, wants_arrival = HEADER.unpack_from(bytes_of(message.buffer))
        delay_s = self._delay(message.peer, step)
        message.arrived_s = wall_s + delay_s
        with self._changed:
            message.due_s = came_s + delay_s
            self._changed.notify_all()
        shows = partial(self._shows, queue, message, wants_arrival)
        if delay_s > 0.0:
            queue.later(message.due_s, shows)
        else:
            shows()

    def _shows(self, queue: StageQueue, message: Incoming, wants_arrival: bool) -> None:
        """It has arrived: the stage may see it."""
        self._over(message.communication)
        if wants_arrival:
            op, index = name_of(message.tag)
            queue.send(message.peer, (op, index | ACKNOWLEDGES), memoryview(bytes(1)), lambda: None)

    def _over(self, communication: Communication) -> None:
        communication.over = True
        if (in_order := self._in_order) is not None:
            self._advance(in_order)

    def _advance(self, in_order: InOrder) -> None:
        with self._changed:
            begin = in_order.advance(self.record.clock())
            self._changed.notify_all()
        for communication in begin:
            communication.begin()

    def _note_send(self, message: Outgoing) -> None:
        self.record.write(
            Kind.SEND,
            begin_s=message.queued_s,
            step=message.step,
            tag=str(message.tag),
            bytes=message.bytes,
            begun_s=message.begun_s,
            copy_s=message.copy_s,
        )

    def _peer_lost(self, peer: int | None, cause: Cause) -> None:
        with self._changed:
            for one in self._peers if peer is None else [peer]:
                self._lost.setdefault(one, cause)
            self._changed.notify_all()


def _due_s(group: Sequence[Incoming]) -> float:
    """When all of them may be seen; infinite before all are here."""
    return max(message.due_s if message.here else math.inf for message in group)
