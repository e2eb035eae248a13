"""Two engines in one process: results against torch, and who owns memory, descriptors and threads, whatever happens."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helixrt.errors import ConfigError, Fatal
from helixrt.native.engine import Engine, dtype_of
from helixrt.native.library import Dtype, End, EventKind, Status, library
from helixrt.protocol.collective.algorithms import choice
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.plan import Plan, Region, Send, Space
from tests.native.pair import KINDS, LONG_S, QUIET, join, run, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]  # the first test may compile the library
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
COUNTS = (1, 1000, 1_300_001)  # one element, one frame, several fragments
TUNING = Tuning()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    try:
        library()
    except ConfigError as error:
        if "no compiler" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(params=KINDS)
def engines(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    with Engine(QUIET) as first, Engine(QUIET) as second:
        join([first, second], request.param)
        yield [first, second]


@pytest.fixture
def pair() -> Iterator[list[Engine]]:
    """Over sockets alone, where the way does not matter."""
    with Engine(QUIET) as first, Engine(QUIET) as second:
        join([first, second], "sockets")
        yield [first, second]


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


def sum_plan(rank: int, count: int = 1000) -> Plan:
    return choice.all_reduce(rank, 2, count * 4, 4, TUNING, False, True)


# ---- results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(engines: list[Engine], dtype: torch.dtype) -> None:
    for count in COUNTS:
        sources = [numbers(rank, count, dtype) for rank in range(2)]
        outs = [torch.empty(count, dtype=dtype) for _ in range(2)]
        length = count * dtype.itemsize
        run(engines, lambda r: choice.all_reduce(r, 2, length, dtype.itemsize, TUNING, False, True), sources, outs)  # noqa: B023
        assert all(torch.equal(out, sources[0] + sources[1]) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mean_in_place(engines: list[Engine], dtype: torch.dtype) -> None:
    for count in COUNTS:
        tensors = [numbers(rank, count, dtype) for rank in range(2)]
        expected = ((tensors[0].float() + tensors[1].float()) / 2).to(dtype)
        length = count * dtype.itemsize
        run(engines, lambda r: choice.all_reduce(r, 2, length, dtype.itemsize, TUNING, True), tensors, tensors, divisor=2)  # noqa: B023
        assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_all_gather(engines: list[Engine]) -> None:
    for count in COUNTS:
        sources = [numbers(rank, count, torch.float32) for rank in range(2)]
        outs = [torch.empty(2 * count) for _ in range(2)]
        run(engines, lambda r: choice.all_gather(r, [count * 4] * 2, 4, TUNING), sources, outs)  # noqa: B023
        assert all(torch.equal(out, torch.cat(sources)) for out in outs)


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast(engines: list[Engine], root: int) -> None:
    for count in COUNTS:
        sources = [numbers(rank, count, torch.int64) for rank in range(2)]
        outs = [torch.empty(count, dtype=torch.int64) for _ in range(2)]
        run(engines, lambda r: choice.broadcast(r, 2, root, count * 8, 8, TUNING), sources, outs)  # noqa: B023
        assert all(torch.equal(out, sources[root]) for out in outs)


def test_generation_after_generation(engines: list[Engine]) -> None:
    for generation in (2, 3, 7):
        join(engines, "sockets", generation)
        outs = [torch.empty(1000) for _ in range(2)]
        run(engines, sum_plan, [torch.ones(1000)] * 2, outs)
        assert all((out == 2).all() for out in outs)


def test_messages(engines: list[Engine]) -> None:
    long, short = torch.arange(500_000), b"a few bytes"
    into, few = torch.zeros_like(long), bytearray(len(short))
    engines[1].receive(0, 5, 0, into)
    engines[0].send(1, 5, 0, long)
    engines[0].send(1, 5, 1, short)  # before it is received
    engines[1].receive(0, 5, 1, few)
    received: list[EngineEvent] = []
    while not {0, 1} <= {event.a for event in received}:  # both may be read at once
        received += [event for event in engines[1].events() if event.kind is EventKind.RECEIVED]
        time.sleep(0.001)
    assert {(event.peer, event.op, event.a) for event in received} == {(0, 5, 0), (0, 5, 1)}
    assert torch.equal(into, long) and bytes(few) == short
    with pytest.raises(Fatal, match="under way"):
        engines[1].receive(0, 6, 0, few)
        engines[1].receive(0, 6, 0, few)


# ---- memory is held until the end is known


def test_memory_of_an_operation_is_held_until_its_end(pair: list[Engine]) -> None:
    out = torch.empty(1000)
    source = torch.ones(1000)
    held = weakref.ref(source)
    number = pair[0].submit(sum_plan(0), source, out, dtype=torch.float32)
    del source
    gc.collect()
    assert pair[0].wait(number, 0.05) is Status.RUNNING and held() is not None
    other = pair[1].submit(sum_plan(1), torch.ones(1000), torch.empty(1000), dtype=torch.float32)
    assert pair[0].wait(number, LONG_S) is Status.OK and pair[1].wait(other, LONG_S) is Status.OK
    gc.collect()
    assert held() is None and (out == 2).all()


def test_memory_of_messages_is_held_until_the_event(pair: list[Engine]) -> None:
    data, into = torch.ones(600_000), torch.zeros(600_000)
    held = weakref.ref(data)
    pair[0].send(1, 1, 0, data)
    del data
    gc.collect()
    assert not any(event.kind is EventKind.SENT for event in pair[0].events()) and held() is not None
    pair[1].receive(0, 1, 0, into)
    until(pair[0], EventKind.SENT)
    gc.collect()
    assert held() is None
    until(pair[1], EventKind.RECEIVED)
    assert (into == 1).all()


def test_what_nobody_waits_for_is_let_go_of(pair: list[Engine]) -> None:
    source = torch.ones(10)
    for _ in range(300):
        for rank in range(2):
            last = pair[rank].submit(sum_plan(rank, 10), source, torch.empty(10), dtype=torch.float32)
        pair[1].wait(last, LONG_S)
    assert len(pair[0]._handle.held[-1].operations) <= 128


def test_keyboard_interrupt_during_wait(pair: list[Engine]) -> None:
    source = torch.ones(1000)
    held, out = weakref.ref(source), torch.empty(1000)
    number = pair[0].submit(sum_plan(0), source, out, dtype=torch.float32)
    del source
    interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        pair[0].wait(number, LONG_S)
    interrupt.join()
    gc.collect()
    assert held() is not None, "the operation goes on"
    pair[1].submit(sum_plan(1), torch.ones(1000), torch.empty(1000), dtype=torch.float32)
    assert pair[0].wait(number, LONG_S) is Status.OK and (out == 2).all()


# ---- ends


def test_abort_ends_both_sides_with_the_first_cause(pair: list[Engine]) -> None:
    running = [engine.submit(sum_plan(rank), torch.ones(1000), torch.empty(1000)) for rank, engine in enumerate(pair[:1])]
    pair[0].abort("first")
    pair[0].abort("second")
    assert pair[0].wait(running[0], LONG_S) in (Status.FAILED, Status.SKIPPED)
    event = until(pair[1], EventKind.ENDED)
    assert End(event.a) is End.PEER and "first" in event.text and event.peer == 0
    ended = pair[0].ended()
    assert ended is not None and ended.text == "first" and End(ended.a) is End.ABORTED
    late = pair[1].submit(sum_plan(1), torch.ones(1000), torch.empty(1000))
    assert pair[1].wait(late, LONG_S) is Status.SKIPPED


def test_a_deadline_ends_the_generation(pair: list[Engine]) -> None:
    number = pair[0].submit(sum_plan(0), torch.ones(1000), torch.empty(1000), timeout_s=0.1)
    assert pair[0].wait(number, LONG_S) is Status.FAILED
    assert End(until(pair[0], EventKind.ENDED).a) is End.DEADLINE


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_collected_engine_ends_its_thread_and_its_connections() -> None:
    with Engine(QUIET) as first:
        before = threads(), len(os.listdir("/proc/self/fd"))
        second = Engine(QUIET)
        join([first, second], "sockets")
        source = torch.ones(1000)
        held = weakref.ref(source)
        second.submit(sum_plan(1), source, torch.empty(1000), dtype=torch.float32)
        number = first.submit(sum_plan(0), torch.ones(1000), torch.empty(1000), dtype=torch.float32)
        first.submit(sum_plan(0), torch.ones(1000), torch.empty(1000), dtype=torch.float32)  # which the other does not make
        assert first.wait(number, LONG_S) is Status.OK
        del second, source
        gc.collect()
        assert held() is None
        assert End(until(first, EventKind.ENDED).a) is End.PEER
        deadline = time.monotonic() + LONG_S
        while (threads(), len(os.listdir("/proc/self/fd"))) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads() <= before[0]


def test_closing_wakes_another_thread_that_waits(pair: list[Engine]) -> None:
    number = pair[0].submit(sum_plan(0), torch.ones(1000), torch.empty(1000))
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(pair[0].wait(number, LONG_S))
        except Fatal as error:
            found.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    pair[0].close()
    thread.join(LONG_S)
    assert found and (found[0] is Status.FAILED or "closed" in str(found[0]))
    with pytest.raises(Fatal, match="closed"):
        pair[0].status(number)
    pair[0].close()


def test_the_child_of_a_fork_has_no_engine(pair: list[Engine]) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            pair[0].abort("from the child")
            text = "no error"
        except Fatal as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        assert "fork" in file.read()
    assert os.waitpid(child, 0)[1] == 0
    outs = [torch.empty(1000) for _ in range(2)]
    run(pair, sum_plan, [torch.ones(1000)] * 2, outs)
    assert all((out == 2).all() for out in outs)


EXITS = """
import torch
from helixrt.native.engine import Engine
from tests.native.pair import QUIET, join
from tests.native.test_engine import sum_plan
engines = [Engine(QUIET), Engine(QUIET)]
join(engines, "sockets")
tensors = [torch.ones(10_000_000) for _ in range(2)]
for rank, engine in enumerate(engines):
    engine.submit(sum_plan(rank, 10_000_000), tensors[rank], tensors[rank], dtype=torch.float32)
print("exits", flush=True)
"""


def test_the_interpreter_ends_with_operations_under_way() -> None:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", EXITS], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "exits\n"), done.stderr


# ---- refusals


def test_what_is_no_plan_is_refused_with_the_reason(pair: list[Engine]) -> None:
    plan = Plan((Send(5, 0, Region(Space.SOURCE, 0, 8)),), ((),))
    with pytest.raises(Fatal, match=r"a plan for 2 ranks is refused: node 0: peer 5 is not in \[0, 2\)"):
        pair[0].submit(plan, torch.ones(2), torch.ones(2))


def test_memory_that_is_too_short_is_refused(pair: list[Engine]) -> None:
    with pytest.raises(Fatal, match="cannot begin an operation with 4 and 4000 bytes"):
        pair[0].submit(sum_plan(0), torch.ones(1), torch.empty(1000))
    with pytest.raises(Fatal, match="contiguous tensor on the CPU"):
        pair[0].submit(sum_plan(0), torch.ones(1000, 2)[:, 0], torch.empty(1000))


def test_ranks_that_are_not_there_are_refused(pair: list[Engine]) -> None:
    with pytest.raises(Fatal, match="cannot begin generation 9"):
        pair[0].begin(9, 2, [0, 1])
    first, second = socket.socketpair()
    with second, pytest.raises(Fatal, match="cannot use rail 0 to rank 7"):
        pair[0].rail_up(7, 0, 1, first)
    assert first.fileno() == -1


def test_no_generation_has_begun() -> None:
    with Engine() as engine, pytest.raises(Fatal, match="no generation"):
        engine.submit(sum_plan(0), None, None)


def test_plans_are_taken_once_and_forgotten(pair: list[Engine]) -> None:
    plan = sum_plan(0)
    number = pair[0].plan(plan)
    assert pair[0].plan(plan) == number
    assert len(pair[0]._plans) == 1
    del plan
    gc.collect()
    assert not pair[0]._plans
    pair[0].plan(sum_plan(0, 10))
    assert not pair[0]._unused


def test_element_types() -> None:
    assert dtype_of(torch.bfloat16) is Dtype.BF16
    with pytest.raises(Fatal, match="cannot be reduced"):
        dtype_of(torch.float8_e4m3fn)
    assert dtype_of(torch.float8_e4m3fn, any_of_its_size=True) is Dtype.U8
    for dtype in (torch.uint8, torch.bool, torch.int16, torch.uint32, torch.complex64, torch.complex128):
        assert library().hx_element_bytes(dtype_of(dtype)) == dtype.itemsize


def test_figures(pair: list[Engine]) -> None:
    run(pair, sum_plan, [torch.ones(1000)] * 2, [torch.empty(1000) for _ in range(2)])
    counters = pair[0].counters(1, 0)
    assert counters.bytes_sent >= 4000 and counters.frames_received >= 1 and not counters.failures
    assert pair[0].loop().turns > 0 and pair[0].print()
