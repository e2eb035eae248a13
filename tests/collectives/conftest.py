"""A store for exchanges to meet at. Failing assertions of the shared suite explain themselves as those of test modules do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helixrt.replica.store import host_store

pytest.register_assert_rewrite("tests.collectives.exchange_conformance", "tests.collectives.queue_endpoint")


@pytest.fixture
def store_address() -> Iterator[str]:
    server, address = host_store()
    yield address
    del server
