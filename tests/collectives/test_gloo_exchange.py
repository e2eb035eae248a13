"""The exchange over Gloo: sums, equal bits, aborts, lost and missing members, no leaks.

Every member runs in its own process; `abort` and rendezvous are tried with threads too.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixrt.collectives.gloo import GlooExchange
from helixrt.errors import Retryable
from helixrt.replica.store import host_store

pytest.importorskip("torchft", reason="torchft is not installed (extra: ft)")

DEADLINE_S = 40.0


@pytest.fixture
def store_address() -> Iterator[str]:
    server, address = host_store()
    yield address
    del server


def _member(pipe: Connection, rank: int, size: int, address: str) -> None:
    """A member's process: sums that its parent compares, then sums until someone is lost."""
    torch.set_num_threads(1)
    exchange = GlooExchange(timeout_s=20)
    exchange.configure(1, range(size), rank, f"{address}/processes")
    out = torch.empty(50_001)
    sums = []
    for step in range(3):
        source = torch.randn(50_001, generator=torch.Generator().manual_seed(100 * step + rank))
        kept = source.clone()
        exchange.all_reduce(source, out)
        assert torch.equal(source, kept)
        sums.append(out.numpy().tobytes())
    pipe.send(sums)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline:
            exchange.all_reduce(torch.ones(50_001), out)
        pipe.send(("never noticed", "", 0.0))
    except Retryable as error:
        pipe.send(("lost", str(error), time.time()))
    exchange.close()


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(DEADLINE_S), "a member said nothing"
    return pipe.recv()


def test_processes_get_the_same_sums_and_all_notice_a_killed_member(store_address: str) -> None:
    size, context = 3, mp.get_context("spawn")
    processes, pipes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_member, args=(theirs, rank, size, store_address), daemon=True))
        processes[-1].start()
        pipes.append(ours)

    results = [_receive(pipe) for pipe in pipes]
    assert all(result == results[0] for result in results)
    for step in range(3):
        parts = [torch.randn(50_001, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(size)]
        got = torch.frombuffer(bytearray(results[0][step]), dtype=torch.float32)
        torch.testing.assert_close(got, sum(parts))

    killed_s = time.time()
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGKILL)
    for rank in (0, 2):
        what, reason, noticed_s = _receive(pipes[rank])
        assert what == "lost" and "exchange of generation 1 failed" in reason
        print(f"member {rank} noticed after {noticed_s - killed_s:.3f} s")
    for process in processes:
        process.join(DEADLINE_S)


def _threads(calls: list[Any]) -> list[BaseException | None]:
    """Run calls in threads; what each raised."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            calls[index]()
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return raised


def _configure_all(exchanges: list[GlooExchange], generation: int, address: str) -> None:
    members = range(len(exchanges))
    raised = _threads(
        [lambda r=r: exchanges[r].configure(generation, members, r, f"{address}/{generation}") for r in members]
    )
    assert raised == [None] * len(exchanges)


def test_abort_ends_a_running_all_reduce_and_the_next_generation_works(store_address: str) -> None:
    exchanges = [GlooExchange(timeout_s=20) for _ in range(3)]
    source, outs = torch.ones(1000), [torch.zeros(1000) for _ in range(3)]
    for generation in (1, 2):
        _configure_all(exchanges, generation, store_address)
        # Member 2 stays away: the others cannot finish until they are told to stop.
        timers = [threading.Timer(0.2, exchanges[r].abort) for r in (0, 1)]
        for timer in timers:
            timer.start()
        began_s = time.monotonic()
        raised = _threads([lambda r=r: exchanges[r].all_reduce(source, outs[r]) for r in (0, 1)])
        for timer in timers:
            timer.join(DEADLINE_S)
        assert all(isinstance(error, Retryable) for error in raised)
        assert "was aborted" in str(raised[0])
        assert time.monotonic() - began_s < 10  # half the timeout: it was the abort that ended it
        with pytest.raises(Retryable):
            exchanges[0].all_reduce(source, outs[0])
        assert torch.equal(source, torch.ones(1000))
    _configure_all(exchanges, 3, store_address)
    assert _threads([lambda r=r: exchanges[r].all_reduce(source, outs[r]) for r in range(3)]) == [None] * 3
    assert all(torch.equal(out, torch.full((1000,), 3.0)) for out in outs)
    for exchange in exchanges:
        exchange.close()
        exchange.close()


def test_a_member_that_never_comes_and_an_abort_while_waiting_for_it(store_address: str) -> None:
    exchange = GlooExchange(timeout_s=0.3)
    with pytest.raises(Retryable, match=r"members number \[1\] of 2 did not come within 0.3 s"):
        exchange.configure(1, (0, 4), 0, f"{store_address}/late")
    exchange.close()
    patient = GlooExchange(timeout_s=DEADLINE_S)
    threading.Timer(0.1, patient.abort).start()
    with pytest.raises(Retryable, match="generation 2 was aborted"):
        patient.configure(2, (0, 4), 4, f"{store_address}/aborted")
    patient.close()


def test_a_lost_store_is_retryable() -> None:
    exchange = GlooExchange(timeout_s=0.5)
    with pytest.raises(Retryable):
        exchange.configure(1, (0, 1), 0, "127.0.0.1:9/x")
    with pytest.raises(Retryable):
        exchange.all_reduce(torch.ones(1), torch.ones(1))


def test_one_member_needs_nobody() -> None:
    exchange = GlooExchange(timeout_s=1)
    exchange.configure(5, (3,), 3, "127.0.0.1:9/unused")
    source, out = torch.randn(7), torch.zeros(7)
    exchange.all_reduce(source, out)
    assert torch.equal(source, out)
    exchange.abort()
    with pytest.raises(Retryable, match="aborted"):
        exchange.all_reduce(source, out)
    exchange.configure(6, (3,), 3, "127.0.0.1:9/unused")
    exchange.all_reduce(source, out)


def test_reconfiguring_leaks_nothing(store_address: str, seed: int) -> None:
    rng = random.Random(seed)
    exchanges = [GlooExchange(timeout_s=20) for _ in range(2)]
    source, outs = torch.ones(100), [torch.empty(100) for _ in range(2)]

    def round_(generation: int) -> None:
        _configure_all(exchanges, generation, store_address)
        assert _threads([lambda r=r: exchanges[r].all_reduce(source, outs[r]) for r in range(2)]) == [None] * 2
        assert torch.equal(outs[0], source * 2)
        if rng.random() < 0.3:
            exchanges[rng.randrange(2)].abort()

    for generation in range(5):
        round_(generation)
    settled = _resources()
    for generation in range(5, 40):
        round_(generation)
    deadline = time.monotonic() + DEADLINE_S
    while any(now > before for now, before in zip(_resources(), settled, strict=True)):
        assert time.monotonic() < deadline, (_resources(), settled)
        time.sleep(0.05)
    for exchange in exchanges:
        exchange.close()


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
        settled = _resources()
        for generation in range(3, 18):
            fail(generation, abort=generation % 2 == 0)
        deadline = time.monotonic() + DEADLINE_S
        while any(now > before for now, before in zip(_resources(), settled, strict=True)):
            assert time.monotonic() < deadline, (_resources(), settled)
            time.sleep(0.05)
    finally:
        gc.enable()
    ghost.close()


def _resources() -> tuple[int, int]:
    """Native threads and open descriptors of this process (Linux), with room for one group in passing."""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("counts threads and descriptors in /proc, which this system has not")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
