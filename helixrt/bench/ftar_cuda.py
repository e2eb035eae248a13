"""FTAR's all-reduce of CUDA tensors compared with Gloo's and with the copies alone: 1 to 256 MiB, by processes on one GPU.

Needs a CUDA GPU. Links reach host memory only, so a tensor goes to pinned memory and its sum comes back (FT-HSDP section 4.2).
The side `copies` is that and nothing else: all ranks at once copy a tensor to pinned memory and another one back, on two
streams; with free links and sums, an all-reduce through host memory takes at least so long. Every round measures each side in
turn, by itself and beside matrix products on another stream; a call's time is that of the slowest rank, until the device has
the result. A ratio is taken per round. Also measured: how much longer the matrix products take. All ranks share the GPU and
its bus here, and kernels of several processes take turns on it: with a GPU for each rank, all sides are faster. Sums are
checked."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import Spread, write
from helixrt.bench._ftar_kill import HOST, SECRET, TIMEOUT_S
from helixrt.collectives.endpoints import Reach, open_endpoint
from helixrt.collectives.ftar import FtarExchange
from helixrt.errors import ConfigError, Fatal
from helixrt.replica.store import host_store

SIZES_MIB = (1, 4, 16, 64, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRANSPORTS = ("shared_memory", "tcp")
COPIES, GLOO = "copies", "gloo"
_WARM = 1  # round
_DIM = 4096  # of the square matrices that are multiplied
_CHECKED = 4096  # elements of a sum that are looked at

Call = Callable[[], None]
Figures = dict[str, list[float]]  # name -> seconds of each round


@dataclass(frozen=True)
class Settings:
    ranks: int
    sizes_mib: tuple[int, ...]
    transports: tuple[str, ...]
    dtype: str
    rounds: int
    products: int
    """Matrix products beside a call, per 64 MiB of the tensor, at least one; 0: none."""

    @property
    def sides(self) -> tuple[str, ...]:
        return (COPIES, GLOO, *self.transports)

    def products_beside(self, mib: int) -> int:
        return max(1, self.products * mib // 64) if self.products else 0


@dataclass(frozen=True)
class _Tensors:
    """On the device, and two in pinned memory."""

    source: torch.Tensor
    out: torch.Tensor
    pinned: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def of(mib: int, dtype: torch.dtype) -> _Tensors:
        source = torch.ones((mib << 20) // dtype.itemsize, dtype=dtype, device="cuda")
        there, here = (torch.zeros(source.numel(), dtype=dtype, pin_memory=True) for _ in range(2))
        return _Tensors(source, torch.empty_like(source), (there, here))


class _Sides:
    """What is measured; each call returns when the device has its result."""

    def __init__(self, settings: Settings, address: str, rank: int) -> None:
        self._exchanges: dict[str, FtarExchange] = {}
        for transport in settings.transports:
            endpoint = open_endpoint(SECRET, HOST, Reach(transport=transport))
            exchange = FtarExchange(endpoint, TIMEOUT_S)
            exchange.configure(0, range(settings.ranks), rank, f"{address}/{transport}")
            self._exchanges[transport] = exchange
        self._back = torch.cuda.Stream()

    def calls(self, tensors: _Tensors) -> dict[str, Call]:
        ours = {name: self._ours(exchange, tensors) for name, exchange in self._exchanges.items()}
        return {COPIES: lambda: self._copies(tensors), GLOO: lambda: _gloo(tensors), **ours}

    def _ours(self, exchange: FtarExchange, tensors: _Tensors) -> Call:
        def call() -> None:
            exchange.all_reduce(tensors.source, tensors.out)
            torch.cuda.current_stream().synchronize()

        return call

    def _copies(self, tensors: _Tensors) -> None:
        there, here = tensors.pinned
        self._back.wait_stream(torch.cuda.current_stream())
        there.copy_(tensors.source, non_blocking=True)
        with torch.cuda.stream(self._back):
            tensors.out.copy_(here, non_blocking=True)
        self._back.synchronize()
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        for exchange in self._exchanges.values():
            exchange.close()


def _gloo(tensors: _Tensors) -> None:
    dist.all_reduce(tensors.out)
    torch.cuda.current_stream().synchronize()


class _Products:
    """Matrix products on the device's default stream, and their time by events."""

    def __init__(self) -> None:
        self._square = torch.randn(_DIM, _DIM, device="cuda", dtype=torch.bfloat16) / _DIM**0.5
        self._into = torch.empty_like(self._square)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def queue(self, count: int) -> None:
        stream = torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            self._begin.record()
            for _ in range(count):
                torch.mm(self._square, self._square, out=self._into)
            self._end.record()

    def seconds(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000.0


def _checked(side: str, call: Call, tensors: _Tensors, ranks: int) -> None:
    """Raises Fatal if the sum of ones, or the copy of zeros, is wrong."""
    tensors.out.fill_(1.0)
    call()
    expected = 0.0 if side == COPIES else float(ranks)
    if not bool((tensors.out[:: max(1, tensors.out.numel() // _CHECKED)] == expected).all()):
        raise Fatal(f"{side}: a result is wrong")
    tensors.out.zero_()  # Gloo sums in place, and the sums must not grow


def _slowest(*seconds: float) -> list[float]:
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(value) for value in values]


def _measured(settings: Settings, sides: _Sides) -> Figures:
    seconds: Figures = {}
    products = _Products()
    for mib in settings.sizes_mib:
        tensors = _Tensors.of(mib, DTYPES[settings.dtype])
        calls, beside = sides.calls(tensors), settings.products_beside(mib)
        for side, call in calls.items():
            _checked(side, call, tensors, settings.ranks)
        for turn, count in itertools.product(range(settings.rounds + _WARM), (0, beside) if beside else (0,)):
            alone = 0.0
            if count:  # as many products with nothing beside them
                alone = _timed(products, count, lambda: None)[1]
            for side in list(calls) if turn % 2 else reversed(calls):
                took, computed = _timed(products, count, calls[side])
                if turn < _WARM:
                    continue
                key = f"{side}_{mib}_mib" + ("_beside_compute" if count else "")
                seconds.setdefault(key, []).append(took)
                if count:
                    seconds.setdefault(f"{key}_slowdown", []).append(computed / alone)
        del tensors, calls
        torch.cuda.empty_cache()
    return seconds


def _timed(products: _Products, count: int, call: Call) -> tuple[float, float]:
    """Seconds of the call and of the products, each of the slowest rank."""
    torch.cuda.synchronize()
    dist.barrier()
    if count:
        products.queue(count)
    begin = time.perf_counter()
    call()
    took = time.perf_counter() - begin
    slowest = _slowest(took, products.seconds() if count else 0.0)
    return slowest[0], slowest[1]


def _rank(rank: int, settings: Settings, address: str, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=settings.ranks)
    sides = _Sides(settings, address, rank)
    with torch.cuda.stream(torch.cuda.Stream()):
        figures = _measured(settings, sides)
    if rank == 0:
        results.put(figures)
    dist.barrier()  # no rank closes while another one still waits
    sides.close()
    dist.destroy_process_group()


def measure(settings: Settings) -> Figures:
    """Seconds of each round by side and size; names that end in `slowdown` are ratios."""
    server, address = host_store(HOST)
    results = mp.get_context("spawn").SimpleQueue()
    ranks = mp.spawn(_rank, (settings, address, results), nprocs=settings.ranks, join=False)
    while results.empty() and not ranks.join(timeout=0.5):  # raises what a rank has raised
        pass
    figures: Figures = results.get()  # before the ranks end: a pipe holds few
    while not ranks.join():
        pass
    del server
    return figures


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes, all on the GPUs of this machine")
    parser.add_argument("--mib", type=int, nargs="+", default=list(SIZES_MIB), help="sizes of the all-reduces in MiB")
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type of the elements")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--products", type=int, default=40, help="matrix products beside a call per 64 MiB; 0: none")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError where there is no GPU, and for settings that cannot work."""
    check_least(args, ranks=2, mib=1, rounds=2, products=0)
    if not torch.cuda.is_available():
        raise ConfigError("bench", "ftar_cuda", "needs a CUDA GPU, and PyTorch sees none here")
    spreads: dict[str, Spread] = {}
    for ranks in args.ranks:
        settings = Settings(ranks, tuple(args.mib), tuple(args.transports), args.dtype, args.rounds, args.products)
        _report(measure(settings), settings, spreads)
    settled: dict[str, Any] = {**asdict(settings), "ranks": args.ranks, "gpus": torch.cuda.device_count()}
    write(args.json, "ftar_cuda", settled, spreads, versions={"cuda": torch.version.cuda})
    return 0


def _report(seconds: Figures, settings: Settings, spreads: dict[str, Spread]) -> None:
    gpus = torch.cuda.device_count()
    print(f"all-reduce of CUDA tensors ({settings.dtype}), {settings.ranks} ranks on {gpus} GPU(s), milliseconds per call")
    for condition, mib in itertools.product(("", "_beside_compute") if settings.products else ("",), settings.sizes_mib):
        at = f"{mib}_mib{condition}"
        for side in settings.sides:
            own, key = seconds[f"{side}_{at}"], f"{settings.ranks}_ranks_{side}_{at}"
            spreads[f"{key}_ms"] = Spread.of([1e3 * s for s in own])
            said = f"{condition[1:]:14} {mib:4} MiB {side:14} {spreads[f'{key}_ms']}"
            for other in (GLOO, COPIES):
                ratios = [t / s for s, t in zip(own, seconds[f"{other}_{at}"], strict=True)]
                spreads[f"{key}_ratio_to_{other}"] = Spread.of(ratios)
            to_gloo, to_copies = (spreads[f"{key}_ratio_to_{other}"].p50 for other in (GLOO, COPIES))
            said += f"  {to_gloo:.2f} of Gloo's speed, {to_copies:.2f} of the copies'"
            if condition:
                spreads[f"{key}_slowdown"] = Spread.of(seconds[f"{side}_{at}_slowdown"])
                said += f"; products take {spreads[f'{key}_slowdown'].p50:.2f} times as long"
            print(f"  {said}")
