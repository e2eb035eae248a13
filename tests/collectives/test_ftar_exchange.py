"""FTAR as the exchange between replicas: the suite that every exchange passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helixrt.replica.store import host_store
from tests.collectives.exchange_conformance import ExchangeConformance


@pytest.fixture
def store_address() -> Iterator[str]:
    server, address = host_store()
    yield address
    del server


class TestSharedMemory(ExchangeConformance):
    kind = "shared_memory"


class TestTcp(ExchangeConformance):
    kind = "tcp"
