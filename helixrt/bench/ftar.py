"""FTAR's all-reduce compared with Gloo's, in the same processes, by turns: 4 KiB to 256 MiB, over TCP and shared memory.

Every round measures each side on each size in turn, in each condition (`_conditions`: back to back, after compute, from
idle); a call's time is that of the slowest rank, and a ratio is taken per round. Gloo has a tensor of its own: the library
may ask for huge pages for those it is given (HELIXRT_HUGE_PAGES=1). Also measured: a ring over bare sockets, the cost of
fault tolerance when nothing fails (TCP with ledger and heartbeats against without), the time survivors take from N to N-1
ranks until their next sum, the time until they notice a killed process, and with `--tune` which chunks are fastest here.
Every result is checked.

The cost of fault tolerance is far below what other work does to one call. So many calls of either kind follow each other in
turn, each pair gives a ratio, and the output is their median with its 95 % confidence interval."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._bare_ring import BareRing
from helixrt.bench._conditions import Condition, preparation
from helixrt.bench._figures import Spread, write
from helixrt.bench._ftar_kill import HOST, SECRET, TIMEOUT_S, measure_kill
from helixrt.collectives import huge_pages
from helixrt.collectives.endpoints import Reach, open_endpoint
from helixrt.collectives.ftar import FtarExchange
from helixrt.collectives.process_group import HelixGroup
from helixrt.errors import Fatal
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.link.options import LinkOptions
from helixrt.replica.store import host_store
from helixrt.transport.auto import AutoEndpoint
from helixrt.transport.contract import Endpoint
from helixrt.transport.native.endpoint import NativeEndpoint
from helixrt.transport.native.links import LinksOptions
from helixrt.transport.tcp.endpoint import EAGER_BYTES, TcpOptions
from helixrt.transport.tcp.rails import TcpRail

SIZES_KIB = (4, 64, 1 << 10, 16 << 10, 64 << 10, 256 << 10)
# Of ours: of the two planes, and without ledger and heartbeats.
GROUPS = ("native_tcp", "native_memory", "tcp", "shared_memory", "tcp_plain")
SIDES = ("shared_memory", "tcp", "sockets")  # beside gloo; the last is what the machine allows
_BYTES_PER_BLOCK = 256 << 20  # calls in a row, so that small ones are measured together
_MOST_CALLS = 100
_COST_KIB = (1 << 10, 16 << 10, 64 << 10)
_COST_BYTES = 8 << 30  # as many pairs of calls as move that over all ranks, within
_COST_PAIRS = (60, 400)
_COST_WARM = 5
_TUNED_CHUNKS = tuple((chunk << 10, chunks) for chunk in (256, 512, 1024, 2048, 4096, 8192) for chunks in (2, 4, 8))


@dataclass(frozen=True)
class Settings:
    ranks: int
    sizes_kib: tuple[int, ...]
    sides: tuple[str, ...]
    rounds: int
    chunk_kib: int  # 0: the default
    chunks: int
    generations: int
    cost_kib: tuple[int, ...] = ()
    store: str = ""
    conditions: tuple[Condition, ...] = (*Condition,)

    @property
    def tuning(self) -> Tuning:
        return Tuning(self.chunk_kib << 10, self.chunks) if self.chunk_kib else Tuning()


class _Group(HelixGroup):
    """The c10d backend over one transport."""

    def __init__(self, side: str, store: dist.Store, rank: int, size: int, tuning: Tuning) -> None:
        self._side, self._tuning = side, tuning
        super().__init__(dist.PrefixStore(f"{side}/{tuning}", store), rank, size, timedelta(seconds=TIMEOUT_S))

    def _endpoint(self, store: dist.Store, secret: str) -> Endpoint:
        return _endpoint_of(self._side)


def _endpoint_of(side: str) -> Endpoint:
    if side.startswith("native"):
        return NativeEndpoint(SECRET, (TcpRail(HOST),), LinksOptions(shared_memory=side == "native_memory"))
    if side != "tcp_plain":
        return open_endpoint(SECRET, HOST, Reach(transport=side))
    plain = TcpOptions(link=LinkOptions(fault_tolerance=False, eager_bytes=EAGER_BYTES))
    return AutoEndpoint(SECRET, HOST, transport="tcp", heartbeat_s=None, tcp=plain)  # as the others, but for that


AllReduce = Callable[[torch.Tensor], Any]
Figures = dict[str, list[float]]  # name -> seconds of each round


def _blocking(group: Any) -> AllReduce:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return lambda tensor: group.allreduce([tensor], options).wait()


def _block(all_reduce: AllReduce, tensor: torch.Tensor, calls: int, prepare: Callable[[], None] | None = None) -> float:
    """Seconds per call of the slowest rank, without those of `prepare` before each. Raises Fatal if the sum is wrong."""
    tensor.fill_(1.0)
    all_reduce(tensor)
    if not bool((tensor == float(dist.get_world_size())).all()):
        raise Fatal("a sum of ones is wrong")
    tensor.zero_()
    dist.barrier()
    took = 0.0
    if prepare is None:
        begin = time.perf_counter()
        for _ in range(calls):
            all_reduce(tensor)
        took = time.perf_counter() - begin
    else:
        for _ in range(calls):
            prepare()
            begin = time.perf_counter()
            all_reduce(tensor)
            took += time.perf_counter() - begin
    slowest = torch.tensor(took / calls)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _compare(settings: Settings, store: dist.Store, rank: int) -> Figures:
    groups = {s: _Group(s, store, rank, settings.ranks, settings.tuning) for s in settings.sides if s in GROUPS}
    sides = {"gloo": _blocking(dist.group.WORLD), **{side: _blocking(group) for side, group in groups.items()}}
    bare = None
    if "sockets" in settings.sides:
        bare = BareRing(dist.PrefixStore("bare", store), rank, settings.ranks, HOST, TIMEOUT_S)
        sides["sockets"] = bare.all_reduce
    seconds: Figures = {}
    prepare = {condition: preparation(condition) for condition in settings.conditions}
    for kib in settings.sizes_kib:
        theirs, ours = (torch.zeros((kib << 10) // 4) for _ in range(2))
        calls = max(1, min(_MOST_CALLS, _BYTES_PER_BLOCK // (kib << 10)))
        for _ in range(huge_pages.USES + (kib << 10) // huge_pages.SLICE_BYTES if groups else 0):
            sides[next(iter(groups))](ours)  # until it has all its huge pages, as in a run's later steps
        for turn, condition in itertools.product(range(settings.rounds + 1), settings.conditions):
            before = prepare[condition] if condition.prepares else None
            for side in list(sides) if turn % 2 else reversed(sides):
                took = _block(sides[side], theirs if side == "gloo" else ours, calls, before)
                if turn:  # the first round warms up
                    seconds.setdefault(_key(side, kib, condition), []).append(took)
    if bare is not None:
        bare.close()
    _end(groups)
    return seconds


def _key(side: str, kib: int, condition: Condition) -> str:
    return f"{side}_{kib}_kib" + (f"_{condition.value}" if condition.prepares else "")


def _cost(settings: Settings, store: dist.Store, rank: int) -> Figures:
    """Seconds of every call, with and without fault tolerance in turn; the slowest rank's. Out of place as an exchange
    between replicas has it, in place as a process group has."""
    names = ("tcp", "tcp_plain")
    exchanges = {side: FtarExchange(_endpoint_of(side), TIMEOUT_S, settings.tuning) for side in names}
    for side, exchange in exchanges.items():
        exchange.configure(0, range(settings.ranks), rank, f"{settings.store}/cost/{side}")
    groups = {side: _Group(side, store, rank, settings.ranks, settings.tuning) for side in names}
    seconds: Figures = {}
    for kib in settings.cost_kib:
        source, out = (torch.zeros((kib << 10) // 4) for _ in range(2))
        for _ in range(huge_pages.USES + (kib << 10) // huge_pages.SLICE_BYTES):
            exchanges["tcp"].all_reduce(source, out)
        ways: dict[str, list[Callable[[], Any]]] = {
            "out_of_place": [partial(exchanges[side].all_reduce, source, out) for side in names],
            "in_place": [partial(_blocking(groups[side]), out) for side in names],
        }
        pairs = min(max(_COST_PAIRS[0], _COST_BYTES // ((kib << 10) * settings.ranks)), _COST_PAIRS[1])
        for where, calls in ways.items():
            took = torch.zeros(2, pairs + _COST_WARM, dtype=torch.float64)
            for pair in range(pairs + _COST_WARM):
                for row in (0, 1) if pair % 2 else (1, 0):
                    begin = time.perf_counter()
                    calls[row]()
                    took[row, pair] = time.perf_counter() - begin
            dist.all_reduce(took, dist.ReduceOp.MAX)
            for side, each in zip(names, took, strict=True):
                seconds[f"{side}_{kib}_kib_{where}"] = each[_COST_WARM:].tolist()
    _end(groups)
    for exchange in exchanges.values():
        exchange.close()
    return seconds


def _tune(settings: Settings, store: dist.Store, rank: int) -> Figures:
    seconds: Figures = {}
    for side in filter(GROUPS.__contains__, settings.sides):
        for chunk, chunks in _TUNED_CHUNKS:
            group = _Group(side, store, rank, settings.ranks, Tuning(chunk, chunks, min(chunk, 256 << 10)))
            for kib in settings.sizes_kib:
                tensor = torch.zeros((kib << 10) // 4)
                calls = max(1, min(_MOST_CALLS, _BYTES_PER_BLOCK // (kib << 10)))
                took = [_block(_blocking(group), tensor, calls) for _ in range(settings.rounds + 1)]
                seconds[f"{side}_{kib}_kib_{chunks}_chunks_of_{chunk >> 10}_kib"] = took[1:]
            _end({side: group})
    return seconds


def _end(groups: dict[str, _Group]) -> None:
    dist.barrier()  # no rank closes while another one still waits
    for group in groups.values():
        group.shutdown()
    dist.barrier()


def _reconfigure(settings: Settings, rank: int) -> Figures:
    """Survivors' time from the loss of the last rank to their next sum: connections, and an all-reduce of 4 KiB."""
    everyone, survivors = range(settings.ranks), range(settings.ranks - 1)
    exchange = FtarExchange(open_endpoint(SECRET, HOST), TIMEOUT_S)
    source, out = torch.ones(1024), torch.empty(1024)
    seconds: list[float] = []
    for turn in range(settings.generations + 1):
        exchange.configure(2 * turn, everyone, rank, f"{settings.store}/all/{turn}")
        exchange.all_reduce(source, out)
        dist.barrier()
        took = torch.zeros(())
        if rank in survivors:
            begin = time.perf_counter()
            exchange.configure(2 * turn + 1, survivors, rank, f"{settings.store}/survivors/{turn}")
            exchange.all_reduce(source, out)
            took.fill_(time.perf_counter() - begin)
            if float(out[0]) != len(survivors):
                raise Fatal("the survivors' sum is wrong")
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds += [float(took)] if turn else []
    exchange.close()
    return {f"reconfigure_{settings.ranks}_to_{settings.ranks - 1}": seconds}


def _rank(rank: int, what: str, settings: Settings, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host, _, port = settings.store.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    gloo = dist.PrefixStore(f"gloo/{what}/{settings.ranks}", store)
    dist.init_process_group("gloo", store=gloo, rank=rank, world_size=settings.ranks, timeout=timedelta(seconds=TIMEOUT_S))
    if what == "reconfigure":
        figures = _reconfigure(settings, rank)
    else:
        figures = _MEASURES[what](settings, dist.PrefixStore(what, store), rank)
    if rank == 0:
        results.put(figures)
    dist.barrier()
    dist.destroy_process_group()


_MEASURES = {"compare": _compare, "cost": _cost, "tune": _tune}


def measure(what: str, settings: Settings) -> Figures:
    """Seconds of each round by what was measured: `what` is "compare", "cost", "tune" or "reconfigure"."""
    server, address = host_store(HOST)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (what, replace(settings, store=address), results), nprocs=settings.ranks)
    del server
    figures: Figures = results.get()
    return figures


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kib", type=int, nargs="+", default=list(SIZES_KIB), help="sizes of the all-reduces in KiB")
    parser.add_argument(
        "--sides", nargs="+", default=list(SIDES), choices=[*GROUPS, "sockets"], help="what is compared with gloo"
    )
    conditions = [condition.value for condition in Condition]
    parser.add_argument("--conditions", nargs="+", default=conditions, choices=conditions, help="what precedes each call")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--chunk-kib", type=int, default=0, help="size of a chunk (default: the library's)")
    parser.add_argument("--chunks", type=int, default=Tuning().chunks, help="chunks in flight, with --chunk-kib")
    parser.add_argument(
        "--cost-kib", type=int, nargs="*", default=list(_COST_KIB), help="sizes with and without fault tolerance; none for none"
    )
    parser.add_argument("--generations", type=int, default=20, help="how often the ranks change from N to N-1; 0: never")
    parser.add_argument("--kills", type=int, default=5, help="how many processes are killed; 0: none")
    parser.add_argument("--tune", action="store_true", help="only find the fastest chunk size")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError for settings that cannot work, before anything starts."""
    check_least(args, ranks=2, rounds=2, kib=1, cost_kib=1)
    spreads: dict[str, Spread] = {}
    costs: dict[str, dict[str, float]] = {}
    for ranks in args.ranks:
        settings = Settings(
            ranks,
            tuple(args.kib),
            tuple(args.sides),
            args.rounds,
            args.chunk_kib,
            args.chunks,
            args.generations,
            tuple(args.cost_kib),
            conditions=tuple(map(Condition, args.conditions)),
        )
        if args.tune:
            _report_tuning(measure("tune", settings), settings, spreads)
            continue
        _report(measure("compare", settings), settings, spreads)
        if args.cost_kib:
            costs |= _report_cost(measure("cost", settings), settings)
        if args.generations >= 2 and ranks > 2:
            for name, seconds in measure("reconfigure", settings).items():
                spreads[f"{name}_ms"] = Spread.of([1000 * s for s in seconds])
                print(f"  {name} ranks, ms: {spreads[f'{name}_ms']}")
    if args.kills and not args.tune:
        ranks = min(args.ranks)
        noticed = sorted(1000 * s for _ in range(args.kills) for s in measure_kill(max(3, ranks)))
        spreads["killed_process_noticed_ms"] = Spread.of(noticed)
        last = noticed[math.ceil(0.99 * len(noticed)) - 1]
        print(f"a killed process is noticed after, ms: {spreads['killed_process_noticed_ms']}  p99 {last:.4g}")
    settled = {k: v for k, v in vars(args).items() if k not in ("json", "benchmark")}
    write(args.json, "ftar", settled, spreads, cost_of_fault_tolerance=costs)
    return 0


def _report(seconds: Figures, settings: Settings, spreads: dict[str, Spread]) -> None:
    print(f"all-reduce, {settings.ranks} ranks, microseconds per call; ratios to Gloo's speed per round")
    for condition, kib in itertools.product(settings.conditions, settings.sizes_kib):
        theirs = seconds[_key("gloo", kib, condition)]
        for side in ("gloo", *settings.sides):
            own = seconds[_key(side, kib, condition)]
            key = f"{settings.ranks}_ranks_{_key(side, kib, condition)}"
            spreads[f"{key}_us"] = Spread.of([1e6 * s for s in own])
            spreads[f"{key}_ratio"] = Spread.of([t / s for s, t in zip(own, theirs, strict=True)])
            rate = (kib << 10) / spreads[f"{key}_us"].p50 / 1e3
            said = f"{condition.value:13} {kib:7} KiB {side:14} {spreads[f'{key}_us']}  {rate:6.2f} GB/s"
            print(f"  {said}  x{spreads[f'{key}_ratio'].p50:.2f}")


def _report_cost(seconds: Figures, settings: Settings) -> dict[str, dict[str, float]]:
    found = {}
    for kib, where in itertools.product(settings.cost_kib, ("out_of_place", "in_place")):
        pairs = zip(seconds[f"tcp_{kib}_kib_{where}"], seconds[f"tcp_plain_{kib}_kib_{where}"], strict=True)
        costs = sorted(with_it / without - 1 for with_it, without in pairs)
        middle, aside = len(costs) // 2, math.ceil(0.98 * math.sqrt(len(costs)))  # 95 % of a binomial distribution
        cost = {"median": costs[middle], "low": costs[middle - aside], "high": costs[middle + aside], "pairs": len(costs)}
        found[f"{settings.ranks}_ranks_{kib}_kib_{where}"] = cost
        within = f"of {len(costs)} pairs, within {100 * cost['low']:.2g} to {100 * cost['high']:.2g} %"
        print(f"  {kib:7} KiB cost of fault tolerance, {where:12}: {100 * cost['median']:.2g} % (median {within})")
    return found


def _report_tuning(seconds: Figures, settings: Settings, spreads: dict[str, Spread]) -> None:
    for name, took in seconds.items():
        spreads[f"{settings.ranks}_ranks_{name}_us"] = Spread.of([1e6 * s for s in took])
    for side in filter(GROUPS.__contains__, settings.sides):
        for kib in settings.sizes_kib:
            mine = {name: Spread.of(took) for name, took in seconds.items() if name.startswith(f"{side}_{kib}_kib_")}
            ranked = sorted(mine, key=lambda name: mine[name].p50)
            print(f"{settings.ranks} ranks, {side}, {kib} KiB, fastest first:")
            for name in ranked[:3]:
                print(f"  {name.removeprefix(f'{side}_{kib}_kib_'):32} us: {1e6 * mine[name].p50:.5g}")
