"""Several paths over one cable of the lab: what goes from given UDP source ports has a rate and a queue of its own.

In: an end of a NIC pair, the source ports (of RDMA rails: `VerbsRail.udp_port`) and rates. Out: the kernel's token buckets
before that cable, one per port, and how much went through each. A network with several ways sends a flow by a hash of its
addresses and ports, so a flow label that gives another port is another way; the lab has one cable, so here the port alone
decides where a packet queues, and the queue decides how fast it goes. Other traffic is not held.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from helixrt.lab.nics import CALL_S, End, NicError, NicPair
from helixrt.lab.shaping import Shape, bucket

MOST = 15  # bands of the kernel's prio, less one for all else
QUEUE_MS = 5000.0  # a queue pair that loses a packet sends all since again: a slow path is to be slow, not lossy


class NicPaths:
    """`close` makes it one cable without limits again."""

    def __init__(self, pair: NicPair, end: End | str, ports: Sequence[int], rate_mbit: float) -> None:
        if not 1 <= len(set(ports)) == len(ports) <= MOST:
            raise NicError(f"paths by UDP source ports {list(ports)}: must be 1 to {MOST}, and differ")
        self.ports = tuple(ports)
        self._device = pair.netdev(end)
        first = " ".join(["0"] * 16)  # all else goes to the first band
        self._tc(f"qdisc replace dev {self._device} root handle 1: prio bands {len(ports) + 1} priomap {first}")
        for port in ports:
            match = f"match ip protocol 17 0xff match ip sport {port} 0xffff"
            self._tc(f"filter add dev {self._device} parent 1: protocol ip u32 {match} flowid {self._band(port)}")
            self.set_rate(port, rate_mbit)

    def set_rate(self, port: int, rate_mbit: float) -> None:
        """From now on, for what waits there too."""
        words = " ".join(bucket(Shape(rate_mbit, queue_ms=QUEUE_MS)))
        self._tc(f"qdisc replace dev {self._device} parent {self._band(port)} handle {self._handle(port)} {words}")

    def sent_bytes(self) -> dict[int, int]:
        """Port -> what went on its path."""
        listed: list[dict[str, Any]] = json.loads(self._tc(f"-s -j qdisc show dev {self._device}"))
        sent = {one["handle"]: int(one["bytes"]) for one in listed}
        return {port: sent[self._handle(port)] for port in self.ports}

    def close(self) -> None:
        self._tc(f"qdisc del dev {self._device} root")

    def _band(self, port: int) -> str:
        return f"1:{self.ports.index(port) + 2:x}"

    def _handle(self, port: int) -> str:
        return f"{self.ports.index(port) + 2:x}:"

    def _tc(self, line: str) -> str:
        try:
            done = subprocess.run(["tc", *line.split()], capture_output=True, text=True, timeout=CALL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NicError(f"tc {line}: {error}") from error
        if done.returncode:
            raise NicError(f"tc {line}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
        return done.stdout
