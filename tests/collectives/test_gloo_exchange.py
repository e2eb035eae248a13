"""The exchange over Gloo: the shared suite, and what happens when Gloo itself cannot connect."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from helixrt.collectives.gloo import GlooExchange
from helixrt.errors import Retryable
from helixrt.replica.store import host_store
from tests.collectives.exchange_conformance import ExchangeConformance, await_resources, resources

pytest.importorskip("torchft", reason="torchft is not installed (extra: ft)")


@pytest.fixture
def store_address() -> Iterator[str]:
    server, address = host_store()
    yield address
    del server


class TestGloo(ExchangeConformance):
    kind = "gloo"


def test_failing_to_connect_again_and_again_leaks_nothing(store_address: str) -> None:
    """A member that announces itself and then never connects: no descriptor may wait for a collection."""
    server, ghost = store_address.rsplit(":", 1), GlooExchange(timeout_s=0.1)
    client = dist.TCPStore(server[0], int(server[1]), is_master=False, wait_for_workers=False)

    def fail(generation: int, abort: bool) -> None:
        dist.PrefixStore(f"ghost/{generation}", client).set("port/1", "1")
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
        settled = resources()
        for generation in range(3, 18):
            fail(generation, abort=generation % 2 == 0)
        await_resources(settled)
    finally:
        gc.enable()
    ghost.close()
