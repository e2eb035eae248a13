"""A process of the fault matrix: a rank that carries out orders, one call at a time, or an intruder.

In: orders (`messages`). Out: how each call ended. The rank is a program like a replica's: an exchange over an endpoint,
gradients that are preserved, a log and a flight record in files. Forked from a process that has imported everything.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from helixrt.bench.fault_matrix import injection, messages
from helixrt.bench.fault_matrix.cells import RANKS, Answer, Fault, Outcome, Phase, Refusals
from helixrt.bench.fault_matrix.injection import FaultyEndpoint
from helixrt.collectives.endpoints import Reach, open_endpoint
from helixrt.collectives.ftar import FtarExchange
from helixrt.errors import Retryable
from helixrt.job.logs import configure_logging
from helixrt.protocol.collective.algorithms.layout import Tuning, grain, grid_of_whole
from helixrt.record import FlightRecord, JsonLinesSink, Kind
from helixrt.replica.store import host_store, split_address
from helixrt.replica.telling import lose_unprinted

_log = logging.getLogger(__name__)
# Float32. With the tuning below the ring algorithm is used, in two uneven partitions of four lanes each. The messages are so
# long that they do not arrive before they are waited for. So no rank is done while the victim still has to receive or send.
ELEMENTS = 4_000_003
TUNING = Tuning(chunk_bytes=1 << 20, chunks=4, least_chunk_bytes=512 << 10, two_step_bytes=256 << 10, halving_bytes=0)
_ATTEMPT_S = 0.15  # of an intruder
_PAUSES = (0.0, 0.0, 0.1, 0.5, 3.0)  # in heartbeat periods, between all-reduces that endure


def source(rank: int, step: int, elements: int = ELEMENTS) -> torch.Tensor:
    """Whole numbers, small enough that sums of them are exact in whatever order."""
    return (torch.arange(elements) % 1021 * (rank + 1) + step).to(torch.float32)


def expected(members: tuple[int, ...], step: int, elements: int = ELEMENTS) -> torch.Tensor:
    ranks, whole = sum(rank + 1 for rank in members), torch.arange(elements) % 1021
    return (whole * ranks + step * len(members)).to(torch.float32)


def _reach(settings: messages.ProcessSettings) -> Reach:
    return Reach(transport=settings.transport, heartbeat_s=settings.heartbeat_s)


def place(phase: Phase) -> int:
    """The index of the message that the victim is about to send when it is in the middle of `phase`."""
    grid = grid_of_whole(4 * ELEMENTS, RANKS, TUNING, grain(4))
    partitions, lanes, steps = len(grid), len(grid[0][0]), 2 * RANKS - 2
    assert partitions > 1 and lanes > 1
    partition, step = (0, 1) if phase is Phase.REDUCE_SCATTER else (partitions - 1, RANKS - 1)
    return (partition * steps + step) * lanes + 1


class Rank:
    """Carries out orders until END, or a fault."""

    def __init__(self, settings: messages.ProcessSettings, pipe: Connection) -> None:
        self._settings, self._pipe = settings, pipe
        self._host = host_store(settings.host) if settings.rank == 0 else None
        self._record = FlightRecord(str(settings.rank))
        self._record.attach(JsonLinesSink(Path(settings.folder, "flight.jsonl")))
        self._store_port = 0
        self._endpoint: FaultyEndpoint
        self._exchange: FtarExchange
        self._open()

    def _open(self) -> None:
        settings = self._settings
        inner = open_endpoint(settings.secret, settings.host, _reach(settings))
        self._endpoint = FaultyEndpoint(inner, self._inject)
        self._exchange = FtarExchange(self._endpoint, settings.timeout_s, TUNING)
        store = self._host[1] if self._host is not None else ""
        self._pipe.send(messages.Ready(settings.rank, os.getpid(), self._endpoint.address(), store))

    def perform(self) -> None:
        while True:
            match self._pipe.recv():
                case messages.Configure() as order:
                    self._answer(partial(self._configure, order))
                case messages.AllReduce() as order:
                    self._answer(partial(self._all_reduce, order))
                case messages.Arm(fault, phase):
                    self._endpoint.wait_for(fault, phase, place(phase))
                case messages.Inject(fault):
                    self._answer(partial(self._inject, fault))
                case messages.Command.NOTICE:
                    self._answer(self._notice)
                case messages.Command.COUNT:
                    refused = self._endpoint.refused()
                    self._pipe.send(Refusals(refused.strangers, refused.stale))
                case messages.Command.CLOSE:
                    self._answer(self._exchange.close)
                case messages.Command.OPEN:
                    self._open()
                case messages.Endure() as order:
                    self._pipe.send(self._endure(order))
                case messages.Command.END:
                    self._exchange.close()
                    return
                case order:
                    raise AssertionError(f"{order} is no order for a rank")

    # ---- calls

    def _answer(self, call: Callable[[], Any]) -> None:
        outcome, said = Outcome.FINE, ""
        self._record.write(Kind.EXCHANGE_BEGIN)
        try:
            if call() is False:
                outcome = Outcome.WRONG
        except Retryable as error:
            outcome, said = Outcome.RETRYABLE, str(error)
        except injection.ProgramFault:
            raise
        except Exception as error:
            _log.exception("a call failed")
            outcome, said = Outcome.CRASHED, repr(error)
        end_s = time.monotonic()
        self._record.write(Kind.EXCHANGE_END)
        _log.info("%s %s", outcome.value, said)
        self._pipe.send(Answer(self._settings.rank, outcome, end_s, said))

    def _configure(self, order: messages.Configure) -> None:
        self._store_port = split_address(order.store)[1]
        self._exchange.configure(order.generation, order.members, self._settings.rank, f"{order.store}/{order.generation}")

    def _all_reduce(self, order: messages.AllReduce) -> bool:
        mine, out = source(self._settings.rank, order.step), torch.full((ELEMENTS,), torch.nan)
        self._exchange.all_reduce(mine, out)
        return torch.equal(out, expected(order.members, order.step))

    def _notice(self) -> None:
        if not self._endpoint.lost.wait(self._settings.timeout_s):
            raise TimeoutError("no loss was reported")

    def _endure(self, order: messages.Endure) -> messages.Endured:
        rng = random.Random(order.seed)  # alike on all ranks
        me, until = self._settings.rank, time.monotonic() + order.seconds
        sums, longest_s, over = 0, 0.0, torch.zeros(1)
        try:
            while not over.item():
                elements = rng.choice((1, 1000, ELEMENTS))
                mine, out = source(me, sums, elements), torch.full((elements,), torch.nan)
                begin = time.monotonic()
                self._exchange.all_reduce(mine, out)
                longest_s = max(longest_s, time.monotonic() - begin)
                if not torch.equal(out, expected(order.members, sums, elements)):
                    return messages.Endured(me, sums, longest_s, f"sum {sums} is wrong")
                sums += 1
                self._exchange.all_reduce(torch.tensor([float(time.monotonic() >= until)]), over)
                time.sleep(rng.choice(_PAUSES) * self._settings.heartbeat_s)
        except Retryable as error:
            return messages.Endured(me, sums, longest_s, str(error))
        return messages.Endured(me, sums, longest_s)

    # ---- faults

    def _inject(self, fault: Fault) -> None:
        """Called at the injection point. It uses the pipe, which the main thread does not use while it is in a call."""
        self._pipe.send(messages.Command.HERE)
        word = self._pipe.recv()  # a victim that is killed receives nothing
        assert word is messages.Command.NOW
        self._pipe.send(messages.Injected(time.monotonic()))
        match fault:
            case Fault.EXIT | Fault.EXCEPTION:
                injection.raise_in_main_thread(fault)
            case Fault.CLOSED:
                injection.close_connections(self._store_port)
            case Fault.GARBAGE if self._endpoint.connecting:
                injection.babble(self._endpoint.peers, self._store_port, self._pipe)
            case Fault.GARBAGE:
                injection.send_garbage(self._store_port)
            case Fault.SLOW:
                self._endpoint.pause_s = injection.SLOW * self._settings.heartbeat_s
                self._endpoint.throttle_s = injection.THROTTLE_S
            case Fault.HELD:
                injection.hold_interpreter_lock(injection.HELD * self._settings.heartbeat_s)
            case Fault.DISK:
                injection.fill_disk(self._settings.folder)
            case Fault.CLOCK:
                injection.jump_clock()
            case _:  # injected by the driver already: the victim continues, if it can
                assert fault in (Fault.STOP, Fault.HALF_OPEN, Fault.SECRET, Fault.STALE)


def intrude(settings: messages.ProcessSettings, pipe: Connection) -> None:
    """A process that knows the ranks' addresses and claims to be one of them."""
    pipe.send(messages.Ready(settings.rank, os.getpid(), b""))
    order = pipe.recv()
    if order is messages.Command.END:
        return
    assert isinstance(order, messages.Attack)
    rounds, said = 0, ""
    while not pipe.poll():
        for claimed in (0, RANKS - 1):  # one connects to the ranks, one waits for their connections
            endpoint = open_endpoint(settings.secret, settings.host, _reach(settings))
            peers = {rank: address for rank, address in order.targets.items() if rank != claimed}
            try:
                endpoint.connect(order.generation, claimed, peers, _ATTEMPT_S)
                said = f"it was taken for rank {claimed}"
            except Retryable:
                pass
            endpoint.close()
        rounds += 1
        if rounds == 1:
            pipe.send(messages.Command.HERE)
    word = pipe.recv()
    assert word is messages.Command.CEASE
    pipe.send(Answer(settings.rank, Outcome.CRASHED if said else Outcome.FINE, time.monotonic(), said))
    pipe.recv()  # END


def main(settings: messages.ProcessSettings, path: str) -> None:
    """The forked process. Its output goes to `settings.folder`, its messages to the socket `path` of the driver."""
    injection.end_with_parent()
    output = os.open(Path(settings.folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    configure_logging(f"rank {settings.rank}", "DEBUG")
    if settings.namespace:
        injection.move_to_namespace(settings.namespace)
    injection.prepare()
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        pipe = Connection(sock.detach())
    if settings.intrudes:
        intrude(settings, pipe)
    else:
        Rank(settings, pipe).perform()
    lose_unprinted()  # here, since multiprocessing flushes standard error before the exit handlers, and fails
