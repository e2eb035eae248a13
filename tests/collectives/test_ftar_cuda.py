"""FTAR on CUDA tensors, by two processes on one GPU: the sums of host tensors bit for bit, beside other work of the GPU, and
tensors that can be used after a failure.

The processes start once; each test asks both for one part.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from helixrt.collectives.exchange import Exchange
from helixrt.errors import Retryable
from helixrt.replica.store import host_store
from tests.collectives.exchange_conformance import make_exchange
from tests.ranks_context import ranks_context

pytestmark = pytest.mark.gpu

RANKS = 2
DEADLINE_S = 60.0
ANSWER_S = 100.0  # Triton compiles kernels, and an exchange may fail by its deadline before
LENGTH = 3_000_001
SECOND = 2_000_000_000  # cycles of the GPU's clock, or a little less


# ---------------------------------------------------------------- in the processes


def _member(pipe: Connection, rank: int, transport: str, address: str) -> None:
    """Answers the names of functions below with what they return, or with the error."""
    torch.set_num_threads(1)
    exchange, generation = make_exchange(transport, DEADLINE_S), 0
    while True:
        name = pipe.recv()
        generation += 1
        try:
            exchange.configure(generation, range(RANKS), rank, f"{address}/{generation}")
            pipe.send(globals()[name](exchange, rank, address))
        except BaseException:
            pipe.send(AssertionError(traceback.format_exc()))


def _values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).mul(100).to(dtype)


def bits(exchange: Exchange, rank: int, address: str) -> None:
    """Out of place, in place, from the default stream and from another one."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for length in (0, 1, 1001, LENGTH):
            for divisor in (1, 2) if dtype.is_floating_point else (1,):
                source = _values(rank, length, dtype)
                wanted = torch.empty_like(source)
                exchange.all_reduce(source, wanted, divisor)
                for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
                    with torch.cuda.stream(stream):
                        given = source.cuda()
                        out = torch.full_like(given, 77)
                        exchange.all_reduce(given, out, divisor)
                        results = [out.clone(), given.clone()]
                        exchange.all_reduce(given, given, divisor)
                        results.append(given.clone())
                    stream.synchronize()
                    for result, expected in zip(results, (wanted, source, wanted), strict=True):
                        assert torch.equal(result.cpu(), expected), (dtype, length, divisor, stream)


def behind_a_slow_stream(exchange: Exchange, rank: int, address: str) -> None:
    """The call comes behind what its stream has queued, and before what this queues next; nothing is synchronised."""
    for attempt in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            source = torch.zeros(LENGTH, device="cuda")
            torch.cuda._sleep(SECOND // 20)
            source += rank + 1 + attempt
            out = torch.full_like(source, torch.nan)
            exchange.all_reduce(source, out)
            source.fill_(torch.nan)
            result = out + 1
            out.fill_(torch.nan)
            assert torch.equal(result.cpu(), torch.full((LENGTH,), 4.0 + 2 * attempt))


def beside_a_long_kernel(exchange: Exchange, rank: int, address: str) -> None:
    """It does not wait for what another stream computes."""
    source, out = torch.ones(LENGTH, device="cuda"), torch.empty(LENGTH, device="cuda")
    mine, other, end = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    mine.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(mine):
        exchange.all_reduce(source, out)  # compiles kernels, and takes pinned memory
        mine.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(3 * SECOND)
            end.record()
        exchange.all_reduce(source, out)
        mine.synchronize()
        assert not end.query(), "the call took as long as the other stream's kernel"
        assert torch.equal(out.cpu(), torch.full((LENGTH,), 2.0))
    other.synchronize()


def _usable(source: torch.Tensor, out: torch.Tensor, kept: torch.Tensor) -> None:
    """After a failure: the source is as it was, and nothing late is written to the result."""
    assert torch.equal(source.cpu(), kept)
    out.fill_(7.0)
    torch.cuda.synchronize()
    assert bool((out == 7.0).all())
    source.fill_(8.0)
    torch.cuda.synchronize()
    assert bool((source == 8.0).all())


def a_stream_that_is_late(exchange: Exchange, rank: int, address: str) -> None:
    """The deadline passes while the source is still computed; the exchange is closed while copies are queued."""
    kept = _values(rank, LENGTH, torch.float32)
    total = _values(0, LENGTH, torch.float32) + _values(1, LENGTH, torch.float32)
    with torch.cuda.stream(torch.cuda.Stream()):
        source, out = kept.cuda(), torch.zeros(LENGTH, device="cuda")
        exchange.all_reduce(source, out)  # compiles kernels
        assert torch.equal(out.cpu(), total)
        short = make_exchange("tcp", 2.0)
        short.configure(1, range(RANKS), rank, f"{address}/short")
        if rank == 0:
            torch.cuda._sleep(4 * SECOND)
        with pytest.raises(Retryable, match="exchange of generation 1 failed"):
            short.all_reduce(source, out)
        short.close()
        del short
        with torch.cuda.stream(torch.cuda.Stream()):  # while the sums of the failed call are still queued
            others, sums = kept.cuda(), torch.zeros(LENGTH, device="cuda")
            exchange.all_reduce(others, sums)
            assert torch.equal(sums.cpu(), total)
        _usable(source, out, kept)
        assert torch.equal(sums.cpu(), total)


def a_killed_member(exchange: Exchange, rank: int, address: str) -> str:
    """Rank 1 is killed in the middle of a call; rank 0 goes on alone with the same tensors."""
    kept = _values(rank, 10 * LENGTH, torch.float32)
    source, out = kept.cuda(), torch.zeros(10 * LENGTH, device="cuda")
    for _ in range(3):
        exchange.all_reduce(source, out)
    if rank == 1:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # ends this process wherever it is
    with pytest.raises(Retryable, match="failed"):
        while True:
            exchange.all_reduce(source, out)
    _usable(source, out, kept)
    source.copy_(kept)
    exchange.configure(1000, (0,), 0, f"{address}/alone")
    exchange.all_reduce(source, out, 2)
    assert torch.equal(out.cpu(), kept / 2)
    return "survived"


# ---------------------------------------------------------------- the tests


class Members:
    def __init__(self, transport: str, address: str) -> None:
        context = ranks_context()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(context.Process(target=_member, args=(theirs, rank, transport, address), daemon=True))
            self.processes[-1].start()
            theirs.close()

    def each(self, name: str, ranks: tuple[int, ...] = (0, 1)) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(name)
        answers = []
        for rank in ranks:
            assert self.pipes[rank].poll(ANSWER_S), f"rank {rank} said nothing"
            answers.append(self.pipes[rank].recv())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module", params=["shared_memory", "tcp"])
def members(request: pytest.FixtureRequest) -> Iterator[Members]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    server, address = host_store()
    made = Members(request.param, address)
    yield made
    made.kill()
    del server


@pytest.mark.parametrize("part", ["bits", "behind_a_slow_stream", "beside_a_long_kernel", "a_stream_that_is_late"])
def test_two_processes_on_one_gpu(members: Members, part: str) -> None:
    members.each(part)


def test_the_tensors_of_a_survivor_can_be_used(members: Members) -> None:
    assert members.each("a_killed_member", ranks=(0,)) == ["survived"]
    members.processes[1].join(DEADLINE_S)
    assert members.processes[1].exitcode == -signal.SIGALRM, "the member was to be killed"
