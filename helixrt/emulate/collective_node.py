"""One process of a simulated world for FTAR: production's peers, and what it holds for its generation.

In and out: nothing; `collective_driver` moves it, `collective_world` judges it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from helixrt.emulate.fabric import Connection
from helixrt.emulate.plans import Memory
from helixrt.emulate.streams import SimulatedConnection, SimulatedHost
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.collective.messages import Await, Event
from helixrt.protocol.link import messages as l
from helixrt.protocol.link.machine import Link
from helixrt.transport.rail_connection import RailConnection
from helixrt.transport.tcp.peer import Peer

if TYPE_CHECKING:
    from helixrt.emulate.collective_driver import Driver

Name = tuple[int, int, int]  # peer's index in the generation, op, index


class Node(SimulatedHost):
    """One process: a rank's incarnation, and what it holds for its generation. Peers are numbered by their place in it.

    `ahead`: collectives it submits before the first of them has ended.
    """

    def __init__(self, driver: Driver, rank: int, incarnation: int, ahead: int) -> None:
        super().__init__(driver.random, driver.stage)
        self._driver = driver
        self.rank, self.incarnation, self.ahead = rank, incarnation, ahead
        self.alive = True
        self.unreachable = False  # it died with its host: no kernel refuses a connection
        self.paused_until = 0.0
        self.backlog: list[tuple[object, ...]] = []

        self.generation = 0  # 0: it is in none
        self.ranks: tuple[int, ...] = ()
        self.me = 0
        self.machine = CollectiveMachine(0, 1, 0)
        self.events: deque[Event] = deque()  # that the machine has not got yet
        self.peers: dict[int, Peer] = {}
        self.ticks: dict[int, float] = {}  # when the link's next Tick is due
        self.rails: dict[tuple[int, int], Connection] = {}  # (peer, rail)
        self.reached: set[int] = set()
        self.closing = False  # it is about to close in order
        self.points_first = False  # its program waits for single messages before it begins with collectives
        self.submitted = 0
        self.finished: set[int] = set()
        self.given_up: set[int] = set()  # collectives that failed or were skipped

        self.memories: dict[int, Memory] = {}
        self.after: dict[int, bytes] = {}  # op -> what OUT was when it ended
        self.summing: dict[Name, tuple[memoryview, Await]] = {}  # reduced when they are whole
        self.received: set[Name] = set()

    @property
    def links(self) -> dict[int, Link]:
        return {index: peer.link for index, peer in self.peers.items()}

    def begin_again(self) -> None:
        """Nothing of the last generation is left."""
        for numbers in (self.reached, self.finished, self.given_up, self.received):
            numbers.clear()
        for by_name in (self.memories, self.after, self.rails, self.summing):
            by_name.clear()
        self.submitted = 0
        self.outcomes.clear()
        self.events.clear()
        self.settled()

    # ---- what its peers ask for

    @property
    def now(self) -> float:
        return self._driver.clock.now

    def unwatch(self, connection: RailConnection) -> None:
        super().unwatch(connection)
        name = (connection.peer, connection.number)
        carrier = self.rails.get(name)
        assert isinstance(connection, SimulatedConnection)
        if carrier is not None and connection.simulated in carrier.sockets:
            del self.rails[name]

    def restore(self, peer: Peer, rail: int) -> None:
        self._driver.restore(self, peer.rank, rail)

    def look_for(self, peer: Peer, rail: int) -> None:
        self._driver.look_for(self, peer.rank, rail)

    def note(self, peer: Peer, event: l.ForTheRecord) -> None:
        self._driver.note(f"rank {self.rank} notes of rank {self.ranks[peer.rank]}: {event}")

    def failed(self, peer: Peer, event: l.Failed) -> None:
        raise self._driver.fail(f"rank {self.rank}: unexpected {event} of the link to {peer.rank}")
