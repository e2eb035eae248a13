"""How the ranks of a simulated world come together: a quorum, a generation, its links, and its end.

In: processes that want to join. Out: generations of the processes that are there; the call `connected` when a node has all its
links. What a generation runs and what befalls it is not known here (`collective_world`, `collective_faults`).
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from dataclasses import replace

from helixrt.emulate.collective_driver import Driver
from helixrt.emulate.collective_node import Node
from helixrt.emulate.streams import SimulatedConnection
from helixrt.errors import Cause
from helixrt.protocol.collective import messages as c
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.link import messages as l
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.transport.tcp.peer import CONTROL, Peer

OPTIONS = LinkOptions(
    eager_bytes=64,
    eager_memory_bytes=512,
    window_bytes=512,
    window_frames=16,
    period_s=0.4,
    attempt_s=0.25,
    probe_s=0.04,
    answer_s=0.04,
    retry_s=0.02,
    rest_s=0.01,
    longest_rest_s=0.1,
    steady_s=1.0,
    acknowledge_s=0.004,
)
WINDOW_BYTES, CONNECT_S, QUORUM_S = 384, 0.6, 0.5


class Generations(Driver):
    """`members` are the ranks of the newest generation."""

    def __init__(self, seed: int, size: int, rails: int, trace: bool) -> None:
        super().__init__(seed, trace)
        self.size, self.rails = size, rails
        self.concurrent = self.random.choice((1, 1, 2, 3))
        self.options = replace(OPTIONS, striped=self.random.random() < 0.7)
        drivers = random.Random(f"{seed} drivers")  # the other draws of a world stay what they are
        self.options = replace(self.options, batched=drivers.random() < 0.5, keep_bytes=drivers.choice((24, 64)))
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.configured: dict[int, list[Node]] = {}
        self.joining: dict[int, tuple[Node, float]] = {}
        self.cut_off: dict[int, float] = {}  # rank -> partitioned until

    def join(self, node: Node) -> None:
        if not node.alive or self.paused(node, self.join, node):
            return
        if self.cut_off.get(node.rank, 0.0) > self.clock.now:
            self.clock.at(self.cut_off[node.rank] + 0.001, self.join, node)
            return
        self.joining[node.rank] = (node, self.clock.now)
        self.clock.after((0.0005, 0.002), self.form)
        self.clock.at(self.clock.now + QUORUM_S, self.form)

    def form(self) -> None:
        """A quorum: all living ranks, or those that have joined when the first one has waited long enough."""
        now = self.clock.now
        if not self.joining:
            return
        there = {n.rank for n in self.nodes.values() if n.alive and max(n.paused_until, self.cut_off.get(n.rank, 0)) <= now}
        if not there <= self.joining.keys() and now < min(since for _, since in self.joining.values()) + QUORUM_S:
            for rank in self.members:  # members that still run are asked to join too
                node = self.nodes[rank]
                if node.generation == self.generation and rank not in self.joining:
                    self.clock.after((0.001, 0.01), self.ask_to_reconfigure, node, self.generation)
            return
        self.generation += 1
        members = tuple(sorted(self.joining))
        self.count["left_out"] += self.size - len(members)
        self.members = members
        self.note(f"generation {self.generation}: ranks {members}")
        for node, _ in self.joining.values():
            self.clock.after((0.0005, 0.004), self.configure, node, self.generation, members)
        self.joining.clear()
        for node in self.nodes.values():
            if node.rank not in members:
                self.clock.after((0.001, 0.01), self.ask_to_reconfigure, node, node.generation)

    def ask_to_reconfigure(self, node: Node, generation: int) -> None:
        """Abort `generation` at a member, as soon as it can be reached."""
        if not node.alive or self.paused(node, self.ask_to_reconfigure, node, generation):
            return
        if self.cut_off.get(node.rank, 0.0) > self.clock.now:
            self.clock.at(self.cut_off[node.rank], self.ask_to_reconfigure, node, generation)
        elif generation and node.generation == generation:
            self.tell(node, c.Aborted(Cause("another rank joins", f"rank {node.rank}")))

    def configure(self, node: Node, generation: int, members: tuple[int, ...]) -> None:
        if not node.alive or self.paused(node, self.configure, node, generation, members):
            return
        if generation != self.generation:  # it went on without us
            self.join(node)
            return
        node.generation, node.ranks, node.me = generation, members, members.index(node.rank)
        node.machine = CollectiveMachine(node.me, len(members), WINDOW_BYTES, self.concurrent)
        node.begin_again()
        for peer in range(len(members)):
            if peer != node.me:
                link = self.observed(node, peer, Link(generation, peer, self.rails, self.options))
                node.peers[peer] = Peer(node, peer, link, [], ())
        node.ticks = dict.fromkeys(node.peers, math.inf)
        others = self.configured.setdefault(generation, [])
        for other in others:
            if other.alive and other.generation == generation:
                for rail in (CONTROL, *range(self.rails)):
                    self.dial(generation, node.rank, other.rank, rail)
        others.append(node)
        self.clock.at(self.clock.now + CONNECT_S, self.connected_in_time, node, generation)
        self.connected(node)

    def connected_in_time(self, node: Node, generation: int) -> None:
        if not node.alive or self.paused(node, self.connected_in_time, node, generation):
            return
        if node.generation == generation and len(node.reached) < len(node.peers):
            self.tell(node, c.Aborted(Cause("not all peers came", f"rank {node.rank}")))

    def leave(self, node: Node, cause: Cause) -> None:
        """What a communicator does at Break, or when it closes: tell the peers, give up the links, take back memory; then ask
        for the next generation."""
        closing, node.closing = node.closing, False
        self.note(f"rank {node.rank} {'closes' if closing else 'leaves'} generation {node.generation}: {cause}")
        if node.finished & node.given_up or node.finished | node.given_up != node.memories.keys():
            ends = f"done {sorted(node.finished)}, failed or skipped {sorted(node.given_up)}"
            raise self.fail(f"rank {node.rank}: collectives {sorted(node.memories)} were submitted; {ends}")
        self.farewell(node, None if closing else cause)
        self.check_memories(node)
        for memory in node.memories.values():
            memory.out[:] = b"\xbb" * len(memory.out)  # the caller's again, to do with what it likes
        self.tally(node)
        node.peers.clear()
        node.generation = 0
        self.clock.after((0.0005, 0.3 if closing else 0.01), self.join, node)

    def farewell(self, node: Node, cause: Cause | None) -> None:
        """What an endpoint does at `abort(cause)`, or at `close`: the last words, then all connections are closed."""
        for (index, _), connection in node.rails.items():
            end = self.end(node, index)
            connection.flush[end] = cause is None or self.random.random() < 0.5
            if cause is None:
                connection.sockets[end].linger()
        for peer in node.peers.values():
            if peer.ended or peer.left:
                continue
            if cause is not None:
                peer.say_why(peer.link.first.settle(cause))
                continue
            peer.tell(l.Close())
            for made in peer.rails:
                if isinstance(made, SimulatedConnection):
                    node.writable(made)
            node.write()
        for peer in node.peers.values():
            peer.end_quietly()

    @abstractmethod
    def check_memories(self, node: Node) -> None:
        """Nothing was written that must not be."""

    def tally(self, node: Node) -> None:
        for link in node.links.values():
            self.count["failovers"] += link.failovers
            self.count["failbacks"] += link.failbacks
            self.count["resent"] += link.resent
            self.count["duplicates"] += link.duplicates
            self.count["stale"] += link.stale
