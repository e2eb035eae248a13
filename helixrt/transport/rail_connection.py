"""The interface of a rail's connection, for any carrier of bytes, and the interface of its owner.

In and out: frames, and payloads straight from memory to memory. Implemented over TCP (`tcp.connection`) and over RDMA
verbs (`verbs.connection`); `tcp.peer.Peer` drives both in the same way.
"""

from __future__ import annotations

from typing import Protocol

from helixrt.protocol.link.frames import Frame
from helixrt.protocol.link.messages import Failure
from helixrt.protocol.liveness import Acknowledgements
from helixrt.transport.intake import Intake


class Waitable(Protocol):
    """What an epoll can watch."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class RailConnection(Protocol):
    @property
    def peer(self) -> int: ...

    @property
    def number(self) -> int:
        """The rail's."""

    @property
    def sock(self) -> Waitable: ...

    landing: memoryview | Intake | None  # of the payload under way; None: nowhere
    length: int  # of all of it
    closed: bool
    blocked: bool  # it has more to write and waits until it can

    @property
    def idle(self) -> bool:
        """Nothing waits to be written."""

    @property
    def watches_writing(self) -> bool:
        """Whether its descriptor is watched for writing."""

    @watches_writing.setter
    def watches_writing(self, value: bool) -> None: ...

    def put(
        self, header: bytes, payload: memoryview | None = None, name: tuple[int, int] | None = None, sequence: int = 0
    ) -> None:
        """Queue a frame; `name` and `sequence` of DATA."""

    def write(self, budget: int) -> None: ...

    def read(self, budget: int) -> bool: ...

    def detach(self, name: tuple[int, int]) -> None:
        """What is still to be written of the message comes from a copy from now on."""

    def say_last(self, word: bytes) -> None:
        """Before it is closed: a last frame, as far as that goes without blocking."""

    def acknowledgements(self, now: float) -> Acknowledgements | None:
        """What the kernel, or the NIC, reports about the other end's kernel; None: nothing."""

    def emptied(self) -> bool:
        """Everything was written, and the other end has it."""

    def close(self) -> None: ...


class Carrier(Protocol):
    """The owner, which gets the events of a connection. Each call may close the connection."""

    def frame_came(self, connection: RailConnection, frame: Frame) -> None:
        """With its body checked; for DATA the header alone, and `connection.landing` is to be set."""

    def payload_came(self, connection: RailConnection, sequence: int) -> None: ...

    def frame_left(self, connection: RailConnection, sequence: int) -> None:
        """The last byte of a DATA frame is the kernel's, or the NIC's."""

    def broke(self, connection: RailConnection, failure: Failure, reason: str) -> None:
        """Nothing more goes or comes; the carrier closes it."""
