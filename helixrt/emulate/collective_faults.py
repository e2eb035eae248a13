"""Faults of the ranks of a simulated world: rails, processes and networks fail, peers close or send garbage.

In: which kinds of fault may happen. Out: faults at random times, each for a while; and a `Violation` for each
rank that has not noticed a death in time.
"""

from __future__ import annotations

import random
from abc import abstractmethod

from helixrt.emulate.collective_generations import OPTIONS, Generations
from helixrt.emulate.collective_node import Node
from helixrt.errors import Cause
from helixrt.protocol.collective import messages as c
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as l
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.transport.tcp.peer import CONTROL

RAIL_FAULTS = ("break", "half-open", "slow", "double")  # a link survives these by itself
FAULTS = (*RAIL_FAULTS, "loss", "silence", "crash", "pause", "partition", "late", "close", "garbage")
FAR_AHEAD = 1000  # sequence numbers: more than come while garbage is on its way


def garbage(chance: random.Random, generation: int, rails: int, received: int) -> bytes:
    """What no correct peer sends: noise, or a frame with impossible fields. `received`: sequence numbers that came."""
    far, expected = 1 << 40, received + FAR_AHEAD
    lies = (
        Frame(Kind.DATA, generation, far, op=9, length=5, flags=frames.EAGER),
        Frame(Kind.DATA, generation, expected, op=far, length=100),  # no receive was posted for it
        Frame(Kind.BEAT, generation + 1),
        Frame(Kind.BEAT, generation, acknowledged=far),
        Frame(Kind.RESUME, generation, op=1, index=rails, length=16, body=frames.counters_body(frames.Counters(0, 0))),
        Frame(Kind.ACK, generation, length=16, body=frames.counters_body(frames.Counters(0, far))),
        Frame(Kind.ACK, generation, length=32, body=frames.counters_body(frames.Counters(0, 0, ((far, far),)))),
        Frame(Kind.CREDIT, generation, expected, length=25, body=bytes(25)),  # no whole number of names
        Frame(Kind.ABORT, generation, length=6, body=b"\xff" * 6),
    )
    choice = chance.randrange(len(lies) + 2)
    if choice < len(lies):
        return frames.pack(lies[choice])
    return bytes([chance.randrange(frames.VERSION + 1, 256)]) + chance.randbytes(frames.HEADER_BYTES - 1)


class Faults(Generations):
    def __init__(self, seed: int, size: int, rails: int, faults: tuple[str, ...], trace: bool) -> None:
        super().__init__(seed, size, rails, trace)
        self.faults = faults
        self.late: set[int] = set()  # ranks that submit their next collective late
        self.pending = 0  # faults and restarts yet to come
        self.farewells: set[tuple[int, int, int]] = set()  # (generation, rank that closed, rank that was to notice)

    @abstractmethod
    def boot(self, rank: int, incarnation: int) -> None:
        """A process starts."""

    def threaten(self) -> None:
        """Some faults, the next one often while the last one is being repaired."""
        when = self.random.uniform(0.002, 0.03)
        for _ in range(self.random.randint(1, 4) if self.faults else 0):
            self.pending += 1
            self.clock.at(when, self.fault)
            when += self.random.choice((0.002, 0.01, 0.05)) * self.random.random()

    def fault(self) -> None:
        self.pending -= 1
        kind, rank = self.random.choice(self.faults), self.random.randrange(self.size)
        node = self.nodes[rank]
        now = self.clock.now
        long = kind not in RAIL_FAULTS
        until = now + self.random.choice((0.005, 0.03, 0.3, 0.8) if long else (0.005, 0.02, 0.06))
        self.note(f"fault: {kind} of rank {rank}, until {until * 1e3:.3f} ms")
        if not node.alive:
            return
        if kind == "crash":
            self.crash(node)
        elif kind == "pause":
            node.paused_until = max(node.paused_until, until)
            self.clock.at(node.paused_until, self.awake, node)
        elif kind == "partition":
            self.cut_off[rank] = until
            for other in range(self.size):
                for rail in (CONTROL, *range(self.rails)) if other != rank else ():
                    weather = self.fabric.of(rank, other, rail)
                    weather.silent = [max(until, s) for s in weather.silent]
                    weather.ails = max(weather.ails, until)
        elif kind == "late":
            self.late.add(rank)
        elif kind == "close":
            self.close(node)
        else:
            self.rail_fault(kind, node, until)

    def rail_fault(self, kind: str, node: Node, until: float) -> None:
        peer = self.random.choice([r for r in range(self.size) if r != node.rank])
        rail = self.random.randrange(self.rails)
        weather = self.fabric.of(node.rank, peer, rail)
        weather.ails = max(weather.ails, until)
        match kind:
            case "break":
                weather.broken = max(weather.broken, until)
            case "slow":
                weather.slow = max(weather.slow, until)
            case "loss":
                weather.losing = max(weather.losing, until)
            case "double":
                weather.doubling = max(weather.doubling, until)
            case "silence":
                direction = self.random.randrange(2)
                weather.silent[direction] = max(weather.silent[direction], until)
        if not node.generation or peer not in node.ranks:
            return
        index = node.ranks.index(peer)
        connection = node.rails.get((index, rail))
        if connection is None:
            return
        if kind == "break":
            self.fabric.break_(connection, (0, 1))
        elif kind == "half-open":
            self.fabric.break_(connection, (self.random.randrange(2),))
        elif kind == "slow":
            self.leave_slow(node, index, rail)
        elif kind == "garbage":
            self.send_garbage(node, index, rail)

    def leave_slow(self, node: Node, peer: int, rail: int) -> None:
        rails = node.links[peer].rails
        before = any(r.usable for r in rails)
        self.drive(node, node.peers[peer].tell, l.RailSlow(rail))
        if before and not any(r.usable for r in rails):
            raise self.fail(f"rank {node.rank} left its last rail to rank {node.ranks[peer]} for being slow")

    def send_garbage(self, node: Node, peer: int, rail: int) -> None:
        other = self.nodes[node.ranks[peer]]
        if not other.alive or other.generation != node.generation:
            return
        received = other.links[other.ranks.index(node.rank)]._inbox.ledger.floor
        wire = garbage(self.random, node.generation, self.rails, received)
        self.fabric.inject(node.rails[peer, rail], self.end(node, peer), wire)

    def close(self, node: Node) -> None:
        """The process leaves its generation in order, at any point of its work."""
        if node.generation and node.paused_until <= self.clock.now:
            self.count["closes"] += 1
            node.closing = True
            told = [node.ranks[peer] for peer, link in node.links.items() if any(rail.up for rail in link.rails)]
            self.farewells |= {(node.generation, node.rank, rank) for rank in told}
            self.tell(node, c.Aborted(Cause("it closes", f"rank {node.rank}")))

    def peer_ended(self, node: Node, peer: int, how: l.Lost | l.PeerAborted) -> None:
        told = (node.generation, node.ranks[peer], node.rank) in self.farewells
        if told and isinstance(how, l.Lost) and set(self.faults) == {"close"}:
            raise self.fail(f"rank {node.rank} lost rank {node.ranks[peer]}, which had left in order: {how.cause}")

    def crash(self, node: Node) -> None:
        node.alive = False
        self.count["crashes"] += 1
        self.joining.pop(node.rank, None)
        silent = node.unreachable = self.random.random() < 0.3
        for (peer, _), connection in node.rails.items():
            self.fabric.crash(connection, self.end(node, peer), silent)
        self.tally(node)
        # a death is noticed by the connection at once, by silence within one and a half periods
        plain = not silent and set(self.faults) <= {"crash", "late"}
        bound = 0.02 if plain else 1.55 * OPTIONS.period_s
        for other in self.nodes.values():
            if node.generation and other.alive and other.generation == node.generation and other.rank in node.ranks:
                self.clock.at(self.clock.now + bound, self.noticed, other, node, self.clock.now)
        self.pending += 1
        self.clock.after((0.01, 0.8), self.boot, node.rank, node.incarnation + 1)

    def noticed(self, node: Node, dead: Node, since: float) -> None:
        if node.alive and node.generation == dead.generation and node.paused_until < since:
            raise self.fail(f"rank {node.rank} has not noticed the death of rank {dead.rank} at {since:.4f}")
