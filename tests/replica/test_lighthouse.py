"""The lighthouse's address, as torchft's client reads it."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from helixrt.replica.lighthouse import begin_lighthouse
from helixrt.timeouts import derive


@pytest.mark.parametrize(("host", "bind"), [("10.0.0.7", "10.0.0.7:0"), ("node-3", "node-3:0"), ("fd00::1", "[fd00::1]:0")])
def test_it_is_a_url_also_of_an_address_of_ipv6(host: str, bind: str) -> None:
    given: list[str] = []

    class Server:
        def __init__(self, bind: str, **settings: int) -> None:
            given.append(bind)

        def address(self) -> str:
            return "http://some-machine:29510"

    _, address = begin_lighthouse(Server, derive(60.0, 5.0), host)
    parts = urlsplit(address)
    assert given == [bind] and (parts.scheme, parts.hostname, parts.port) == ("http", host, 29510)
