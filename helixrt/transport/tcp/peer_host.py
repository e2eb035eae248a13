"""What a `Peer` needs of the endpoint that it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from helixrt.protocol.link import messages as m
from helixrt.transport.contract import Outcome
from helixrt.transport.copies import CopyMemory
from helixrt.transport.intake import Stage
from helixrt.transport.rail_connection import RailConnection

if TYPE_CHECKING:
    from helixrt.transport.tcp.peer import Peer


class Host(Protocol):
    """What a peer needs of its endpoint."""

    stage: Stage  # for what is used as it comes
    copies: CopyMemory

    @property
    def now(self) -> float: ...

    def add(self, outcome: Outcome) -> None: ...

    def failed(self, peer: Peer, event: m.Failed) -> None:
        """One message alone failed: only messages of `submit` and `post` with options beyond the contract."""

    def has_frames(self, connection: RailConnection) -> None:
        """It has something to write."""

    def watch(self, connection: RailConnection) -> None:
        """From now on it is read when something comes."""

    def unwatch(self, connection: RailConnection) -> None:
        """It is about to be closed."""

    def restore(self, peer: Peer, rail: int) -> None: ...

    def look_for(self, peer: Peer, rail: int) -> None:
        """A connection was closed by the other end: probe whether the process still listens."""

    def touched(self, peer: Peer) -> None:
        """Its deadline may be another, and it may be `unsettled`."""

    def note(self, peer: Peer, event: m.ForTheRecord) -> None:
        """For the flight record."""
