"""The module engine's buckets through real exchanges: gradients, the float64 book, the int64 bucket of integer buffers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from helixrt.collectives.endpoints import Reach, open_endpoint
from helixrt.collectives.exchange import Exchange
from helixrt.collectives.ftar import FtarExchange
from helixrt.collectives.gloo import GlooExchange
from helixrt.replica.finite import all_finite

LIMIT_S = 60.0


def open_exchange(kind: str) -> Exchange:
    if kind == "gloo":
        return GlooExchange(LIMIT_S)
    return FtarExchange(open_endpoint(b"the secret of a run of tests", "127.0.0.1", Reach(transport=kind)), LIMIT_S)


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_two_replicas_over_an_exchange_train_as_one_loop(loops: Any, kind: str) -> None:
    """Each replica's exchange runs on a thread of its own and takes buckets as backward hands them out."""
    case = loops.CASES["batch-norm"]
    plain = loops.parts(case)
    replicas = [loops.Replica(case, replica, 2) for replica in range(2)]
    assert {b.dtype for b in replicas[0].engine.buckets} == {torch.float32, torch.float64, torch.int64}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    exchanges = [open_exchange(kind) for _ in replicas]
    for step in range(1, 4):
        sums = [[torch.empty_like(bucket) for bucket in each.engine.buckets] for each in replicas]
        ready = [[threading.Event() for _ in each.engine.buckets] for each in replicas]
        errors: list[BaseException] = []

        def exchange(replica: int, step: int = step, sums: Any = sums, ready: Any = ready, errors: Any = errors) -> None:
            try:
                if step == 1:
                    exchanges[replica].configure(1, (0, 1), replica, f"127.0.0.1:{store.port}/{kind}")
                engine = replicas[replica].engine
                for index in reversed(range(len(engine.buckets))):
                    assert ready[replica][index].wait(LIMIT_S)
                    engine.ready(index)
                    exchanges[replica].all_reduce(engine.buckets[index], sums[replica][index])
                    assert all_finite(sums[replica][index])
            except BaseException as error:  # handed to the test's thread
                errors.append(error)

        threads = [threading.Thread(target=exchange, args=(replica,), name=f"exchange-{replica}") for replica in range(2)]
        for thread in threads:
            thread.start()
        for replica, events in zip(replicas, ready, strict=True):
            replica.work(step, on_bucket=lambda index, events=events: events[index].set())
        for thread in threads:
            thread.join(LIMIT_S)
        assert not errors, errors
        loops.plain_step(plain, step, (0, 1))
        for replica, total in zip(replicas, sums, strict=True):
            replica.engine.apply(loops.record(step, (0, 1)), total)
            assert loops.same(replica.engine.state(), replicas[0].engine.state())
            expected = plain.model.state_dict()
            assert all(loops.equal_bits(tensor, expected[name]) for name, tensor in replica.parts.model.state_dict().items())
    for each in exchanges:
        each.close()
