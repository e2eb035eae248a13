"""One host of `helixrt bench hopping`: a sender or the receiver, over TCP endpoints with one rail per path. No torch.

In: lines of JSON on standard input, each a request that names a method of `Host` and its arguments. Out: for each a line
of JSON on standard output. Its rails it knows from the environment that `lab.net.Network` gives. Between requests the
endpoints continue to be driven, so that no peer reports it as lost.
"""

from __future__ import annotations

import json
import math
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Unloaded
from helixrt.protocol.link.options import LinkOptions
from helixrt.record import FlightRecord, Kind
from helixrt.transport.contract import Received, Sent
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions
from helixrt.transport.tcp.rails import rail_on

SECRET = b"the secret of a benchmark"
DEADLINE_S = 120.0
PERIOD_S = 5.0  # of heartbeats: a busy machine is no failure here
MEMORIES = 8  # that arrive at a time


class Host:
    def __init__(self) -> None:
        self.devices = os.environ["HELIXRT_RAILS"].split(",")
        self.endpoints: dict[str, TcpEndpoint] = {}
        self.records: dict[str, FlightRecord] = {}
        self.side = ""
        self.done: dict[type, int] = {Sent: 0, Received: 0}
        self._out = bytearray()
        self._in: list[bytearray] = []

    @property
    def endpoint(self) -> TcpEndpoint:
        return self.endpoints[self.side]

    # ---- requests

    def open(self, side: str, rails: int, hopping: dict[str, Any] | None) -> str:
        """An endpoint over the first `rails` rails; its address."""
        if hopping is not None:
            unloaded = Unloaded(**hopping.pop("unloaded"))
            options = HoppingOptions(unloaded=unloaded, policy=PolicyName(hopping.pop("policy")), **hopping)
        record = self.records[side] = FlightRecord(side)
        link = LinkOptions(hopping=None if hopping is None else options)
        self.endpoints[side] = TcpEndpoint(
            SECRET,
            [rail_on(device) for device in self.devices[:rails]],
            TcpOptions(period_s=PERIOD_S, link=link, record=record),
        )
        return self.endpoints[side].address().decode()

    def connect(self, side: str, generation: int, me: int, peers: dict[str, str]) -> None:
        """A generation of the endpoint `side`: new connections, and links without information on paths."""
        self.side = side
        self.endpoint.connect(generation, me, {int(rank): raw.encode() for rank, raw in peers.items()}, DEADLINE_S)

    def receive(self, op: int, chunk: int, chunks: dict[str, int]) -> None:
        """Give memory for so many chunks of each sender. What arrives is counted, and overwritten by what follows."""
        while len(self._in) < MEMORIES:
            self._in.append(bytearray(chunk))
        self.done = {Sent: 0, Received: 0}
        for index in range(max(chunks.values())):
            for rank, count in chunks.items():
                if index < count:
                    self.endpoint.receive(int(rank), op, index, memoryview(self._in[index % MEMORIES]))

    def arrived(self, count: int) -> int:
        """Wait until all have come."""
        self._drive(lambda: self.done[Received] >= count)
        return self.done[Received]

    def send(self, to: int, op: int, chunk: int, count: int, at_s: float) -> dict[str, Any]:
        """One flow, from `at_s` on: when it began and ended (monotonic), bytes on every path, hops and probes."""
        if len(self._out) != chunk:
            self._out = bytearray(os.urandom(chunk))
        data, self.done = memoryview(self._out), {Sent: 0, Received: 0}
        self._drive(lambda: time.monotonic() >= at_s, until=at_s)
        before, events = self._bytes_out(), len(self.records[self.side].events())
        begin = time.monotonic()
        for index in range(count):
            self.endpoint.send(to, op, index, data)
        self._drive(lambda: self.done[Sent] == count)
        end = time.monotonic()
        history = [event.kind for event in self.records[self.side].events()[events:]]
        return {
            "begin": begin,
            "end": end,
            "bytes": [after - was for after, was in zip(self._bytes_out(), before, strict=True)],
            "hops": history.count(Kind.HOP),
            "probes": history.count(Kind.PATH_PROBED),
        }

    def history(self, side: str) -> list[dict[str, Any]]:
        """What the flight record has of a side's paths."""
        return [json.loads(event.to_json()) for event in self.records[side].events()]

    # ---- inside

    def _bytes_out(self) -> list[int]:
        """What the kernel has sent on each rail."""
        return [int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text()) for device in self.devices]

    def _drive(self, done: Callable[[], bool], until: float = math.inf) -> None:
        """Until it is done. Raises TimeoutError, and ConnectionError if a link of this side ends meanwhile."""
        limit = time.monotonic() + DEADLINE_S
        while True:
            ends = self._progress()
            if done():
                return
            if ends:
                raise ConnectionError(ends[0])
            if time.monotonic() > limit:
                raise TimeoutError(f"not done within {DEADLINE_S:g} s")
            self._wait(min(until, limit))

    def _progress(self) -> list[str]:
        """Do what can be done now, and count messages; why links of this side ended."""
        ends = []
        for side, endpoint in self.endpoints.items():
            for outcome in endpoint.progress(time.monotonic()):
                if isinstance(outcome, Sent | Received):
                    self.done[type(outcome)] += 1
                elif side == self.side:
                    ends.append(str(outcome.cause))
        return ends

    def _wait(self, until: float, also: int | None = None) -> bool:
        """For something to do, at most until then; whether the descriptor `also` is ready."""
        poll = select.poll()
        if also is not None:
            poll.register(also, select.POLLIN)
        for endpoint in self.endpoints.values():
            for descriptor, mask in endpoint.descriptors().items():
                poll.register(descriptor, mask)
            due = endpoint.next_deadline()
            until = until if due is None else min(until, due)
        ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
        return any(descriptor == also for descriptor, _ in ready)

    def serve(self) -> None:
        heard = b""
        while True:
            while b"\n" not in heard:
                self._progress()  # of a generation that others have left, links end
                if self._wait(time.monotonic() + 1.0, 0):
                    more = os.read(0, 1 << 16)
                    if not more:
                        return
                    heard += more
            line, _, heard = heard.partition(b"\n")
            request = json.loads(line)
            answer = getattr(self, request.pop("do"))(**request)
            print(json.dumps(answer), flush=True)


def run(host: Host) -> None:
    """Carry out requests until standard input ends."""
    try:
        host.serve()
    finally:
        for endpoint in host.endpoints.values():
            endpoint.close()


if __name__ == "__main__":
    run(Host())
