"""RDMA verbs: a fault-tolerant link against a bare ring of queue pairs, and how fast it fails over and back.

Runs where there are two RDMA ports that reach each other, and two more as their backups; `helixrt lab run --nics 2` makes
them anywhere. Both ends are in this process. The bare ring is what a user would write with pyverbs: chunks of the same size
by WRITE_WITH_IMM into slots, credits by completion, each chunk copied to where it belongs; no frames, no acknowledgements,
nothing survives a failure. Rounds of both are interleaved. Failures are made on the lab's NIC pairs only (`--failures`);
times are those of the SHIFT paper's Figure 8: from the completion that failed to the first one on the backup.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helixrt.bench._figures import Spread
from helixrt.lab import nics
from helixrt.lab.nics import NicPair
from helixrt.transport.contract import Received, Sent
from helixrt.transport.process_memory import address_of
from helixrt.transport.verbs import VerbsEndpoint, VerbsOptions
from helixrt.transport.verbs_connection import VerbsConnection
from helixrt.transport.verbs_devices import Nic, VerbsRail
from helixrt.transport.verbs_library import library
from helixrt.transport.verbs_peer import VerbsPeer
from helixrt.transport.verbs_queue_pair import CHAIN, NUMBER_MASK, RECEIVE_BIT, Patience, QueuePair, Request, Sizes
from helixrt.transport.verbs_wire import Attributes

_LIMIT_S = 120.0
_PATIENCE = Patience(timeout=16, retries=2)  # of the rates: emulated, a busy machine answers late
_SHORT_PATIENCE = Patience(timeout=12, retries=2)  # of the failures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--here", nargs="+", default=["rxe_a1", "rxe_a2"], metavar="DEVICE", help="one end's, default first")
    parser.add_argument("--there", nargs="+", default=["rxe_b1", "rxe_b2"], metavar="DEVICE", help="the other end's")
    parser.add_argument("--chunk-kib", type=int, default=256, help="of a ring's slot (default 256)")
    parser.add_argument("--slots", type=int, default=16, help="of a ring (default 16)")
    parser.add_argument("--message-mib", type=float, default=4.0, help="of a link's message (default 4)")
    parser.add_argument("--total-mib", type=float, default=64.0, help="moved in one round (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (default 5)")
    parser.add_argument("--failures", type=int, default=0, help="of each kind, in the lab (default 0)")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    sizes = Sizes(chunk_bytes=args.chunk_kib << 10, slots=args.slots)
    total, message = int(args.total_mib * (1 << 20)), int(args.message_mib * (1 << 20))
    bare: list[float] = []
    link: list[float] = []
    print(f"verbs: {args.here[0]} to {args.there[0]}, chunks of {args.chunk_kib} KiB, {args.total_mib:g} MiB a round")
    with_link = Pair(args.here, args.there, sizes)
    ring = Ring(args.here[0], args.there[0], sizes, message)
    try:
        with_link.move(total, message), ring.move(total)  # what is made once, is made
        for number in range(args.rounds):
            for which in (("ring", "link"), ("link", "ring"))[number % 2]:
                rate = ring.move(total) if which == "ring" else with_link.move(total, message)
                (bare if which == "ring" else link).append(rate / 1e6)
        calls, spent = with_link.cost(total, message)
    finally:
        ring.close()
        with_link.close()
    spreads = {"ring_MB_s": Spread.of(bare), "link_MB_s": Spread.of(link)}
    spreads["link_over_ring"] = Spread.of([a / b for a, b in zip(link, bare, strict=True)])
    chunks = -(-total // sizes.chunk_bytes)
    for name, spread in spreads.items():
        print(f"  {name:22}{spread}")
    print(f"  the machine: {calls / chunks:.2f} calls and {1e6 * spent / chunks:.1f} us a chunk, both ends together")
    failures: dict[str, Any] = {}
    if args.failures:
        failures = measure_failures(args, sizes)
    if args.json is not None:
        figures = {name: asdict(spread) for name, spread in spreads.items()}
        machine = {"device": platform.machine(), "kernel": platform.release(), "cores": os.cpu_count(),
                   "python": platform.python_version(), "lab": nics.GUEST in os.environ}  # fmt: skip
        settings = {key: value for key, value in vars(args).items() if isinstance(value, int | float | list)}
        cost = {"calls_per_chunk": calls / chunks, "us_per_chunk": 1e6 * spent / chunks}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        everything = {"benchmark": "verbs", "machine": machine, "settings": settings, "figures": figures,
                      "machine_cost": cost, "failures": failures}  # fmt: skip
        args.json.write_text(json.dumps(everything, indent=2) + "\n")
        print(f"  written to {args.json}")
    return 0


# ---------------------------------------------------------------- the link


class Pair:
    """Two endpoints in this process, driven by one loop."""

    def __init__(self, here: list[str], there: list[str], sizes: Sizes, patience: Patience = _PATIENCE) -> None:
        settings = VerbsOptions(sizes=sizes, patience=patience, restore_s=10.0)
        self.ends = [VerbsEndpoint(b"bench", [VerbsRail(device=d) for d in names], options=settings) for names in (here, there)]
        addresses = [end.address() for end in self.ends]
        first = threading.Thread(target=lambda: self.ends[0].connect(1, 0, {1: addresses[1]}, 30.0), name="bench-connect")
        first.start()
        self.ends[1].connect(1, 1, {0: addresses[0]}, 30.0)
        first.join()
        self._op = 0
        self.source = self.target = memoryview(b"")
        self.arrived: dict[tuple[int, int], float] = {}
        self.sent: set[tuple[int, int]] = set()
        self.drive(lambda: all(rail.usable for end in (0, 1) for rail in self.link(end).rails))

    def peer(self, end: int) -> VerbsPeer:
        peer = self.ends[end]._peers[1 - end]
        assert isinstance(peer, VerbsPeer)
        return peer

    def link(self, end: int) -> Any:
        return self.peer(end).link

    def turn(self) -> None:
        """Drive both ends once; wait for something to do, not long."""
        for end in self.ends:
            for outcome in end.progress(time.monotonic()):
                match outcome:
                    case Received(_, op, index):
                        self.arrived[op, index] = time.monotonic()
                    case Sent(_, op, index):
                        self.sent.add((op, index))
                    case _:
                        raise RuntimeError(f"the link ended: {outcome.cause}")

    def drive(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + _LIMIT_S
        while not done():
            self.turn()
            if done():
                return
            poll, wake = select.poll(), time.monotonic() + 0.1
            for end in self.ends:
                for descriptor, mask in end.descriptors().items():
                    poll.register(descriptor, mask)
                wake = min(wake, end.next_deadline() or wake)
            poll.poll(max(0.0, wake - time.monotonic()) * 1000)
            if time.monotonic() > until:
                raise TimeoutError("the link did not come to an end")

    def begin(self, total: int, message: int) -> list[tuple[int, int]]:
        """Receive and send `total` bytes in messages; their names."""
        self._op += 1
        if len(self.source) < total:
            self.source, self.target = memoryview(bytearray(total)), memoryview(bytearray(total))
        names = []
        for index, at in enumerate(range(0, total, message)):
            self.ends[1].receive(0, self._op, index, self.target[at : min(at + message, total)])
            self.ends[0].send(1, self._op, index, self.source[at : min(at + message, total)])
            names.append((self._op, index))
        return names

    def move(self, total: int, message: int) -> float:
        """Bytes a second."""
        begin = time.perf_counter()
        names = self.begin(total, message)
        self.drive(lambda: all(name in self.arrived and name in self.sent for name in names[-1:]) and self.all_done(names))
        return total / (time.perf_counter() - begin)

    def all_done(self, names: list[tuple[int, int]]) -> bool:
        return all(name in self.arrived and name in self.sent for name in names)

    def cost(self, total: int, message: int) -> tuple[int, float]:
        """Calls of the pure machines for one round, and the seconds they took."""
        calls, spent = 0, 0.0
        for end in (0, 1):
            link = self.link(end)

            def counted(event: Any, now: float, on: Any = link.on) -> Any:
                nonlocal calls, spent
                begin = time.perf_counter()
                actions = on(event, now)
                spent += time.perf_counter() - begin
                calls += 1
                return actions

            link.on = counted
        self.move(total, message)
        for end in (0, 1):
            del self.link(end).on
        return calls, spent

    def close(self) -> None:
        for end in self.ends:
            end.close()


# ---------------------------------------------------------------- the bare ring


class Ring:
    """One queue pair each way, one direction of traffic, no way to survive anything."""

    def __init__(self, here: str, there: str, sizes: Sizes, message: int) -> None:
        self._sizes = sizes
        self._nics = [Nic(library(), VerbsRail(device=name)) for name in (here, there)]
        self._pairs = [QueuePair(nic, sizes, _PATIENCE) for nic in self._nics]
        attributes = [pair.arm() for pair in self._pairs]
        for pair, theirs in zip(self._pairs, reversed(attributes), strict=True):
            pair.connect(theirs, pair.nic.rail)
        self._theirs: Attributes = attributes[1]
        self._source, self._target = memoryview(bytearray(message)), memoryview(bytearray(message))
        enums = library().enums
        self._address = address_of(self._source)
        self._region = library().MR(self._nics[0].domain, message, enums.ACCESS_LOCAL_WRITE, address=self._address)
        self._number = self._slot = self._in = 0

    def move(self, total: int) -> float:
        """Bytes a second."""
        enums, chunk, sizes = library().enums, self._sizes.chunk_bytes, self._sizes
        sender, receiver = self._pairs
        message = len(self._source)
        posted = received = under_way = 0
        begin = time.perf_counter()
        lengths: deque[int] = deque()
        while received < total:
            batch: list[Request] = []
            while posted < total and under_way < sizes.slots and len(batch) < CHAIN:
                at = posted % message
                length = min(chunk, message - at, total - posted)
                batch.append(
                    Request(
                        self._number, enums.WR_RDMA_WRITE_WITH_IMM, enums.SEND_SIGNALED, self._address + at, length,
                        int(self._region.lkey), self._slot, self._theirs.ring_address + self._slot * chunk,
                        self._theirs.ring_key,
                    )
                )  # fmt: skip
                self._number += 1
                self._slot = (self._slot + 1) % sizes.slots
                posted, under_way = posted + length, under_way + 1
                lengths.append(length)
            if batch:
                sender.post(batch)
            found = self._completions()
            for completion in found:
                if completion.status != enums.WC_SUCCESS:
                    raise RuntimeError(f"the ring broke: status {completion.status}")
                if not completion.wr_id & RECEIVE_BIT:
                    continue
                index, length = completion.wr_id & NUMBER_MASK, lengths.popleft()
                at = received % message
                self._target[at : at + length] = receiver.slot(int(completion.imm_data))[:length]
                if index % CHAIN == CHAIN - 1:
                    receiver.post_receives(index + 1 - CHAIN)
                received, under_way = received + length, under_way - 1
        return total / (time.perf_counter() - begin)

    def _completions(self) -> list[Any]:
        """Of both ends; waits for one."""
        while True:
            ready, _, _ = select.select([pair.events for pair in self._pairs], [], [], 10.0)
            if not ready:
                raise TimeoutError("the ring stands still")
            found = []
            for pair in self._pairs:
                if pair.events in ready:
                    pair.take_event()
                    while some := pair.poll():
                        found += some
            if found:
                return found

    def close(self) -> None:
        self._region.close()
        for pair in self._pairs:
            pair.close()
        for nic in self._nics:
            nic.close()


# ---------------------------------------------------------------- failures


@dataclass
class Moments:
    """When what happened to one end's rails; monotonic seconds."""

    failed: list[float] = field(default_factory=list)  # completions or events that failed
    completed: dict[int, list[float]] = field(default_factory=dict)  # by rail


class Watched:
    """While it is open, connections tell when they fail and when their work requests are completed."""

    def __enter__(self) -> Moments:
        moments = Moments()
        self._broke, self._complete = VerbsConnection._broke, VerbsConnection._complete
        broke, complete = self._broke, self._complete

        def broke_(connection: VerbsConnection, failure: Any, reason: str) -> None:
            moments.failed.append(time.monotonic())
            broke(connection, failure, reason)

        def complete_(connection: VerbsConnection, low: int) -> None:
            moments.completed.setdefault(connection.number, []).append(time.monotonic())
            complete(connection, low)

        VerbsConnection._broke, VerbsConnection._complete = broke_, complete_  # type: ignore
        return moments

    def __exit__(self, *_: object) -> None:
        VerbsConnection._broke, VerbsConnection._complete = self._broke, self._complete  # type: ignore[method-assign]


BREAK: dict[str, Callable[[NicPair], float | None]] = {
    "local down": lambda pair: pair.down("a"),
    "remote down": lambda pair: pair.down("b"),
    "blackhole": lambda pair: pair.blackhole(),
}


def measure_failures(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Per kind of failure, in milliseconds: until it shows, from there to the first completion on the backup, and from the
    NIC's return until traffic is back."""
    pair_of_nics = nics.existing()[0]
    message = 1 << 20
    figures: dict[str, Any] = {}
    for how, break_it in BREAK.items():
        shown, switched, back = [], [], []
        for _ in range(args.failures):
            pair_of_nics.heal()
            two = Pair(args.here, args.there, sizes, _SHORT_PATIENCE)
            try:
                with Watched() as moments:
                    names = two.begin(24 * message, message)
                    two.drive(lambda two=two, names=names: sum(n in two.arrived for n in names) >= 4)  # type: ignore[misc]
                    at = time.monotonic()
                    at = break_it(pair_of_nics) or at
                    while not moments.failed:  # what was under way may have come before the kernel had changed anything
                        two.drive(lambda two=two, names=names: bool(moments.failed) or two.all_done(names))  # type: ignore[misc]
                        names = names if moments.failed else two.begin(24 * message, message)
                    two.drive(lambda two=two, names=names: two.all_done(names))  # type: ignore[misc]
                    first = min(moments.failed)
                    shown.append(1e3 * (first - at))
                    switched.append(1e3 * (min(t for t in moments.completed[1] if t > first) - first))
                    up = time.monotonic()
                    pair_of_nics.heal()
                    two.drive(lambda two=two: two.link(0).rails[0].usable)  # type: ignore[misc]
                    back.append(1e3 * (time.monotonic() - up))
            finally:
                two.close()
                pair_of_nics.heal()
        figures[how] = {"shown_ms": shown, "switched_ms": switched, "back_ms": back}
        print(f"  {how:12} shown after {_span(shown)} ms, on the backup {_span(switched)} later, back {_span(back)} after it")
    return figures


def _span(values: list[float]) -> str:
    middle = sorted(values)[len(values) // 2]
    return f"{min(values):.1f} to {max(values):.1f} (half under {middle:.1f})"
