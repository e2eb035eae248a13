"""How much one TCP connection carries between two hosts of a network.

In: a `Network`, two hosts and a rail. Out: Mbit/s of payload. The two ends run on the hosts as
`python -m helixrt.lab.flow`; the receiver counts from its first byte to its last, so that neither connecting nor a
connection that was slow to close counts. Payload is about 4% less than the rate, which also counts headers.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

from helixrt.lab.namespaces import NetworkError
from helixrt.lab.net import Network

CHUNK_BYTES = 1 << 18
DEADLINE_S = 20.0  # for either end to receive from the other


def measure(network: Network, source: int, target: int, rail: int = 0, seconds: float = 1.0) -> float:
    """Mbit/s of payload that one connection carries from `source` to `target` in about `seconds`.

    NetworkError when nothing comes through.
    """
    here = [sys.executable, "-P", "-m", "helixrt.lab.flow"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    receiver = network.run(target, [*here, "receive", network.address(target, rail)], **pipes)
    ends = [receiver]
    try:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        sender = network.run(source, [*here, "send", network.address(target, rail), port, str(seconds)], **pipes)
        ends.append(sender)
        printed = [end.communicate(timeout=seconds + 3 * DEADLINE_S) for end in (sender, receiver)]
        if sender.returncode or receiver.returncode:
            said = "".join(error for _, error in printed).strip().splitlines() or ["no reason given"]
            raise NetworkError(f"host {source} to host {target} over rail {rail}: {said[-1]}")
        return float(printed[1][0])
    finally:
        for end in ends:
            if end.poll() is None:
                end.kill()
                end.communicate()


def _receive(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        server.settimeout(DEADLINE_S)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(DEADLINE_S)
        buffer = bytearray(CHUNK_BYTES)
        connection.recv_into(buffer)
        begun, last, total = time.monotonic(), 0.0, 0
        while count := connection.recv_into(buffer):
            last, total = time.monotonic(), total + count
    if not total:
        raise ConnectionError("too little came through to measure")
    print(8e-6 * total / (last - begun))


def _send(address: str, port: int, seconds: float) -> None:
    data = memoryview(bytes(CHUNK_BYTES))
    with socket.create_connection((address, port), timeout=DEADLINE_S) as connection:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            connection.sendall(data)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2])
    else:
        _send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
