"""Path hopping compared with FlowBender and ECMP on real paths: four senders, four fast links, two that are ten times slower.

The testbed of Hopper (section 4.2) in network namespaces: every sender has a way over each of six links to the leaf of the
receivers; a way is a rail, a link is rated where the ways join, so the senders share it. In rounds with a barrier all
senders send one flow of 1 MB chunks; the sides take turns, round by round, on new connections, so that each flow
begins on a path drawn at random. Measured: how much longer a flow takes than alone on a fast link (mean, p99), the
share of bytes on slow links (the kernel's counters), and the time of all rounds.

Flows have the sizes of GPT-3's collectives, as the paper's: activations of a tensor-parallel layer (50 MB), a layer's
gradient (453 MB) and the embedding's (154 MB), 40 : 10 : 1, divided into the number of chunks that `--scale` gives.
The base RTT is what an unloaded fast link takes, measured at the beginning.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import Spread, write
from helixrt.bench._lab_hosts import LabHosts
from helixrt.errors import ConfigError, Fatal
from helixrt.lab.net import Network
from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Unloaded

SENDERS, FAST, SLOW = 4, 4, 2
RECEIVER = SENDERS  # the host
CHUNK = 1 << 20
QUEUE_BYTES = 256 << 10  # of a link; packets beyond are dropped, as by a switch that keeps queues short
GPT3_MB = ((50.3, 40), (453.0, 10), (154.4, 1))  # sizes of flows, and how often each comes
ALONE = "alone"
LEAD_S = 0.02  # from the word to the senders until all begin

SIDES: dict[str, dict[str, Any]] = {
    "helix": {"policy": PolicyName.HOPPER.value},
    "flowbender": {"policy": PolicyName.FLOWBENDER.value},
    "ecmp": {"policy": PolicyName.ECMP.value},
    "paper": {"policy": PolicyName.HOPPER.value, "look_first": False},  # Hopper without the look before the first message
}
THEIRS = "flowbender"
COMPARED = ("helix", THEIRS, "ecmp")


@dataclass(frozen=True)
class Settings:
    fast_mbit: float
    slow_mbit: float
    rounds: int
    repetitions: int
    scale: float
    sides: tuple[str, ...]
    options: dict[str, float]  # of the policies, the same for all
    seed: int


@dataclass(frozen=True)
class Flow:
    side: str
    repetition: int
    round: int
    chunks: int
    begin: float  # monotonic
    end: float
    bytes: tuple[int, ...]  # on each path
    hops: int
    probes: int


class Testbed:
    """The network and a program on each host; ranks are hosts."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stack = ExitStack()
        self._addresses: dict[str, list[str]] = {}
        self._generation = 0

    def __enter__(self) -> Testbed:
        with self._stack:
            net = self._stack.enter_context(Network(hosts=SENDERS + 1, rails=FAST + SLOW))
            for path in range(FAST + SLOW):
                rate = self.settings.fast_mbit if path < FAST else self.settings.slow_mbit
                net.set_rate(RECEIVER, path, rate)
                net.set_queue(RECEIVER, path, QUEUE_BYTES / (rate * 125))
            self._hosts = LabHosts(net, SENDERS + 1, "helixrt.bench._hopping_rank")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, side: str, rails: int, hopping: dict[str, Any] | None) -> None:
        request = {"do": "open", "side": side, "rails": rails, "hopping": hopping}
        self._addresses[side] = self._hosts.ask(dict.fromkeys(range(SENDERS + 1), request))

    def round(self, side: str, chunks: dict[int, int]) -> dict[int, dict[str, Any]]:
        """One flow of so many chunks from every sender, begun together on new connections. Returns each sender's report."""
        self._generation += 1
        hosts = [*chunks, RECEIVER]
        addresses = {host: self._addresses[side][host] for host in hosts}
        meet = {"do": "connect", "side": side, "generation": self._generation}
        peers = {me: {p: raw for p, raw in addresses.items() if RECEIVER in (me, p) and p != me} for me in hosts}
        self._hosts.ask({me: meet | {"me": me, "peers": peers[me]} for me in hosts})
        self._hosts.ask({RECEIVER: {"do": "receive", "op": 1, "chunk": CHUNK, "chunks": chunks}})
        at_s = time.monotonic() + LEAD_S
        send: dict[str, Any] = {"do": "send", "to": RECEIVER, "op": 1, "chunk": CHUNK, "at_s": at_s}
        flows = {host: send | {"count": count} for host, count in chunks.items()}
        *answers, arrived = self._hosts.ask(flows | {RECEIVER: {"do": "arrived", "count": sum(chunks.values())}})
        if arrived != sum(chunks.values()):
            raise Fatal(f"{arrived} chunks arrived of {sum(chunks.values())}")
        return dict(zip(chunks, answers, strict=True))


# ---------------------------------------------------------------- measuring


def sizes(rounds: int, scale: float) -> list[int]:
    """Chunks of the flows of each round, in no order; all kinds in their proportion, the frequent ones first if few."""
    kinds = [(max(1, round(mb / scale)), weight) for mb, weight in GPT3_MB]
    whole = sum(weight for _, weight in kinds)
    found: list[int] = []
    for number in range(rounds):
        owed = [weight * (number + 1) / whole - found.count(chunks) for chunks, weight in kinds]
        found.append(kinds[owed.index(max(owed))][0])
    return found


def alone(bed: Testbed, sizes: Sequence[int]) -> tuple[Unloaded, dict[int, float]]:
    """The floor of the fast link, and how long a flow of each size takes alone on it (seconds, median of five)."""
    bed.open(ALONE, 1, None)
    took: dict[int, float] = {}
    for chunks in sorted({1, *sizes}):
        flows = [bed.round(ALONE, {0: chunks})[0] for _ in range(5)]
        took[chunks] = statistics.median(flow["end"] - flow["begin"] for flow in flows)
    most = max(took)
    if most == 1:
        raise ConfigError("--scale", "", "must leave some flows more than one chunk")
    rate = (most - 1) * CHUNK / (took[most] - took[1])
    return Unloaded(rate, max(1e-3, took[1] - CHUNK / rate)), took


@dataclass(frozen=True)
class Measured:
    """What was measured so far."""

    flows: list[Flow]
    unloaded: Unloaded  # a fast link
    took: dict[int, float]  # chunks of a flow -> seconds it takes alone


def measure(settings: Settings, each: Callable[[Measured], None]) -> Measured:
    """All flows of all sides; `each` is called after every repetition."""
    draw = random.Random(settings.seed)
    flows: list[Flow] = []
    with Testbed(settings) as bed:
        rounds = sizes(settings.rounds, settings.scale)
        unloaded, took = alone(bed, rounds)
        for side in settings.sides:
            options = {**SIDES[side], **settings.options, "message_bytes": CHUNK, "depth_bytes": 2 * CHUNK}
            floor = {"rate_bytes_per_s": unloaded.rate_bytes_per_s, "latency_s": unloaded.latency_s}
            bed.open(side, FAST + SLOW, options | {"unloaded": floor})
        for repetition in range(settings.repetitions):
            draw.shuffle(rounds)
            for number, chunks in enumerate(rounds):
                for side in draw.sample(settings.sides, len(settings.sides)):
                    for said in bed.round(side, dict.fromkeys(range(SENDERS), chunks)).values():
                        said["bytes"] = tuple(said["bytes"])
                        flows.append(Flow(side, repetition, number, chunks, **said))
            each(Measured(flows, unloaded, took))
    return Measured(flows, unloaded, took)


@dataclass(frozen=True)
class Result:
    """Of one side, over some flows."""

    mean: float  # slow-down
    p95: float
    p99: float
    slow_share: float  # of the bytes
    total_s: float  # of the rounds
    hops: float  # per flow
    probes: float

    @staticmethod
    def of(flows: Sequence[Flow], took: dict[int, float]) -> Result:
        downs = sorted((flow.end - flow.begin) / took[flow.chunks] for flow in flows)
        on = [sum(flow.bytes[path] for flow in flows) for path in range(FAST + SLOW)]
        rounds: dict[tuple[int, int], list[Flow]] = {}
        for flow in flows:
            rounds.setdefault((flow.repetition, flow.round), []).append(flow)
        return Result(
            statistics.mean(downs),
            downs[math.ceil(0.95 * len(downs)) - 1],
            downs[math.ceil(0.99 * len(downs)) - 1],
            sum(on[FAST:]) / sum(on),
            sum(max(f.end for f in group) - min(f.begin for f in group) for group in rounds.values()),
            statistics.mean(flow.hops for flow in flows),
            statistics.mean(flow.probes for flow in flows),
        )


def results(flows: Sequence[Flow], took: dict[int, float]) -> dict[str, Result]:
    """By side."""
    by_side: dict[str, list[Flow]] = {}
    for flow in flows:
        by_side.setdefault(flow.side, []).append(flow)
    return {side: Result.of(own, took) for side, own in by_side.items()}


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = HoppingOptions(unloaded=Unloaded(1.0))
    parser.add_argument("--fast-mbit", type=float, default=200.0, help="rate of the four fast links")
    parser.add_argument("--slow-mbit", type=float, default=20.0, help="rate of the two slow links")
    parser.add_argument("--rounds", type=int, default=51, help="rounds of four flows (the paper: 204 flows)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--scale", type=float, default=12.5, help="MB of a GPT-3 collective that one chunk stands for")
    parser.add_argument("--sides", nargs="+", default=list(COMPARED), choices=SIDES, help="policies that are measured")
    parser.add_argument("--alpha", type=float, default=defaults.alpha)
    parser.add_argument("--probe-above", type=float, default=defaults.probe_above, help="threshold in base RTTs")
    parser.add_argument("--switch-above", type=float, default=defaults.switch_above, help="threshold in base RTTs")
    parser.add_argument("--seed", type=int, default=0)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError for settings that cannot work, before anything starts."""
    check_least(args, rounds=1, repetitions=1)
    if not 0 < args.slow_mbit <= args.fast_mbit:
        raise ConfigError("--slow-mbit", args.slow_mbit, f"must be more than 0 and at most --fast-mbit={args.fast_mbit:g}")
    if not args.scale > 0:
        raise ConfigError("--scale", args.scale, "must be more than 0")
    options = {"alpha": args.alpha, "probe_above": args.probe_above, "switch_above": args.switch_above}
    HoppingOptions(unloaded=Unloaded(1.0), **options)
    sides = tuple(dict.fromkeys(args.sides))
    settings = Settings(args.fast_mbit, args.slow_mbit, args.rounds, args.repetitions, args.scale, sides, options, args.seed)

    def each(measured: Measured) -> None:
        last = measured.flows[-1].repetition
        print(f"repetition {last + 1} of {settings.repetitions}", flush=True)
        _print(results([flow for flow in measured.flows if flow.repetition == last], measured.took))
        _write(args, measured)  # a run that is broken off keeps what it has

    measured = measure(settings, each)
    rate = measured.unloaded.rate_bytes_per_s * 8e-6
    print(f"{len(measured.flows)} flows; a fast link carries {rate:.0f} Mbit/s of payload unloaded")
    _print(results(measured.flows, measured.took))
    return 0


def _print(whole: dict[str, Result]) -> None:
    print(f"  {'':12}{'mean':>8}{'p95':>8}{'p99':>8}{'slow links':>12}{'total s':>10}{'hops':>7}{'probes':>8}")
    for side, r in whole.items():
        print(
            f"  {side:12}{r.mean:>8.2f}{r.p95:>8.2f}{r.p99:>8.2f}{100 * r.slow_share:>10.1f} %{r.total_s:>10.1f}"
            f"{r.hops:>7.2f}{r.probes:>8.2f}",
            flush=True,
        )
    if THEIRS in whole:
        theirs = whole[THEIRS]
        for side, r in whole.items():
            if side != THEIRS:
                print(
                    f"  {side} to FlowBender: mean {_percent(r.mean / theirs.mean)}, p99 {_percent(r.p99 / theirs.p99)}, "
                    f"total time x{r.total_s / theirs.total_s:.2f}",
                    flush=True,
                )


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %"


def _write(args: argparse.Namespace, measured: Measured) -> None:
    flows, unloaded, took = measured.flows, measured.unloaded, measured.took
    count = flows[-1].repetition + 1
    repetitions = [results([flow for flow in flows if flow.repetition == n], took) for n in range(count)]
    values: dict[str, list[float]] = {}
    for one in repetitions:
        for side, result in one.items():
            for name, value in asdict(result).items():
                values.setdefault(f"{side}_{name}", []).append(value)
            if side != THEIRS and THEIRS in one:
                for name in ("mean", "p99", "total_s"):
                    ratio = getattr(result, name) / getattr(one[THEIRS], name)
                    values.setdefault(f"{side}_to_{THEIRS}_{name}", []).append(ratio)
    spreads = {name: Spread.of(found * 2 if len(found) == 1 else found) for name, found in values.items()}
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "benchmark", "command")}
    details = {
        "repetitions": count,
        "unloaded_bytes_per_s": unloaded.rate_bytes_per_s,
        "unloaded_latency_s": unloaded.latency_s,
        "alone_s": {str(chunks): seconds for chunks, seconds in took.items()},
        "all_flows": {side: asdict(result) for side, result in results(flows, took).items()},
        "senders": SENDERS,
        "fast_links": FAST,
        "slow_links": SLOW,
        "chunk_bytes": CHUNK,
        "queue_bytes": QUEUE_BYTES,
    }
    write(args.json, "hopping", settings, spreads, measured=details)
