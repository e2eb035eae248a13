"""The process that serves a kept run: its durable store, its membership service, and torch's store for the ranks' rendezvous.

In: a `StoreOrder` as one line of JSON on standard input, and two listening sockets that the keeper has opened and keeps open,
so that nobody else takes their ports while this process is started again. Out: the three servers, until the keeper ends or
standard input does; the lighthouse's address as a line of JSON through the descriptor `told`.

The durable store comes with the values that its journal has. Torch's store begins empty: all that is in it is the rendezvous of
one generation of an exchange, and whoever meets there when it is lost forms the next generation. So does the lighthouse:
replicas ask it again for every step, and generations count time. It serves before torch is imported, which takes seconds.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from helixrt.job.machine import boot_identity
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.store_journal import Identity, Refused
from helixrt.replica.lighthouse import begin_lighthouse
from helixrt.replica.store_file import StoreFile
from helixrt.replica.store_server import StoreServer
from helixrt.replica.telling import flush_all, tell
from helixrt.timeouts import derive

REFUSED_CODE = 78  # it is of no use to start it again: its journal cannot be taken
FOLDER = "store"  # in the run's folder
_PORT_S, _PORT_PAUSE_S = 30.0, 0.2  # how long the lighthouse's port is tried, and how often
NO_LIGHTHOUSE = -1


@dataclass(frozen=True)
class StoreOrder:
    """`durable`, `plain`, `told`: descriptors; `plain_address`: of the second, as `host:port`; `lighthouse`: its port, 0 for
    any, NO_LIGHTHOUSE for none; `begun`: a process before this one has served the store, so there must be a journal."""

    folder: str
    run: str
    life: int
    secret: str
    host: str
    durable: int
    plain: int
    plain_address: str
    told: int
    lighthouse: int
    step_timeout_s: float
    heartbeat_s: float
    begun: bool

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: str) -> StoreOrder:
        return StoreOrder(**json.loads(line))


def _lighthouse(order: StoreOrder) -> tuple[Any, str]:
    """Raises RuntimeError if its port stays taken."""
    if order.lighthouse == NO_LIGHTHOUSE:
        return None, ""
    os.environ.setdefault("RUST_LOG", "error")  # torchft's server tells every quorum otherwise
    from helixrt.replica.lighthouse_beats_private import server_class

    server, timeouts = server_class(), derive(order.step_timeout_s, order.heartbeat_s)
    deadline = time.monotonic() + _PORT_S
    while True:
        try:
            return begin_lighthouse(server, timeouts, order.host, order.lighthouse)
        except (RuntimeError, OSError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the lighthouse cannot listen on port {order.lighthouse}: {error}") from error
            time.sleep(_PORT_PAUSE_S)


def members_of(values: Mapping[str, str]) -> list[str]:
    """Who has committed the newest step that the store knows, as the lighthouse calls them."""
    numbers = [int(number) for key in values if (number := key.removeprefix("log/")) != key and number.isdigit()]
    if not numbers:
        return []
    newest = CommitRecord.from_json(values[f"log/{max(numbers)}"])
    return [f"{replica}:{incarnation}" for replica, incarnation in newest.contributors]


def expect(lighthouse: str, members: list[str], timeout_s: float) -> None:
    """Have the first quorum of a lighthouse that begins in the middle of a run wait for these, as it does for whoever sends
    heartbeats: each gives a sign of life in its own time, and the first that asks would go on without the others."""
    from helixrt.replica.lighthouse_beats_private import beat_of, native_module

    library = native_module()
    for member in members:
        beat_of(library, lighthouse, member, timeout_s)()


def serve(order: StoreOrder) -> int:
    """Until standard input ends; the process's exit code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft != hard else (soft, hard))  # a connection for each thread
    try:
        identity = Identity(order.run, order.life, boot_identity())
        file = StoreFile(Path(order.folder) / FOLDER, identity, begun=order.begun)
    except (Refused, OSError) as why:
        tell(f"the run's store is lost: {why}", sys.stdout)
        return REFUSED_CODE
    members = members_of(file.values)
    # Without its thread the process is of no use; the keeper starts another one.
    store = StoreServer(socket.socket(fileno=order.durable), order.secret, file, failed=lambda: os._exit(1))
    _lighthouse_server, address = _lighthouse(order)
    if address:
        expect(address, members, derive(order.step_timeout_s, order.heartbeat_s).heartbeat_limit_s)
    with suppress(BrokenPipeError), open(order.told, "w", encoding="utf-8") as told:  # the keeper may know it already
        told.write(json.dumps(address) + "\n")
    from helixrt.replica.store import serve_store

    _rendezvous = serve_store(order.plain, order.plain_address)
    sys.stdin.read()
    store.close()
    return 0


if __name__ == "__main__":
    code = serve(StoreOrder.from_line(sys.stdin.readline()))
    flush_all()
    os._exit(code)  # threads of torch and of the lighthouse must not keep it
