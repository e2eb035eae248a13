"""Step time of a model that two hosts share over a slow link: two interwoven strands compared with other methods.

The benchmark builds the hosts and the link itself, as namespaces (root on Linux), with one rank on each and one core
for each rank. At link rates that make communication a given share of compute, all ways to run a step take turns, so
that all have the same noise: plain eager PyTorch, a single strand, overlap inside one micro-batch, round-robin
interleaving (Wavelet), DHelix's published search (eq2) and helix. All must give the same losses and gradients, else there
is no figure. In the same rounds compute is measured alone, with every collective's result there already, and
communication alone.

With T1 the single strand's time, C compute alone (its processor time: on a core of its own that is its time), M
communication alone and m its processor time on a link without limit, a step of n micro-batches cannot take less than
T1 / n + (n - 1) / n max(C + m, M): the first forward and the last backward have no partner. The hidden share is
(T1 - T) / (T1 - bound). With `--device cuda` both ranks share one card and its tensors go to the link by way of the host;
C is then time by the clock, and m nothing. On a machine that does other work too all times but C are longer; the figures
say the load. Gradients of ranks that share a model in part (sequence, expert and context parallelism) are left as they
are: their sum after the step is the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import Spread, write
from helixrt.errors import ConfigError, Fatal
from helixrt.lab import machine
from helixrt.lab.net import Network

MODELS = ("gpt-tp", "llama-sp", "moe-ep", "gpt-cp", "gpt-ring")
HOSTS = 2
DEADLINE_S = 600.0  # of one answer of a rank; profiling takes longest
SHARE_TOLERANCE = 0.05  # of communication to compute
MOST_TRIES = 5
ALONE = ("compute", "communication")
# What an idle link may send at once (a segment and a quarter) should be little beside a message, or single strands, whose
# link is often idle, would have it for nothing. Yet each segment wakes the receiver, on the core that computes here, so at
# every rate a segment is about this long, as interrupt moderation of a real card makes it.
SEGMENT_MS, LEAST_SEGMENT_BYTES, MOST_SEGMENT_BYTES = 2.0, 16 << 10, 48 << 10


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str
    layers: int
    dim: int
    seq_len: int
    batch: int
    microbatches: int
    rounds: int
    shares: tuple[float, ...]
    device: str = "cpu"

    @property
    def shape(self) -> dict[str, Any]:
        """As the ranks take it, see `_strand_variants.Shape`."""
        return {key: value for key, value in asdict(self).items() if key not in ("rounds", "shares")}


class Ranks:
    """The two programs, asked in step. Their owner is the network, which ends them."""

    def __init__(self, network: Network, settings: Settings, logs: Sequence[IO[str]], cores: Sequence[int]) -> None:
        self.logs = logs
        argv = [sys.executable, "-m", "helixrt.bench._strand_rank", json.dumps(settings.shape)]
        self.processes = [
            network.run(host, argv, cpus=[core], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            for host, (core, log) in enumerate(zip(cores, logs, strict=True))
        ]

    def ask(self, what: str, **given: Any) -> list[Any]:
        """Each rank's answer. Raises Fatal with the end of a rank's output if the rank ends or does not answer."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"do": what, "with": given}) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its answer has the reason
        answers = []
        for host, process in enumerate(self.processes):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
            line = process.stdout.readline() if ready else ""
            if not line:
                raise Fatal(f"rank {host} {'ended' if ready else 'was silent'} at {what}: {self.last_words(host)}")
            answers.append(json.loads(line))
        return answers

    def last_words(self, host: int) -> str:
        self.logs[host].seek(0)
        said = self.logs[host].read().strip().splitlines()
        return said[-1] if said else "it said nothing"


def slowest(answers: Sequence[dict[str, float]], key: str) -> float:
    return max(answer[key] for answer in answers)


@dataclass(frozen=True)
class Unlimited:
    """Of a step, on a link without limit: compute alone, communication alone, its processor time; seconds."""

    compute_s: float
    communication_s: float
    work_s: float


@dataclass(frozen=True)
class Measured:
    """One link rate. `seconds` [round] and `work` (processor time) of each way; `plan` as a rank reports it."""

    share: float
    rate_mbit: float
    seconds: dict[str, list[float]]
    work: dict[str, list[float]]
    plan: dict[str, Any]


def rated(network: Network, ranks: Ranks, wanted_s: float, start_mbit: float) -> float:
    """Set and return the rate at which a step's communication alone takes `wanted_s`, as near as `SHARE_TOLERANCE`."""
    rate = start_mbit
    for _ in range(MOST_TRIES):
        for host in range(HOSTS):
            network.set_rate(host, 0, rate)
            network.set_segment(host, 0, segment_bytes(rate))
        takes = slowest(ranks.ask("alone_communication", times=2), "communication_s")
        if abs(takes / wanted_s - 1) <= SHARE_TOLERANCE:
            break
        rate = max(1.0, rate * takes / wanted_s)
    return rate


def segment_bytes(rate_mbit: float) -> int:
    return min(MOST_SEGMENT_BYTES, max(LEAST_SEGMENT_BYTES, round(SEGMENT_MS * rate_mbit * 125)))


def measure(settings: Settings, trace: Path | None = None) -> tuple[Unlimited, list[Measured]]:
    """All link rates; `trace` is written at the last. Raises Fatal if a rank fails or variants do not train the same."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = [stack.enter_context(open(folder / f"rank{host}", "w+")) for host in range(HOSTS)]
        network = stack.enter_context(Network(HOSTS))
        ranks = Ranks(network, settings, logs, own_cores())
        answers = ranks.ask("alone", times=3)
        free = Unlimited(*(slowest(answers, key) for key in ("compute_s", "communication_s", "work_s")))
        sent = max(answer["sent_bytes"] for answer in answers)
        found = []
        least = free.work_s / free.compute_s
        if min(settings.shares) <= least:
            rule = f"must be above {least:.2f}, the processor's share of communication; a larger --dim makes that less"
            raise ConfigError("--shares", min(settings.shares), rule)
        for share in settings.shares:
            wanted = share * free.compute_s
            rate = rated(network, ranks, wanted, sent * 8e-6 / wanted)
            found.append(at_rate(ranks, settings, share, rate, folder / "cache"))
        if trace is not None:
            ranks.ask("trace", way="helix", path=str(trace.absolute()))
        return free, found


def at_rate(ranks: Ranks, settings: Settings, share: float, rate: float, cache: Path) -> Measured:
    plan = ranks.ask("plan", cache=str(cache))[0]
    same = {name: way["same_as"] for name, way in plan["ways"].items()}
    names = [*(name for name in ("eager", "single", *plan["ways"]) if same.get(name) is None), *ALONE]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    work: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(settings.rounds):
        first = turn * 5 % len(names)
        answers = ranks.ask("round", names=names[first:] + names[:first])
        for name in names:
            seconds[name].append(max(answer[name][0] for answer in answers))
            work[name].append(max(answer[name][1] for answer in answers))
    for name, twin in same.items():
        if twin is not None:
            seconds[name], work[name] = seconds[twin], work[twin]
    return Measured(share, rate, seconds, work, plan)


def own_cores() -> list[int]:
    """One core for each rank. Raises ConfigError where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < HOSTS:
        raise ConfigError("cores", len(cores), f"must be at least {HOSTS}: one for each rank")
    return cores[:HOSTS]


def figures(settings: Settings, free: Unlimited, at: Measured) -> tuple[dict[str, Spread], dict[str, Any]]:
    """Spreads of times and ratios at one rate, and what they amount to."""
    spreads = {f"{name}_s": Spread.of(taken) for name, taken in at.seconds.items()}
    helix, single = at.seconds["helix"], at.seconds["single"]
    spreads |= {
        f"helix_over_{name}": Spread.of([other / own for own, other in zip(helix, taken, strict=True)])
        for name, taken in at.seconds.items()
        if name not in ("helix", *ALONE)
    }
    n = settings.microbatches
    middle = {name: median(taken) for name, taken in at.seconds.items()}
    compute = median(at.work["compute"])  # of a GPU these are seconds by the clock
    perfect = max(compute + free.work_s, middle["communication"])
    bound = median(single) / n + (n - 1) / n * perfect
    gain = middle["single"] - bound
    ways = {}
    for name, way in at.plan["ways"].items():
        predicted = (way["sequential_us"] + (n - 1) * way["predicted_us"]) / 1e6
        ways[name] = {
            "policy": way["policy"],
            "same_as": way["same_as"],
            "hidden_share": (middle["single"] - middle[name]) / gain if gain > 0 else 1.0,
            "predicted_s": predicted,
            "prediction_error": predicted / middle[name] - 1,
            "predicted_hidden_share": hidden(way),
        }
    summary = {
        "rate_mbit": at.rate_mbit,
        "communication_of_compute": middle["communication"] / compute,
        "unlimited_work_s": free.work_s,
        "bound_s": bound,
        "bound_speedup": middle["single"] / bound,
        "processor_s": {name: median(taken) for name, taken in at.work.items()},
        "single_predicted_s": n * at.plan["ways"]["helix"]["sequential_us"] / 1e6,
        "profile_s": at.plan["profile_s"],
        "collectives_us": at.plan["times"],
        "ways": ways,
    }
    return spreads, summary


def hidden(way: dict[str, Any]) -> float:
    most = way["sequential_us"] - way["bound_us"]
    return (way["sequential_us"] - way["predicted_us"]) / most if most > 0 else 1.0


def measure_memory(settings: Settings, layers: Sequence[int]) -> dict[str, dict[str, float]]:
    """Peak bytes of live tensors with one strand and two, by number of layers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = [stack.enter_context(open(folder / f"rank{host}", "w+")) for host in range(HOSTS)]
        ranks = Ranks(
            stack.enter_context(Network(HOSTS)),
            settings,
            logs,
            own_cores(),
        )
        found: dict[str, dict[str, float]] = {}
        for count in layers:
            answers = ranks.ask("memory", layers=count)
            single, woven = (max(answer[name] for answer in answers) for name in ("single", "helix"))
            found[str(count)] = {"single_bytes": single, "woven_bytes": woven, "ratio": woven / single}
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt-tp", choices=MODELS)
    parser.add_argument("--layers", type=int, nargs="+", default=[2], help="number of layers; with --memory: several numbers")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--seq-len", type=int, default=64, help="tokens of a sequence on each rank")
    parser.add_argument("--batch", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="how often each variant is measured")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="communication time as a share of compute time"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, one share and two rounds, as a check that it works")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: both ranks on one GPU (gpt-tp only)")
    parser.add_argument(
        "--trace", type=Path, default=None, help="write one step of the variant helix to this file, as a Chrome trace"
    )
    add_json(parser)


QUICK = {"layers": 1, "dim": 512, "seq_len": 128, "microbatches": 3, "rounds": 2, "shares": (1.0,)}


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises ConfigError for settings that cannot work."""
    given = {key: getattr(args, key) for key in ("model", "dim", "seq_len", "batch", "microbatches", "rounds", "device")}
    given |= {"layers": args.layers[0], "shares": tuple(args.shares)}
    if args.quick:
        given |= QUICK
    settings = Settings(**given)
    check_least(settings, layers=1, seq_len=1, batch=1, microbatches=2, rounds=2)
    if settings.dim < 64 or settings.dim % 64:
        raise ConfigError("--dim", settings.dim, "must be a multiple of 64")
    if settings.seq_len % 4:
        raise ConfigError("--seq-len", settings.seq_len, "must be a multiple of 4")
    if any(not share > 0 for share in settings.shares):
        raise ConfigError("--shares", min(settings.shares), "must be above 0")
    if not args.memory and len(args.layers) > 1:
        raise ConfigError("--layers", args.layers, "takes several values with --memory only")
    if settings.device == "cuda" and settings.model != "gpt-tp":
        raise ConfigError("--model", settings.model, "must be gpt-tp with --device cuda: Gloo has no other collective there")
    if settings.device == "cuda" and not gpu_here():
        raise ConfigError("--device", "cuda", "needs a GPU, and PyTorch sees none here")
    return settings


def gpu_here() -> bool:
    import torch

    return torch.cuda.is_available()


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError before anything starts: settings, or what the machine lacks."""
    settings = settings_of(args)
    if (lack := machine.lacking()) is not None:
        raise ConfigError("bench", "strands", str(lack))
    own_cores()
    if args.memory:
        return run_memory(settings, args)
    loads = [os.getloadavg()[0]]
    free, found = measure(settings, args.trace)
    loads.append(os.getloadavg()[0])
    spreads: dict[str, Spread] = {}
    summaries = {}
    print(f"strands, {settings.model}, {settings.layers} layers of {settings.dim}, {settings.microbatches} micro-batches")
    print(f"load of the machine before {loads[0]:.1f}, after {loads[1]:.1f} (two ranks alone make 2 at most)")
    for at in found:
        here, summary = figures(settings, free, at)
        spreads |= {f"{at.share:g}/{name}": spread for name, spread in here.items()}
        summaries[f"{at.share:g}"] = summary
        show(at, here, summary)
    write(args.json, "strands", asdict(settings), spreads, unlimited=asdict(free), shares=summaries, load=loads)
    return 0


def run_memory(settings: Settings, args: argparse.Namespace) -> int:
    found = measure_memory(settings, args.layers if not args.quick else [settings.layers])
    print(f"strands, {settings.model}, peak of live tensors besides parameters, MiB")
    for layers, row in found.items():
        single, woven = row["single_bytes"] / 2**20, row["woven_bytes"] / 2**20
        print(f"  {layers:>3} layers: one strand {single:.1f}, two {woven:.1f}, ratio {row['ratio']:.4f}")
    alike = {key: value for key, value in settings.shape.items() if key not in ("model", "layers")}
    write(args.json, "strands-memory", alike, {}, memory={**other_models(args.json, alike), settings.model: found})
    return 0


def other_models(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The memory of other models that the file has from runs with the same settings."""
    written = json.loads(path.read_text()) if path is not None and path.exists() else {}
    return dict(written["memory"]) if written.get("settings") == settings else {}


def show(at: Measured, spreads: dict[str, Spread], summary: dict[str, Any]) -> None:
    print(f"communication {summary['communication_of_compute']:.2f} of compute, at {at.rate_mbit:.0f} Mbit/s: seconds per step")
    for name in at.seconds:
        way = summary["ways"].get(name)
        said = ""
        if way is not None:
            said = f"   hidden {way['hidden_share']:.0%}, predicted {way['predicted_s']:.3f} ({way['prediction_error']:+.0%})"
            said += f", as {way['same_as']}" if way["same_as"] else ""
        print(f"  {name:14} {spreads[f'{name}_s']}{said}")
    print(f"  {'bound':14} {summary['bound_s']:.4g}, {summary['bound_speedup']:.2f} times as fast as a single strand")
    for name in spreads:
        if name.startswith("helix_over_"):
            print(f"  {name:24} {spreads[name]}")
