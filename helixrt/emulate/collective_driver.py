"""The driver of every rank in a simulated world: its collective machine, above production's peers.

In: what the fabric brings, what the world submits. Out: calls of the world when a collective ends or a generation
breaks (`ended`, `leave`), and when links are up (`connected`). It is what a communicator and an endpoint are in production.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable

from helixrt.emulate.collective_node import Node
from helixrt.emulate.fabric import Clock, Connection, Fabric, Receiver
from helixrt.emulate.streams import SimulatedConnection
from helixrt.errors import Cause
from helixrt.protocol.collective import messages as c
from helixrt.protocol.link import messages as l
from helixrt.protocol.link.machine import Link
from helixrt.transport.contract import Lost, Outcome, PeerAborted, Received, Sent
from helixrt.transport.intake import Stage
from helixrt.transport.tcp.peer import CONTROL


class Driver(Receiver):
    """The drivers of all ranks in one object; `nodes[rank]` is the rank's newest process."""

    def __init__(self, seed: int, trace: bool) -> None:
        self.clock = Clock(seed)
        self.random, self.stage = self.clock.random, Stage()
        self.fabric = Fabric(self.clock, self)
        self.nodes: dict[int, Node] = {}
        self.count: Counter[str] = Counter()
        self.numbers: Counter[tuple[int, int, int, int]] = Counter()  # (generation, a, b, rail) -> connections so far
        self.connecting: set[tuple[int, int, int, int]] = set()
        self.trace: list[str] | None = [] if trace else None

    @abstractmethod
    def fail(self, what: str) -> AssertionError:
        """The violation to raise, with the line that replays the run."""

    @abstractmethod
    def connected(self, node: Node) -> None:
        """One more link of the node has a rail."""

    @abstractmethod
    def ended(self, node: Node, op: int) -> None:
        """A collective is done."""

    @abstractmethod
    def peer_ended(self, node: Node, peer: int, how: l.Lost | l.PeerAborted) -> None:
        """A link is over."""

    @abstractmethod
    def leave(self, node: Node, cause: Cause) -> None:
        """The node's generation is over."""

    def note(self, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.clock.now * 1e3:10.3f} ms  {what}")

    def paused(self, node: Node, *what: object) -> bool:
        """A stopped process handles no event now; `what` waits until it goes on."""
        if node.paused_until > self.clock.now:
            node.backlog.append(what)
            return True
        return False

    def awake(self, node: Node) -> None:
        if not node.alive or node.paused_until > self.clock.now:
            return
        backlog, node.backlog = node.backlog, []
        for call, *what in sorted(backlog, key=lambda b: b[0] == self.tick):  # a driver reads first, then looks at the time
            call(*what)  # type: ignore[operator]

    def computed(self, node: Node, generation: int, op: int, action: c.Compute) -> None:
        if not node.alive or self.paused(node, self.computed, node, generation, op, action):
            return
        if node.generation == generation:
            node.memories[op].carry_out(action.work)
            self.tell(node, c.Computed(op, action.node))

    def schedule(self, node: Node, peer: int) -> None:
        due = node.peers[peer].link.deadline
        if due < node.ticks[peer]:
            node.ticks[peer] = due
            self.clock.at(max(due, self.clock.now), self.tick, node, node.generation, peer, due)

    def tick(self, node: Node, generation: int, peer: int, due: float) -> None:
        if not node.alive or self.paused(node, self.tick, node, generation, peer, due):
            return
        if node.generation == generation and node.ticks[peer] == due:
            node.ticks[peer] = math.inf
            if node.peers[peer].link.deadline <= self.clock.now:
                self.drive(node, node.peers[peer].tick)
            else:
                self.schedule(node, peer)

    # ---- what happens to a node

    def drive(self, node: Node, what: Callable[..., None], *args: object) -> None:
        """Something happens to a node; then its machines, its peers and its connections go on as far as they can."""
        what(*args)
        broken: Cause | None = None
        while broken is None:
            if node.outcomes:
                outcomes, node.outcomes = node.outcomes, []
                for outcome in outcomes:
                    self.hear(node, outcome)
            elif node.events:
                for action in node.machine.on(node.events.popleft()):
                    broken = self.perform(node, action, broken)
            elif not node.writes():
                break
        if broken is not None:
            self.leave(node, broken)
            return
        for peer in node.settled():
            self.schedule(node, peer.rank)

    def tell(self, node: Node, event: c.Event) -> None:
        """`event` is for its collective machine."""
        self.drive(node, node.events.append, event)

    def hear(self, node: Node, outcome: Outcome) -> None:
        """What came of a node's messages is for its collective machine."""
        match outcome:
            case Sent(peer, op, index):
                node.events.append(c.Sent(op, peer, index))
            case Received(peer, op, index):
                name = (peer, op, index)
                if name in node.received:
                    raise self.fail(f"rank {node.rank}: message {name} was received twice")
                node.received.add(name)
                if name in node.summing:
                    node.memories[op].arrived(*node.summing.pop(name))
                node.events.append(c.Received(op, peer, index))
            case Lost(peer, cause) | PeerAborted(peer, cause):
                node.events.append(c.PeerLost(peer, cause))

    def perform(self, node: Node, action: c.Action, broken: Cause | None) -> Cause | None:
        """What the collective machine asks for; the cause when it has broken."""
        match action:
            case c.Transmit(op, peer, index, region):
                source = node.memories[op].view(region)
                node.peers[peer].submit(l.Submit(op, index, len(source)), source)
            case c.Await(op, peer, index, region, left):
                place = node.memories[op].view(region)
                if left is not None:
                    place = memoryview(bytearray(region.length))
                    node.summing[peer, op, index] = place, action
                node.peers[peer].post(l.Post(op, index, len(place)), place)
            case c.Compute():
                self.clock.after((0.00005, 0.0005), self.computed, node, node.generation, action.op, action)
            case c.Done(op):
                self.ended(node, op)
            case c.Break(cause):
                return cause
            case c.Failed(op, cause) | c.Skipped(op, cause):
                self.count["failed" if isinstance(action, c.Failed) else "skipped"] += 1
                node.given_up.add(op)
                if broken is None or cause != broken:
                    raise self.fail(f"rank {node.rank}: {action} before its Break, or with another cause than {broken}")
        return broken

    def observed(self, node: Node, peer: int, link: Link) -> Link:
        """`link`, whose end is reported to the world too."""
        on = link.on

        def on_and_report(event: l.Event, now: float) -> list[l.Action]:
            actions = on(event, now)
            for action in actions:
                if isinstance(action, l.Lost | l.PeerAborted):
                    self.peer_ended(node, peer, action)
            return actions

        link.on = on_and_report  # type: ignore[method-assign]
        return link

    # ---- rails

    def end(self, node: Node, peer: int) -> int:
        """Which end of its connections to `peer` a node is: the lower rank's is 0."""
        return int(node.rank > node.ranks[peer])

    def restore(self, node: Node, peer: int, rail: int) -> None:
        generation, other = node.generation, node.ranks[peer]
        low, high = min(node.rank, other), max(node.rank, other)
        if (generation, low, high, rail) in self.connecting:
            return
        there = self.nodes[other]
        if self.nobody(node, peer, rail):
            self.clock.after((0.001, 0.008), self.refused, node, generation, peer, rail, l.Failure.PEER_GONE)
        elif not self.fabric.connectable(low, high, rail) and self.random.random() < 0.3:  # no route: that shows at once
            self.count["no_route"] += 1
            node.peers[peer].tell(l.RailDown(rail, l.Failure.PATH, "no route"))
        elif not there.alive or not self.fabric.connectable(low, high, rail):
            self.clock.after((0.005, 0.02), self.refused, node, generation, peer, rail, l.Failure.PATH)
        else:
            self.connecting.add((generation, low, high, rail))
            self.clock.after((0.001, 0.008), self.dial, generation, low, high, rail)

    def nobody(self, node: Node, peer: int, rail: int) -> bool:
        """Whether the host of a peer refuses: no process of this generation listens there."""
        there = self.nodes[node.ranks[peer]]
        gone = not there.unreachable and (not there.alive or there.generation != node.generation)
        return gone and self.fabric.connectable(node.rank, there.rank, rail)

    def look_for(self, node: Node, peer: int, rail: int) -> None:
        if self.nobody(node, peer, rail):
            self.clock.after((0.001, 0.008), self.looked, node, node.generation, peer, rail)

    def looked(self, node: Node, generation: int, peer: int, rail: int) -> None:
        if not node.alive or self.paused(node, self.looked, node, generation, peer, rail):
            return
        if node.generation == generation:
            self.drive(node, node.peers[peer].nobody, rail, l.Failure.PEER_GONE, "no process listens there")

    def refused(self, node: Node, generation: int, peer: int, rail: int, failure: l.Failure) -> None:
        if not node.alive or self.paused(node, self.refused, node, generation, peer, rail, failure):
            return
        if node.generation == generation and (peer, rail) not in node.rails:
            self.drive(node, node.peers[peer].tell, l.RailDown(rail, failure, "cannot connect"))

    def dial(self, generation: int, a: int, b: int, rail: int) -> None:
        low, high = min(a, b), max(a, b)
        self.connecting.discard((generation, low, high, rail))
        ends = [self.nodes[low], self.nodes[high]]
        both = all(n.alive and n.generation == generation for n in ends)
        if not both or not self.fabric.connectable(low, high, rail):
            connecting = both and (rail == CONTROL or ends[0].ranks.index(high) not in ends[0].reached)
            if connecting:  # an endpoint dials until it gets through
                self.connecting.add((generation, low, high, rail))
                self.clock.after((0.005, 0.01), self.dial, generation, a, b, rail)
                return
            for node, other in zip(ends, (high, low), strict=True):
                if node.alive and node.generation == generation:
                    self.refused(node, generation, node.ranks.index(other), rail, l.Failure.PATH)
            return
        self.numbers[generation, low, high, rail] += 1
        connection = self.fabric.connect(generation, rail, self.numbers[generation, low, high, rail], low, high)
        if rail != CONTROL and connection.number == 1 and self.random.random() < 0.3:
            self.fabric.haunt(connection, self.random.randrange(2))

    def receiver_of(self, connection: Connection, end: int) -> tuple[Node, int] | None:
        """The node at this end and the peer's number, if the node is still in the connection's generation."""
        node = self.nodes[connection.ranks[end]]
        if not node.alive or node.generation != connection.generation:
            return None
        return node, node.ranks.index(connection.ranks[1 - end])

    def up(self, connection: Connection, end: int) -> None:
        found = self.receiver_of(connection, end)
        if found is None:
            connection.sockets[end].close()
            return
        node, peer = found
        if self.paused(node, self.up, connection, end):
            return
        old = node.rails.get((peer, connection.rail))
        if old is not None and old.number > connection.number:
            connection.sockets[end].close()
            return
        made = SimulatedConnection(connection.sockets[end], node.peers[peer], peer, connection.rail, lambda now: None)
        connection.taken[end] = made
        node.rails[peer, connection.rail] = connection
        if connection.rail == CONTROL:
            node.peers[peer].control = made
        else:
            self.drive(node, node.peers[peer].put_in_service, made, connection.number)
        if node.generation == connection.generation and connection.rail != CONTROL and peer not in node.reached:
            node.reached.add(peer)
            self.connected(node)
        self.readable(connection, end)

    def readable(self, connection: Connection, end: int) -> None:
        found, made = self.receiver_of(connection, end), connection.taken[end]
        if found is None or made is None or made.closed or self.paused(found[0], self.readable, connection, end):
            return
        node, peer = found
        self.drive(node, node.read, node.peers[peer], made)

    def writable(self, connection: Connection, end: int) -> None:
        found, made = self.receiver_of(connection, end), connection.taken[end]
        if found is None or made is None or made.closed or self.paused(found[0], self.writable, connection, end):
            return
        self.drive(found[0], found[0].writable, made)

    def garbage(self, connection: Connection, end: int, wire: bytes) -> None:
        """Bytes that no correct peer sends have come."""
        found, made = self.receiver_of(connection, end), connection.taken[end]
        if found is None or made is None or made.closed or self.paused(found[0], self.garbage, connection, end, wire):
            return
        node, peer = found
        if made.simulated.failed:  # while the node was paused: what came before is gone
            return
        made.simulated.arrive(wire)
        self.drive(node, node.read, node.peers[peer], made)
        if node.generation == connection.generation:
            raise self.fail(f"rank {node.rank} goes on with rank {node.ranks[peer]}, which sent garbage: {wire!r}")
        self.count["refused"] += 1
