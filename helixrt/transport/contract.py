"""The contract between a communicator and what carries its bytes, whatever that is.

An `Endpoint` is one rank's end of all its links in one generation. A communicator's one progress
thread drives it: it waits until a descriptor is ready or a deadline has come, and calls `progress`.
Implemented over TCP rails, shared memory and RDMA verbs; every implementation passes the same suite
(`tests/transport/conformance.py`).

Rules every link keeps (DESIGN.md, "Link"):

- A message is named by (op, index) and its length is agreed by both sides before; a length or a name
  that was not agreed is the peer's error (`Lost`), never memory of ours.
- Every message arrives exactly once, in any order, straight in the memory given to `receive`.
- `send` may come before the peer's `receive`: long messages wait at the sender until the peer has
  posted (credit), short ones travel at once and wait at the receiver in bounded memory. So a message
  whose receiver is late never holds up another one.
- What an older generation sends is dropped and counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from helixrt.errors import Cause

Buffer: TypeAlias = memoryview  # of bytes, contiguous


class Sink(Protocol):
    """Takes a message's bytes as they come, in place of memory that they are put in."""

    def __len__(self) -> int:
        """Of the message, in bytes."""

    def take(self, at: int, piece: Buffer) -> None:
        """Those from `at` on: in order, each once; `at` is a multiple of 64. `piece` is lent for the call;
        the next may be the same memory."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The memory given to `send` may be written again."""

    peer: int
    op: int
    index: int


@dataclass(frozen=True, slots=True)
class Received:
    """`came_s`: of a message that came before it was asked for, the monotonic time at which it did, if known; else 0.
    In shared memory it comes when it can be read, elsewhere when its bytes are here."""

    peer: int
    op: int
    index: int
    came_s: float = field(default=0.0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer is gone for good in this generation; nothing else comes from it."""

    peer: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """The peer ended the generation and said why."""

    peer: int
    cause: Cause


Outcome = Sent | Received | Lost | PeerAborted


@dataclass(frozen=True, slots=True)
class Refused:
    """What an endpoint turned away since it was made."""

    strangers: int = 0  # connections that did not prove the run's secret: a wrong one, garbage, silence
    stale: int = 0  # connections, and frames on a connection, of an older generation


class Endpoint(ABC):
    """This rank's links to the peers of one generation.

    `address`, `connect` and `close` block at most for their deadline. After `connect` all calls come from
    one thread at a time, except `abort`'s effect on peers: see there.
    """

    @abstractmethod
    def address(self) -> bytes:
        """What peers need to reach this rank (ports, rail addresses, host); published in the run's store. Stable
        for the endpoint's life, at most 4 KiB."""

    @abstractmethod
    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reach every peer (rank -> its `address()`); both sides prove the run's secret and agree on the generation.

        Ends what an earlier generation left. May be called again for the next generation.
        Raises Retryable naming the peers that did not come within `deadline_s` seconds, or soon after `stopped()`
        is true, which it asks at least ten times a second. Over TCP also naming those that gave no sign of life for 1.5
        heartbeats: an endpoint gives them while it connects, and while it is driven.
        """

    @abstractmethod
    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        """Begin to send; `data` must stay as it is until `Sent`. Never blocks."""

    @abstractmethod
    def receive(self, peer: int, op: int, index: int, into: Buffer | Sink) -> None:
        """Let message (op, index) of `peer` arrive in `into`. Never blocks.

        A sink has had everything when `Received` comes; of a message that never does, it may have had a part.
        """

    @abstractmethod
    def forget(self, op: int) -> None:
        """`op` failed: nothing of it is sent, and nothing of it is written into the caller's memory any more."""

    @abstractmethod
    def descriptors(self) -> Mapping[int, int]:
        """File descriptor -> epoll event mask to wait for now; the mapping is live between two `progress` calls."""

    @abstractmethod
    def progress(self, now: float) -> Sequence[Outcome]:
        """Do all that can be done without blocking, at monotonic time `now`; what came of it, oldest first."""

    def flush(self) -> None:  # noqa: B027, what has nothing to put off has nothing to do
        """What was begun since `progress`, and what it had to answer, leaves now: to be called when its outcomes are dealt with
        and it is not called again at once. It may put frames off until then, to send fewer."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """The monotonic time by which `progress` must be called again even if no descriptor is ready.

        To be asked last before every wait: it is here that an endpoint asks its peers to be woken. Who calls `progress`
        in a loop without waiting need not ask.
        """

    @abstractmethod
    def abort(self, cause: Cause) -> None:
        """Tell all living peers that this generation ended and why, as far as that goes without blocking; then every
        link is closed. `connect` may follow."""

    @abstractmethod
    def close(self) -> None:
        """Deliver what was `Sent`, inform the peers and release all resources; idempotent.

        A link closed so is no failure: a peer gets `Lost` only if it waits for a message, or begins one later.
        """

    @abstractmethod
    def refused(self) -> Refused:
        """What was turned away, over all generations."""
