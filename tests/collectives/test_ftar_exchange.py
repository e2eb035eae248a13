"""FTAR as the exchange between replicas: the suite that every exchange passes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.endpoints import Reach, open_endpoint
from helixrt.collectives.ftar import FtarExchange
from helixrt.collectives.rendezvous import meet
from helixrt.errors import Cause, Fatal, Retryable
from helixrt.transport.contract import Outcome, Received
from tests.collectives.exchange_conformance import DEADLINE_S, SECRET, ExchangeConformance, make_exchange
from tests.collectives.queue_endpoint import Hub


class TestSharedMemory(ExchangeConformance):
    kind = "shared_memory"


class TestTcp(ExchangeConformance):
    kind = "tcp"


@pytest.mark.system
class TestNative(ExchangeConformance):
    kind = "native"


@pytest.mark.parametrize("transport", ["tcp", "shared_memory", pytest.param("native", marks=pytest.mark.system)])
def test_an_abort_while_a_member_that_announced_itself_does_not_connect(store_address: str, transport: str) -> None:
    """Its process lives, its endpoint listens, and it never begins."""
    ghost, exchange = open_endpoint(SECRET, "127.0.0.1", Reach(transport=transport)), make_exchange(transport, DEADLINE_S)
    host, _, port = store_address.rpartition(":")
    client = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    meet_later = threading.Thread(
        target=lambda: meet(dist.PrefixStore("ghost", client), 1, 2, ghost.address(), 1, Deadline(DEADLINE_S), lambda: False)
    )
    meet_later.start()
    threading.Timer(0.2, exchange.abort).start()
    began_s = time.monotonic()
    with pytest.raises(Retryable, match="generation 1 was aborted"):
        exchange.configure(1, (0, 1), 0, f"{store_address}/ghost")
    assert time.monotonic() - began_s < DEADLINE_S / 2
    meet_later.join(DEADLINE_S)
    exchange.close()
    ghost.close()


def test_a_failure_of_the_own_device_is_fatal_and_one_of_a_peer_is_not() -> None:
    own, other = Cause("no rail is left", own_device=True), Cause("lost rank 1", peers=(1,))
    for cause, kind in ((own, Fatal), (other, Retryable)):
        exchange = make_exchange("tcp", DEADLINE_S)
        exchange.configure(1, (4,), 4, "")
        exchange._members = (4, 7)
        exchange._communicator.abort(cause)
        with pytest.raises(kind) as raised:
            exchange.all_reduce(torch.zeros(2), torch.zeros(2))
        assert raised.value.cause.peers == ((7,) if kind is Retryable else ())
        exchange.close()


def test_sums_stand_whose_last_bytes_came_with_the_end_of_a_member(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That member had the sums, and may have committed a step with them. Its end breaks the next exchange."""
    hub = Hub()
    ours, theirs = hub.endpoint(), hub.endpoint()
    exchanges = [FtarExchange(endpoint, DEADLINE_S) for endpoint in (ours, theirs)]
    ended, progress = threading.Event(), ours.progress

    def late(now: float) -> list[Outcome]:
        outcomes = list(progress(now))
        if any(isinstance(outcome, Received) for outcome in outcomes) and ended.wait(0.3):
            outcomes += progress(now)
        return outcomes

    monkeypatch.setattr(ours, "progress", late)
    sources, outs = [torch.full((n,), 1.0) for n in (9, 4)], [torch.zeros(n) for n in (9, 4)]

    def member() -> None:
        exchanges[1].configure(1, (0, 1), 1, f"{store_address}/sums")
        exchanges[1].all_reduce_together([2 * source for source in sources], [torch.zeros(n) for n in (9, 4)])
        theirs.die()
        ended.set()

    other = threading.Thread(target=member)
    other.start()
    exchanges[0].configure(1, (0, 1), 0, f"{store_address}/sums")
    exchanges[0].all_reduce_together(sources, outs)
    assert ended.is_set() and all(torch.equal(out, 3 * source) for out, source in zip(outs, sources, strict=True))
    with pytest.raises(Retryable, match="the connection was reset") as raised:
        exchanges[0].all_reduce_together(sources, outs)
    assert raised.value.cause.peers == (1,)
    other.join(DEADLINE_S)
    for exchange in exchanges:
        exchange.close()
