"""One peer of a verbs endpoint: a TCP endpoint's peer (`tcp.peer`) some of whose rails are queue pairs.

In: as there, and queue pairs that were set up. Out: as there. The machine, its memory and its words are the same; only
what a rail is made of differs, and how the end of the peer's process shows: a NIC does not report it, so the control
connection shows it, for all rails. Reads and atomic operations go over the first queue pair
there is, and from one that failed to the next as far as they may (`one_sided`).
"""

from __future__ import annotations

from helixrt.errors import Cause
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.messages import Failure
from helixrt.transport.rail_connection import RailConnection
from helixrt.transport.tcp.interfaces import of_all, trouble
from helixrt.transport.tcp.peer import CONTROL, Peer
from helixrt.transport.tcp.peer_host import Host
from helixrt.transport.tcp.rails import TcpRail
from helixrt.transport.verbs.connection import VerbsConnection
from helixrt.transport.verbs.one_sided import OneSided, after_failure
from helixrt.transport.verbs.own_devices import OwnPort
from helixrt.transport.verbs.setup import Exchange


class VerbsPeer(Peer):
    """The first `verbs_rails` rails are queue pairs, the default before its backups; what follows is TCP."""

    def __init__(
        self,
        host: Host,
        rank: int,
        link: Link,
        addresses: list[tuple[str, int]],
        ways: tuple[TcpRail, ...],
        ports: tuple[OwnPort, ...],
        gids: tuple[str, ...],
    ) -> None:
        """A queue pair's rail each: `ports`, of this host, and `gids`, of the peer's ports."""
        super().__init__(host, rank, link, addresses, ways)
        self.verbs_rails, self.gids, self._ports = len(ports), gids, ports
        self._exchanges: dict[int, Exchange] = {}
        self._unasked: list[OneSided] = []  # wait for a queue pair

    # ---------------------------------------------------------------- queue pairs

    def queue_pair(self, rail: int) -> VerbsConnection | None:
        """The rail, if it is of verbs and up."""
        connection = self.rails[rail] if rail < self.verbs_rails else None
        return connection if isinstance(connection, VerbsConnection) else None

    def connected(self) -> bool:
        """By the default rail: backups are set up in the background."""
        return self.control is not None and self.rails[0] is not None

    def never_came(self, rail: int) -> bool:
        return super().never_came(rail) and not self.expects(rail)

    def expect(self, rail: int, exchange: Exchange) -> None:
        """A queue pair for `rail` is being set up."""
        self._stop_expecting(rail)
        self._exchanges[rail] = exchange

    def expects(self, rail: int) -> bool:
        return rail in self._exchanges

    def came(self, rail: int) -> None:
        """It is set up, or failed to be."""
        del self._exchanges[rail]

    def _stop_expecting(self, rail: int) -> None:
        exchange = self._exchanges.pop(rail, None)
        if exchange is not None:
            exchange.cancel()

    def put_in_service(self, connection: RailConnection, incarnation: int) -> None:
        super().put_in_service(connection, incarnation)
        self._ask_again()

    def was_crossed(self, rail: int) -> bool:
        """A queue pair is set up over the management network: its NICs may be cut off from each other."""
        return rail >= self.verbs_rails

    # ---------------------------------------------------------------- reads and atomic operations

    def ask(self, operation: OneSided) -> None:
        if self.ended or self.left:
            operation.fail(self.cause or Cause("it closed", f"rank {self.rank}"))
            return
        self._unasked.append(operation)
        self._ask_again()

    def _ask_again(self) -> None:
        up = (self.queue_pair(rail) for rail in range(self.verbs_rails))
        connection = next((each for each in up if each is not None and not each.closed), None)
        if connection is not None:
            asked, self._unasked = self._unasked, []
            for operation in asked:
                connection.ask(operation)

    def _drop(self, connection: RailConnection | None) -> None:
        if not isinstance(connection, VerbsConnection) or connection.closed:
            super()._drop(connection)
            return
        posted, waiting = connection.unanswered()
        super()._drop(connection)
        reason = self.link.rails[connection.number].reason or f"rail {connection.number} failed"
        self._unasked = [*after_failure(posted, waiting, reason), *self._unasked]
        if not self.ended:
            self._ask_again()

    # ---------------------------------------------------------------- ends

    def own_trouble(self) -> str:
        """Of the ports, and of the way to the management network where TCP is the last rail."""
        last = self.ways[self.verbs_rails :]
        return of_all([*(port.trouble() for port in self._ports), *map(trouble, last)])

    def broke(self, connection: RailConnection, failure: Failure, reason: str) -> None:
        super().broke(connection, failure, reason)
        if connection.number == CONTROL and not self.ended and not self.left:
            self._host.look_for(self, 0)

    def nobody(self, rail: int, failure: Failure, reason: str) -> None:
        """No process, or one that is done with us: then no rail of it works, whatever its NIC still answers."""
        for number in range(self.verbs_rails):
            if self.rails[number] is not None and not self.ended:
                self._drop(self.rails[number])
                self.rails[number] = None
                self.tell(m.RailDown(number, failure, reason))
        if not self.ended:
            super().nobody(rail, failure, reason)

    def _close_connections(self) -> None:
        for rail in list(self._exchanges):
            self._stop_expecting(rail)
        super()._close_connections()
        unasked, self._unasked = self._unasked, []
        for operation in unasked:
            operation.fail(self.cause or Cause("the link is over", f"rank {self.rank}"))
