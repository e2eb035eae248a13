"""The driver of every rank in a simulated world: carries out what its machines ask for, in their order.

In: what the fabric brings, what the world submits. Out: calls of the world when a collective ends or a generation
breaks (`ended`, `leave`), and when links are up (`connected`). It is what a communicator and an endpoint are in production.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter, deque
from typing import cast

from helixrt.emulate.collective_node import Name, Node
from helixrt.emulate.fabric import Clock, Connection, Fabric, Payload, Receiver
from helixrt.errors import Cause
from helixrt.protocol.collective import messages as c
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as l
from helixrt.protocol.link.frames import Frame, FrameError, Kind


class Driver(Receiver):
    """The drivers of all ranks in one object; `nodes[rank]` is the rank's newest process."""

    def __init__(self, seed: int, trace: bool) -> None:
        self.clock = Clock(seed)
        self.random = self.clock.random
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
        """A stopped process hears nothing now; `what` waits for it."""
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
            self.drive(node, -1, c.Computed(op, action.node))

    def schedule(self, node: Node, peer: int) -> None:
        due = node.links[peer].deadline
        if due < node.ticks[peer]:
            node.ticks[peer] = due
            self.clock.at(max(due, self.clock.now), self.tick, node, node.generation, peer, due)

    def tick(self, node: Node, generation: int, peer: int, due: float) -> None:
        if not node.alive or self.paused(node, self.tick, node, generation, peer, due):
            return
        if node.generation == generation and node.ticks[peer] == due:
            node.ticks[peer] = math.inf
            if node.links[peer].deadline <= self.clock.now:
                self.drive(node, peer, l.Tick())
            else:
                self.schedule(node, peer)

    # ---- actions

    def drive(self, node: Node, peer: int, event: object) -> None:
        """`event` is for the link to `peer`, or for the collective machine (-1)."""
        todo: deque[tuple[int, object]] = deque([(peer, event)])
        broken: Cause | None = None
        touched: set[int] = set()
        while todo:
            peer, event = todo.popleft()
            if peer < 0:
                for action in node.machine.on(cast(c.Event, event)):
                    broken = self.perform(node, action, todo, broken)
            else:
                touched.add(peer)
                for act in node.links[peer].on(cast(l.Event, event), self.clock.now):
                    self.carry(node, peer, act, todo)
        if broken is not None:
            self.leave(node, broken)
            return
        for peer in touched:
            self.schedule(node, peer)

    def perform(self, node: Node, action: c.Action, todo: deque[tuple[int, object]], broken: Cause | None) -> Cause | None:
        """What the collective machine asks for; the cause when it has broken."""
        match action:
            case c.Transmit(op, peer, index, region):
                name = (peer, op, index)
                node.outgoing[name] = node.memories[op].view(region)
                node.unsent.add(name)
                todo.append(self.gone(node, peer) if peer in node.left else (peer, l.Submit(op, index, region.length)))
            case c.Await(op, peer, index, region, left):
                name = (peer, op, index)
                if left is None:
                    node.posted[name] = node.memories[op].view(region)
                else:
                    node.posted[name] = memoryview(bytearray(region.length))
                    node.summing[name] = action
                if peer not in node.left:
                    todo.append((peer, l.Post(op, index, region.length)))
                elif name in node.held:
                    self.carry(node, peer, l.Deliver(op, index), todo)
                    self.carry(node, peer, l.Received(op, index), todo)
                else:
                    todo.append(self.gone(node, peer))
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

    def carry(self, node: Node, peer: int, act: l.Action, todo: deque[tuple[int, object]]) -> None:
        """What the link to `peer` asks for."""
        match act:
            case l.SendFrame():
                self.write(node, peer, act.rail, act.frame, None)
            case l.SendData():
                name = (peer, act.frame.op, act.frame.index)
                payload = Payload(node.kept[name] if name in node.kept else node.outgoing[name])
                node.flying.setdefault(name, []).append(payload)
                self.write(node, peer, act.rail, act.frame, payload)
            case l.Accept():
                name = (peer, act.op, act.index)
                place: memoryview | Name | None = None
                if act.landing is l.Landing.HOLD:
                    place = name
                elif act.landing is l.Landing.PLACE:
                    place = node.posted[name]
                    place[: len(place) // 2] = b"\xaa" * (len(place) // 2)  # the first half is on its way in
                node.landing[node.rails[peer, act.rail]] = place
            case l.Discard():
                node.landing[node.rails[peer, act.rail]] = None
            case l.Sent():
                node.unsent.discard((peer, act.op, act.index))
                todo.append((-1, c.Sent(act.op, peer, act.index)))
            case l.Received():
                name = (peer, act.op, act.index)
                if name in node.received or name not in node.posted:
                    raise self.fail(f"rank {node.rank}: message {name} was received twice, or never asked for")
                node.received.add(name)
                if name in node.summing:
                    node.memories[act.op].arrived(node.posted[name], node.summing.pop(name))
                todo.append((-1, c.Received(act.op, peer, act.index)))
            case l.Keep():
                node.kept[peer, act.op, act.index] = bytes(node.outgoing[peer, act.op, act.index])
            case l.Release():
                del node.kept[peer, act.op, act.index]
            case l.Deliver():
                node.posted[peer, act.op, act.index][:] = node.held.pop((peer, act.op, act.index))
            case l.Free():
                del node.held[peer, act.op, act.index]
            case l.Detach():
                for payload in node.flying.get((peer, act.op, act.index), ()):
                    payload.data = bytes(payload.data)
            case l.RestoreRail():
                self.restore(node, peer, act.rail)
            case l.ResetRail():
                self.drop(node, peer, act.rail)
            case l.Lost() | l.PeerAborted():
                self.peer_ended(node, peer, act)
                todo.append((-1, c.PeerLost(peer, act.cause)))
            case l.PeerClosed():
                node.left.add(peer)
                if any(name[0] == peer for name in node.unsent | (node.posted.keys() - node.received)):
                    todo.append(self.gone(node, peer))
            case l.RailLeft() | l.RailBack():
                self.note(f"rank {node.rank} says of rank {node.ranks[peer]}: {act}")
            case _:
                raise self.fail(f"rank {node.rank}: unexpected {act} of the link to {peer}")

    def gone(self, node: Node, peer: int) -> tuple[int, object]:
        """A peer that has closed is missed after all."""
        return -1, c.PeerLost(peer, Cause("it closed while messages with it were not done", f"rank {node.ranks[peer]}"))

    # ---- rails

    def end(self, node: Node, peer: int) -> int:
        """Which end of its connections to `peer` a node is: the lower rank's is 0."""
        return int(node.rank > node.ranks[peer])

    def write(self, node: Node, peer: int, rail: int, frame: Frame, payload: Payload | None) -> None:
        connection = node.rails.get((peer, rail))
        if self.trace is not None:
            what = f"{frame.kind.name} {frame.sequence or ''} ({frame.op}, {frame.index}) {frame.length} B"
            self.note(f"{node.rank} -> {node.ranks[peer]} rail {rail}: {what}")
        if connection is not None:
            self.fabric.send(connection, self.end(node, peer), frame, payload)
            self.fabric.remember(node.rank, node.ranks[peer], frame)

    def drop(self, node: Node, peer: int, rail: int) -> None:
        connection = node.rails.pop((peer, rail), None)
        if connection is not None:
            node.landing.pop(connection, None)
            self.fabric.close(connection, self.end(node, peer))

    def restore(self, node: Node, peer: int, rail: int) -> None:
        generation, other = node.generation, node.ranks[peer]
        low, high = min(node.rank, other), max(node.rank, other)
        if (generation, low, high, rail) in self.connecting:
            return
        there = self.nodes[other]
        nobody = not there.unreachable and (not there.alive or there.generation != generation)
        if nobody and self.fabric.connectable(low, high, rail):
            self.clock.after((0.001, 0.008), self.refused, node, generation, peer, rail, l.Failure.PEER_GONE)
        elif not there.alive or not self.fabric.connectable(low, high, rail):
            self.clock.after((0.005, 0.02), self.refused, node, generation, peer, rail, l.Failure.PATH)
        else:
            self.connecting.add((generation, low, high, rail))
            self.clock.after((0.001, 0.008), self.dial, generation, low, high, rail)

    def refused(self, node: Node, generation: int, peer: int, rail: int, failure: l.Failure) -> None:
        if not node.alive or self.paused(node, self.refused, node, generation, peer, rail, failure):
            return
        if node.generation == generation and (peer, rail) not in node.rails:
            self.drive(node, peer, l.RailDown(rail, failure, "cannot connect"))

    def dial(self, generation: int, a: int, b: int, rail: int) -> None:
        low, high = min(a, b), max(a, b)
        self.connecting.discard((generation, low, high, rail))
        ends = [self.nodes[low], self.nodes[high]]
        both = all(n.alive and n.generation == generation for n in ends)
        if not both or not self.fabric.connectable(low, high, rail):
            if both and ends[0].ranks.index(high) not in ends[0].reached:  # connecting: an endpoint dials until it gets through
                self.connecting.add((generation, low, high, rail))
                self.clock.after((0.005, 0.01), self.dial, generation, a, b, rail)
                return
            for node, other in zip(ends, (high, low), strict=True):
                if node.alive and node.generation == generation:
                    self.refused(node, generation, node.ranks.index(other), rail, l.Failure.PATH)
            return
        self.numbers[generation, low, high, rail] += 1
        connection = self.fabric.connect(generation, rail, self.numbers[generation, low, high, rail], low, high)
        if connection.number == 1 and self.random.random() < 0.3:
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
            self.fabric.close(connection, end)
            return
        node, peer = found
        if self.paused(node, self.up, connection, end):
            return
        if not connection.open[end]:
            self.drive(node, peer, l.RailDown(connection.rail, l.Failure.PATH, "closed before it was taken"))
            return
        old = node.rails.get((peer, connection.rail))
        if old is not None:
            if old.number > connection.number:
                self.fabric.close(connection, end)
                return
            node.landing.pop(old, None)
            self.fabric.close(old, end)
        node.rails[peer, connection.rail] = connection
        self.drive(node, peer, l.RailUp(connection.rail, connection.number))
        if node.generation == connection.generation and peer not in node.reached:
            node.reached.add(peer)
            self.connected(node)

    def down(self, connection: Connection, end: int, failure: l.Failure, reason: str) -> None:
        found = self.receiver_of(connection, end)
        if found is None or self.paused(found[0], self.down, connection, end, failure, reason):
            return
        node, peer = found
        if node.rails.get((peer, connection.rail)) is connection:
            del node.rails[peer, connection.rail]
            node.landing.pop(connection, None)
            self.drive(node, peer, l.RailDown(connection.rail, failure, reason))

    def header(self, connection: Connection, end: int, frame: Frame) -> None:
        found = self.receiver_of(connection, end)
        if found is None or self.paused(found[0], self.header, connection, end, frame):
            return
        node, peer = found
        if node.rails.get((peer, connection.rail)) is connection:
            self.drive(node, peer, l.FrameArrived(connection.rail, frame))

    def payload(self, connection: Connection, end: int, frame: Frame, payload: Payload) -> None:
        found = self.receiver_of(connection, end)
        if found is None or self.paused(found[0], self.payload, connection, end, frame, payload):
            return
        node, peer = found
        if node.rails.get((peer, connection.rail)) is not connection:
            return
        place = node.landing.pop(connection)
        if isinstance(place, memoryview):
            place[:] = payload.data
        elif place is not None:
            node.held[place] = bytes(payload.data)
        self.drive(node, peer, l.PayloadArrived(connection.rail, frame.sequence))

    def garbage(self, connection: Connection, end: int, wire: bytes) -> None:
        found = self.receiver_of(connection, end)
        if found is None or self.paused(found[0], self.garbage, connection, end, wire):
            return
        node, peer = found
        if node.rails.get((peer, connection.rail)) is not connection:
            return
        event: l.Event
        try:
            frame = frames.parse(wire[: frames.HEADER_BYTES])
            if frame.kind is not Kind.DATA:
                frame = frames.with_body(frame, wire[frames.HEADER_BYTES :])
            event = l.FrameArrived(connection.rail, frame)
        except FrameError as error:
            self.drop(node, peer, connection.rail)
            event = l.RailDown(connection.rail, l.Failure.PROGRAM, str(error))
        self.drive(node, peer, event)
        if node.generation == connection.generation:
            raise self.fail(f"rank {node.rank} goes on with rank {node.ranks[peer]}, which sent garbage: {event}")
        self.count["refused"] += 1
