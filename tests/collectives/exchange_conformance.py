"""What every `Exchange` must do: sums, equal bits, aborts, lost and missing members, many generations, no leaks.

A test module makes it its own by a subclass with `kind`, "gloo" or a transport of FTAR's. Every member
runs in a process of its own; `abort` and rendezvous are tried with threads too.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from helixrt.collectives.exchange import Exchange
from helixrt.errors import Retryable
from tests.ranks_context import ranks_context
from tests.waiting import until

DEADLINE_S = 60.0
SECRET = b"the secret of a run of tests"


def make_exchange(kind: str, timeout_s: float) -> Exchange:
    if kind == "gloo":
        from helixrt.collectives.gloo import GlooExchange

        return GlooExchange(timeout_s)
    from helixrt.collectives.endpoints import Reach, open_endpoint
    from helixrt.collectives.ftar import FtarExchange

    return FtarExchange(open_endpoint(SECRET, "127.0.0.1", Reach(transport=kind)), timeout_s)


def _member(pipe: Connection, kind: str, rank: int, size: int, address: str) -> None:
    """A member's process: sums that its parent compares, then sums until someone is lost."""
    torch.set_num_threads(1)
    exchange = make_exchange(kind, 20)
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


def on_threads(calls: list[Callable[[], Any]]) -> list[BaseException | None]:
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


def configure_all(exchanges: list[Exchange], generation: int, address: str, members: Any = None) -> None:
    chosen = list(range(len(exchanges)) if members is None else members)
    raised = on_threads([lambda r=r: exchanges[r].configure(generation, chosen, r, f"{address}/{generation}") for r in chosen])
    assert raised == [None] * len(chosen), raised


def resources() -> tuple[int, int]:
    """Native threads and open descriptors of this process (Linux)."""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("counts threads and descriptors in /proc, which this system has not")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def await_resources(settled: tuple[int, int]) -> None:
    """Until no more threads and descriptors are there than `settled`."""
    until(lambda: all(now <= before for now, before in zip(resources(), settled, strict=True)), lambda: f"{resources()}")


class ExchangeConformance:
    kind: str

    def make(self, timeout_s: float = DEADLINE_S) -> Exchange:
        return make_exchange(self.kind, timeout_s)

    @pytest.mark.system
    def test_processes_get_the_same_sums_and_all_notice_a_killed_member(self, store_address: str) -> None:
        size, context = 3, ranks_context()
        processes, pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, self.kind, rank, size, store_address)
            processes.append(context.Process(target=_member, args=arguments, daemon=True))
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

    def test_what_one_member_sums_together_another_may_sum_one_by_one(self, store_address: str) -> None:
        exchanges = [self.make() for _ in range(3)]
        configure_all(exchanges, 1, store_address)
        generators = [torch.Generator().manual_seed(r) for r in range(3)]
        shapes = ((40_003, torch.float32), (70, torch.float64), (0, torch.float32), (1 << 20, torch.float32))
        sources = [[torch.randn(size, generator=g, dtype=dtype) for size, dtype in shapes] for g in generators]
        outs = [[torch.empty_like(source) for source in each] for each in sources]

        def one_by_one(rank: int) -> None:
            for source, out in zip(sources[rank], outs[rank], strict=True):
                exchanges[rank].all_reduce(source, out)

        calls: list[Callable[[], Any]] = [
            lambda: exchanges[0].all_reduce_together(sources[0], outs[0]),
            lambda: one_by_one(1),
            lambda: exchanges[2].all_reduce_together(sources[2], outs[2]),
        ]
        assert on_threads(calls) == [None] * 3
        for index in range(len(shapes)):
            torch.testing.assert_close(outs[0][index], sources[0][index] + sources[1][index] + sources[2][index])
            assert torch.equal(outs[0][index], outs[1][index]) and torch.equal(outs[0][index], outs[2][index])
        exchanges[1].abort()
        with pytest.raises(Retryable):
            exchanges[0].all_reduce_together(sources[0], outs[0])
        for exchange in exchanges:
            exchange.close()

    def test_a_mean_over_shapes_and_types(self, store_address: str) -> None:
        exchanges = [self.make() for _ in range(2)]
        configure_all(exchanges, 1, store_address)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for shape in ((), (0,), (3, 5), (40_003,)):
                sources = [
                    torch.randn(shape, generator=torch.Generator().manual_seed(r), dtype=torch.float64).to(dtype)
                    for r in range(2)
                ]
                kept = [source.clone() for source in sources]
                outs = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
                calls = [lambda r=r, s=sources, o=outs: exchanges[r].all_reduce(s[r], o[r], 4) for r in range(2)]
                assert on_threads(calls) == [None, None]
                assert torch.equal(outs[0], outs[1])
                torch.testing.assert_close(outs[0], (kept[0] + kept[1]) / 4)
                assert all(torch.equal(s, k) for s, k in zip(sources, kept, strict=True))
        for exchange in exchanges:
            exchange.close()

    def test_survivors_try_again_with_what_they_kept(self, store_address: str) -> None:
        exchanges = [self.make() for _ in range(3)]
        configure_all(exchanges, 1, store_address)
        sources = [torch.full((30_000,), float(10**r)) for r in range(3)]
        outs = [torch.zeros(30_000) for _ in range(3)]
        timer = threading.Timer(0.1, exchanges[2].close)  # in the middle of an exchange it takes no part in
        timer.start()
        raised = on_threads([lambda r=r: exchanges[r].all_reduce(sources[r], outs[r]) for r in (0, 1)])
        timer.join()
        assert all(isinstance(error, Retryable) for error in raised), raised
        configure_all(exchanges, 2, store_address, (0, 1))
        assert on_threads([lambda r=r: exchanges[r].all_reduce(sources[r], outs[r], 2) for r in (0, 1)]) == [None, None]
        assert all(torch.equal(outs[r], torch.full((30_000,), 5.5)) for r in (0, 1))
        for exchange in exchanges:
            exchange.close()

    def test_abort_ends_a_running_all_reduce_and_the_next_generation_works(self, store_address: str) -> None:
        exchanges = [self.make(2 * DEADLINE_S) for _ in range(3)]
        source, outs = torch.ones(1000), [torch.zeros(1000) for _ in range(3)]
        for generation in (1, 2):
            configure_all(exchanges, generation, store_address)
            # Member 2 stays away: the others cannot finish until they are told to stop.
            timers = [threading.Timer(0.2, exchanges[r].abort) for r in (0, 1)]
            for timer in timers:
                timer.start()
            began_s = time.monotonic()
            raised = on_threads([lambda r=r: exchanges[r].all_reduce(source, outs[r]) for r in (0, 1)])
            for timer in timers:
                timer.join(DEADLINE_S)
            assert all(isinstance(error, Retryable) for error in raised)
            assert any("was aborted" in str(error) for error in raised)
            assert time.monotonic() - began_s < DEADLINE_S  # half the timeout: it was the abort that ended it
            with pytest.raises(Retryable):
                exchanges[0].all_reduce(source, outs[0])
            assert torch.equal(source, torch.ones(1000))
        configure_all(exchanges, 3, store_address)
        assert on_threads([lambda r=r: exchanges[r].all_reduce(source, outs[r]) for r in range(3)]) == [None] * 3
        assert all(torch.equal(out, torch.full((1000,), 3.0)) for out in outs)
        for exchange in exchanges:
            exchange.close()
            exchange.close()

    def test_a_member_that_never_comes_and_an_abort_while_waiting_for_it(self, store_address: str) -> None:
        exchange = self.make(timeout_s=5.0)  # in which the store must answer
        with pytest.raises(Retryable, match=r"members number \[1\] of 2 did not come within 5 s"):
            exchange.configure(1, (0, 4), 0, f"{store_address}/late")
        exchange.close()
        patient = self.make(timeout_s=DEADLINE_S)
        threading.Timer(0.1, patient.abort).start()
        with pytest.raises(Retryable, match="generation 2 was aborted"):
            patient.configure(2, (0, 4), 4, f"{store_address}/aborted")
        patient.close()

    def test_a_lost_store_is_retryable(self) -> None:
        exchange = self.make(timeout_s=0.5)
        with socket.socket() as refusing, pytest.raises(Retryable):
            refusing.bind(("127.0.0.1", 0))  # without listening
            exchange.configure(1, (0, 1), 0, f"127.0.0.1:{refusing.getsockname()[1]}/x")
        with pytest.raises(Retryable):
            exchange.all_reduce(torch.ones(1), torch.ones(1))
        exchange.close()

    def test_wrong_members_and_no_generation_at_all(self) -> None:
        exchange = self.make()
        with pytest.raises(Retryable, match="not configured"):
            exchange.all_reduce(torch.ones(1), torch.ones(1))
        for members in ((1, 0), (0, 0, 1), (1, 2)):
            with pytest.raises(ValueError, match="must be sorted, distinct and contain 0"):
                exchange.configure(1, members, 0, "127.0.0.1:9/x")
        exchange.close()

    def test_one_member_needs_nobody(self) -> None:
        exchange = self.make(timeout_s=1)
        exchange.configure(5, (3,), 3, "127.0.0.1:9/unused")
        source, out = torch.randn(7), torch.zeros(7)
        exchange.all_reduce(source, out)
        assert torch.equal(source, out)
        exchange.all_reduce(source, out, 2)
        assert torch.equal(source / 2, out)
        exchange.abort()
        with pytest.raises(Retryable, match="aborted"):
            exchange.all_reduce(source, out)
        exchange.configure(6, (3,), 3, "127.0.0.1:9/unused")
        exchange.all_reduce(source, out)
        exchange.close()

    def test_reconfiguring_leaks_nothing(self, store_address: str, seed: int) -> None:
        rng = random.Random(seed)
        exchanges = [self.make() for _ in range(2)]
        source, outs = torch.ones(100), [torch.empty(100) for _ in range(2)]

        def round_(generation: int) -> None:
            configure_all(exchanges, generation, store_address)
            assert on_threads([lambda r=r: exchanges[r].all_reduce(source, outs[r]) for r in range(2)]) == [None] * 2
            assert torch.equal(outs[0], source * 2)
            if rng.random() < 0.3 and generation not in (4, 39):  # counted are generations that run
                exchanges[rng.randrange(2)].abort()

        for generation in range(5):
            round_(generation)
        settled = resources()
        for generation in range(5, 40):
            round_(generation)
        await_resources(settled)
        for exchange in exchanges:
            exchange.close()
