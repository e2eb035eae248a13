"""The exchange over Gloo: the shared suite, and what happens when Gloo itself cannot connect."""

from __future__ import annotations

import gc
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixrt.collectives.gloo import GlooExchange
from helixrt.collectives.gloo_private import GlooDevice
from helixrt.errors import Retryable
from tests.collectives.exchange_conformance import (
    DEADLINE_S,
    ExchangeConformance,
    await_resources,
    configure_all,
    on_threads,
    resources,
)

pytest.importorskip("torchft", reason="torchft is not installed (extra: ft)")


class TestGloo(ExchangeConformance):
    kind = "gloo"


def test_failing_to_connect_again_and_again_leaks_nothing(store_address: str) -> None:
    """A member that announces itself and then never connects: no descriptor may wait for a collection."""
    server, ghost = store_address.rsplit(":", 1), GlooExchange(timeout_s=0.1)
    client = dist.TCPStore(server[0], int(server[1]), is_master=False, wait_for_workers=False)

    def fail(generation: int, abort: bool) -> None:
        announced: Any = dist.PrefixStore(f"ghost/{generation}", client)  # typed for text, takes bytes
        announced.set("address/1", struct.pack("<q", generation) + b"127.0.0.1 1")
        timer = threading.Timer(0.05, ghost.abort)
        if abort:
            timer.start()
        with pytest.raises(Retryable):
            ghost.configure(generation, (0, 1), 0, f"{store_address}/ghost/{generation}")
        timer.cancel()

    gc.disable()
    try:
        for generation in range(3):
            fail(generation, abort=False)
        ghost._stores.at(store_address, DEADLINE_S)  # connected, also where the store answered too late
        settled = resources()
        for generation in range(3, 18):
            fail(generation, abort=generation % 2 == 0)
        await_resources(settled)
    finally:
        gc.enable()
    ghost.close()


# ---------------------------------------------------------------- which sockets an abort ends


class Stream:
    """A TCP connection of this process that is not Gloo's, by both ends."""

    def __init__(self, server: socket.socket, dialled: socket.socket) -> None:
        server.settimeout(DEADLINE_S)
        self.server, self.dialled = server, dialled
        self.accepted, _ = server.accept()

    def works(self) -> bool:
        for one, other in ((self.dialled, self.accepted), (self.accepted, self.dialled)):
            try:
                one.sendall(b"x")
            except OSError:
                return False
            other.settimeout(DEADLINE_S)
            if other.recv(1) != b"x":
                return False
        return True

    def close(self) -> None:
        for each in (self.server, self.dialled, self.accepted):
            each.close()


def listening(exchange: GlooExchange) -> tuple[str, int]:
    assert exchange._device is not None and exchange._device.known
    return exchange._device.address


@pytest.fixture
def two(store_address: str) -> Iterator[list[GlooExchange]]:
    """Connected, in one process."""
    members = [GlooExchange(timeout_s=DEADLINE_S) for _ in range(2)]
    configure_all(members, 1, store_address)  # type: ignore[arg-type]
    yield members
    for member in members:
        member.close()


def all_reduced(members: list[GlooExchange]) -> list[BaseException | None]:
    source, outs = torch.ones(7), [torch.empty(7) for _ in members]
    return on_threads([lambda r=r: members[r].all_reduce(source, outs[r]) for r in range(len(members))])


def test_an_abort_leaves_connections_that_have_the_same_port_at_another_address(two: list[GlooExchange]) -> None:
    """A server of the program at another address of the host, on the port that a Gloo device happens to have too."""
    assert all_reduced(two) == [None, None]
    streams = []
    for member in two:
        server = socket.create_server(("127.0.0.2", listening(member)[1]))
        streams.append(Stream(server, socket.create_connection(server.getsockname(), DEADLINE_S)))
    two[0].abort()
    assert all(stream.works() for stream in streams)
    assert all(isinstance(error, Retryable) for error in all_reduced(two))  # those of Gloo are ended
    for stream in streams:
        stream.close()


def test_an_abort_leaves_connections_to_a_peers_address_that_gloo_did_not_make(store_address: str) -> None:
    """The program connects to where a peer's Gloo device listens, before the group does and after: only Gloo's are ended."""
    members = [GlooExchange(timeout_s=DEADLINE_S) for _ in range(2)]
    for member in members:
        member._device = GlooDevice("127.0.0.1")
    theirs = listening(members[1])
    before = socket.create_connection(theirs, DEADLINE_S)
    configure_all(members, 1, store_address)  # type: ignore[arg-type]
    assert all_reduced(members) == [None, None]
    after = socket.create_connection(theirs, DEADLINE_S)
    members[0].abort()
    for each in (before, after):
        each.sendall(b"x")  # raises BrokenPipeError where this end was shut down
        each.close()
    assert all(isinstance(error, Retryable) for error in all_reduced(members))
    for member in members:
        member.close()
