"""RDMA verbs: a fault-tolerant link compared with a bare ring of queue pairs, and the time of failover and fail-back.

Runs where there are two RDMA ports that reach each other, and two more as their backups; `helixrt lab run --nics 2` makes
them anywhere. For the rates both ends are in this process. The bare ring is what a user would write with pyverbs: chunks of
the same size by WRITE_WITH_IMM into slots, credits by completion, each chunk copied to where it belongs; no frames, no
acknowledgements, nothing survives a failure. Rounds of both are interleaved. Failures (`--failures`) and the throughput over
time (`--picture`) need the lab's NIC pairs, which are disabled and enabled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from helixrt.bench import _verbs_failures, _verbs_picture
from helixrt.bench._arguments import add_json
from helixrt.bench._figures import Spread
from helixrt.bench._verbs_pair import Pair
from helixrt.lab import nics
from helixrt.protocol.verbs.flow import CHAIN
from helixrt.transport.process_memory import address_of
from helixrt.transport.verbs.devices import Nic, VerbsRail
from helixrt.transport.verbs.library import library
from helixrt.transport.verbs.queue_pair import NUMBER_MASK, RECEIVE_BIT, Patience, QueuePair, Request, Sizes
from helixrt.transport.verbs.wire import Attributes

_DEFAULT = Sizes()
_PATIENCE = Patience(timeout=18, retries=6)  # of the rates: emulated, a busy machine answers late


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--here", nargs="+", default=["rxe_a1", "rxe_a2"], metavar="DEVICE", help="devices of one end, the default rail first"
    )
    parser.add_argument("--there", nargs="+", default=["rxe_b1", "rxe_b2"], metavar="DEVICE", help="devices of the other end")
    chunk_kib, slots = _DEFAULT.chunk_bytes >> 10, _DEFAULT.slots
    parser.add_argument("--chunk-kib", type=int, default=chunk_kib, help=f"size of a slot of the ring (default {chunk_kib})")
    parser.add_argument("--slots", type=int, default=slots, help=f"slots of the ring (default {slots})")
    parser.add_argument("--message-mib", type=float, default=4.0, help="size of a message of the link (default 4)")
    parser.add_argument("--total-mib", type=float, default=64.0, help="bytes that one round sends (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of ring and link (default 5)")
    parser.add_argument("--failures", type=int, default=0, help="failures of each kind, in the lab (default 0)")
    parser.add_argument(
        "--picture", type=Path, default=None, help="draw the throughput during a failure, in the lab, to this PNG file"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    sizes = Sizes(chunk_bytes=args.chunk_kib << 10, slots=args.slots)
    total, message = int(args.total_mib * (1 << 20)), int(args.message_mib * (1 << 20))
    bare: list[float] = []
    link: list[float] = []
    print(f"verbs: {args.here[0]} to {args.there[0]}, chunks of {args.chunk_kib} KiB, {args.total_mib:g} MiB a round")
    with_link = Pair(args.here, args.there, sizes, _PATIENCE)
    ring = Ring(args.here[0], args.there[0], sizes, message)
    try:
        with_link.move(total, message), ring.move(total)  # what is made once, is made
        for number in range(args.rounds):
            for which in (("ring", "link"), ("link", "ring"))[number % 2]:
                rate = ring.move(total) if which == "ring" else with_link.move(total, message)
                (bare if which == "ring" else link).append(rate / 1e6)
        costs = with_link.cost(total, message)
    finally:
        ring.close()
        with_link.close()
    spreads = {"ring_MB_s": Spread.of(bare), "link_MB_s": Spread.of(link)}
    spreads["link_over_ring"] = Spread.of([a / b for a, b in zip(link, bare, strict=True)])
    chunks = -(-total // sizes.chunk_bytes)
    for name, spread in spreads.items():
        print(f"  {name:22}{spread}")
    cost = {
        end: {"calls_per_chunk": each.calls / chunks, "us_per_chunk": 1e6 * each.seconds / chunks}
        for end, each in zip(("sender", "receiver"), costs, strict=True)
    }
    for end, of_one in cost.items():
        print(f"  the {end}'s machine: {of_one['calls_per_chunk']:.2f} calls and {of_one['us_per_chunk']:.1f} us a chunk")
    failures: dict[str, Any] = {}
    devices = (args.here, args.there)
    if args.failures:
        failures = _verbs_failures.measure(nics.existing()[0], devices, sizes, args.failures)
    if args.json is not None:
        figures = {name: asdict(spread) for name, spread in spreads.items()}
        machine = {"device": platform.machine(), "kernel": platform.release(), "cores": os.cpu_count(),
                   "python": platform.python_version(), "lab": nics.GUEST in os.environ}  # fmt: skip
        settings = {key: value for key, value in vars(args).items() if isinstance(value, int | float | list)}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        everything = {"benchmark": "verbs", "machine": machine, "settings": settings, "figures": figures,
                      "machine_cost": cost, "failures": failures}  # fmt: skip
        args.json.write_text(json.dumps(everything, indent=2) + "\n")
        print(f"  written to {args.json}")
    if args.picture is not None:
        _verbs_picture.write(_verbs_picture.record(nics.existing()[0], devices, sizes, _verbs_failures.PATIENCE), args.picture)
    return 0


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
                raise TimeoutError("the ring makes no progress")
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
