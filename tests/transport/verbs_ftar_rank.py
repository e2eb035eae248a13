"""One of two ranks that sum buffers by FTAR over verbs, without torch: the collective machine, its ring, an endpoint.

Run as a program by `test_verbs_ftar`. Words go as lines: it says its address, hears the other's, then says the digest of
every sum; at the end what its link went through.
"""

from __future__ import annotations

import hashlib
import json
import select
import sys
import time
from typing import Any

import numpy as np

from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.algorithms.ring import ring_all_reduce
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.collective.messages import Await, Compute, Computed, Done, Received, Sent, Submitted, Transmit
from helixrt.protocol.collective.plan import Copy, Region, Space
from helixrt.transport import contract
from helixrt.transport.verbs.devices import VerbsRail
from helixrt.transport.verbs.endpoint import VerbsEndpoint, VerbsOptions
from helixrt.transport.verbs.queue_pair import Patience

TUNING = Tuning(chunk_bytes=256 << 10, chunks=4, least_chunk_bytes=64 << 10)


def gradient(rank: int, step: int, elements: int) -> Any:
    """What a rank gives to the sum of a step."""
    return np.random.default_rng((rank, step)).standard_normal(elements, dtype=np.float32)


def digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


class Rank:
    def __init__(self, rank: int, endpoint: VerbsEndpoint) -> None:
        self.rank, self.endpoint = rank, endpoint
        self.machine = CollectiveMachine(rank, 2, 64 << 20)
        self.memory: dict[Space, Any] = {}
        self.done = -1

    def all_reduce(self, op: int, source: Any) -> Any:
        plan = ring_all_reduce(self.rank, 2, source.nbytes, source.itemsize, TUNING)
        out = np.empty_like(source)
        scratch = np.empty(plan.scratch_bytes, np.uint8)
        self.memory = {Space.SOURCE: source.view(np.uint8), Space.OUT: out.view(np.uint8), Space.SCRATCH: scratch}
        self.carry_out(self.machine.on(Submitted(op, plan)))
        until = time.monotonic() + 120
        while self.done < op:
            assert time.monotonic() < until, "the sum did not come to an end"
            self.turn()
        return out

    def wait_for_a_line(self) -> None:
        """The other rank may still need this one meanwhile, for what is sent again and for the way back to a healed NIC."""
        while not select.select([sys.stdin], [], [], 0)[0]:
            self.turn()
        sys.stdin.readline()

    def turn(self) -> None:
        poll = select.poll()
        for descriptor, mask in self.endpoint.descriptors().items():
            poll.register(descriptor, mask)
        due = self.endpoint.next_deadline()
        poll.poll(100 if due is None else min(100.0, max(0.0, 1000 * (due - time.monotonic()))))
        for outcome in self.endpoint.progress(time.monotonic()):
            match outcome:
                case contract.Sent(peer, op, index):
                    self.carry_out(self.machine.on(Sent(op, peer, index)))
                case contract.Received(peer, op, index):
                    self.carry_out(self.machine.on(Received(op, peer, index)))
                case _:
                    raise RuntimeError(f"the link ended: {outcome.cause}")

    def bytes_of(self, region: Region) -> Any:
        return self.memory[region.space][region.offset : region.offset + region.length]

    def carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Transmit(op, peer, index, region):
                    self.endpoint.send(peer, op, index, memoryview(self.bytes_of(region)))
                case Await(op, peer, index, region):
                    self.endpoint.receive(peer, op, index, memoryview(self.bytes_of(region)))
                case Compute(op, node, Copy(source, into)):
                    self.bytes_of(into)[:] = self.bytes_of(source)
                    self.carry_out(self.machine.on(Computed(op, node)))
                case Compute(op, node, work):
                    total = self.bytes_of(work.left).view(np.float32) + self.bytes_of(work.right).view(np.float32)
                    for into in work.into:
                        self.bytes_of(into).view(np.float32)[:] = total
                    self.carry_out(self.machine.on(Computed(op, node)))
                case Done(op):
                    self.done = op
                case _:
                    raise RuntimeError(f"the exchange broke: {action}")


def main() -> None:
    rank, steps, elements = (int(word) for word in sys.argv[1:4])
    rails = [VerbsRail(device=f"rxe_{'ab'[rank]}{number}") for number in (1, 2)]
    options = VerbsOptions(patience=Patience(timeout=14, retries=2), restore_s=10.0, period_s=5.0)
    endpoint = VerbsEndpoint(b"two ranks", rails, options=options)
    print(endpoint.address().hex(), flush=True)
    endpoint.connect(1, rank, {1 - rank: bytes.fromhex(sys.stdin.readline())}, 60.0)
    link = endpoint._peers[1 - rank].link
    one = Rank(rank, endpoint)
    while not all(rail.usable for rail in link.rails):
        one.turn()
    for step in range(steps):
        print(digest(one.all_reduce(step, gradient(rank, step, elements))), flush=True)
    told = {"failovers": link.failovers, "resent": link.resent, "duplicates": link.duplicates}
    print(json.dumps(told), flush=True)
    one.wait_for_a_line()
    endpoint.close()


if __name__ == "__main__":
    main()
