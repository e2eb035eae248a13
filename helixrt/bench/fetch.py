"""How much a donor's step time grows while a peer fetches its state.

Donors are processes that do steps of matrix products; a process of its own fetches their state again and
again. Windows alternate in a random order: no fetch, a fetch at the job's pace, a fetch as fast as it
goes (what a plain file server beside the training would do). Donor and fetcher share this machine's
processors here, so what the fetcher itself uses counts against the donors when they leave it no core.
For machines that are busy otherwise there is a second figure: the growth of the processor time that a
donor's process spends per step, serving included. It is the step time's growth on a core of the donor's
own, but for what its threads wait for each other.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import Spread, write
from helixrt.errors import ConfigError, Retryable
from helixrt.replica.contracts import Shard, layout_of
from helixrt.replica.http_transport import HttpTransport

WINDOWS = ("idle", "paced", "unpaced")
_SECRET = "bench"
_OFFER = "state"
_START_S = 120.0
_SETTLE_S = 0.1  # after a window begins, steps are not counted: one may reach into the window before


@dataclass(frozen=True)
class Settings:
    donors: int
    megabytes: int
    size: int
    rounds: int
    window_s: float
    serve_cpu: float
    seed: int


@dataclass(frozen=True)
class Step:
    """A donor's step: when it began and ended, and the processor time its whole process had used by then."""

    begin_s: float
    end_s: float
    begin_cpu_s: float
    end_cpu_s: float

    @property
    def wall_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def cpu_s(self) -> float:
        return self.end_cpu_s - self.begin_cpu_s


@dataclass(frozen=True)
class Window:
    """A stretch of time (monotonic seconds, one clock for all processes) and how many bytes were fetched in it."""

    kind: str
    begin_s: float
    end_s: float
    nbytes: int
    fetches: int


class _WindowOver(Exception):
    """Ends a fetch at the end of its window."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cores = os.cpu_count() or 1
    parser.add_argument("--donors", type=int, default=max(1, min(2, cores - 1)), help="processes that train and serve")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the state")
    parser.add_argument("--size", type=int, default=384, help="a step multiplies square matrices of this size")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of three windows")
    parser.add_argument("--window", type=float, default=2.0, help="seconds per window")
    parser.add_argument(
        "--serve-cpu", type=float, default=0.0, help="cores that a donor may use for serving; 0: idle processor time"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of windows")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError for settings that cannot work, before anything starts."""
    settings = Settings(args.donors, args.megabytes, args.size, args.rounds, args.window, args.serve_cpu, args.seed)
    check_least(args, donors=1, megabytes=1, size=1, rounds=2, window=0.5)
    if settings.serve_cpu < 0:
        raise ConfigError("--serve-cpu", settings.serve_cpu, "must not be negative; as fast as it goes is measured anyway")
    steps, windows = measure(settings)

    of_kind = {kind: [w for w in windows if w.kind == kind] for kind in WINDOWS}
    step_ms = {kind: Spread.of([1000 * s.wall_s for w in of_kind[kind] for s in _steps_in(w, steps)]) for kind in WINDOWS}
    growth = {kind: Spread.of(_growth(kind, steps, windows, lambda s: s.wall_s)) for kind in WINDOWS[1:]}
    cpu_growth = {kind: Spread.of(_growth(kind, steps, windows, lambda s: s.cpu_s)) for kind in WINDOWS[1:]}
    rate = {kind: Spread.of([w.nbytes / (w.end_s - w.begin_s) / 1e6 for w in of_kind[kind]]) for kind in WINDOWS[1:]}
    for kind in WINDOWS:
        print(f"step time, {kind:8} {step_ms[kind]} ms")
    for kind in WINDOWS[1:]:
        print(f"growth,    {kind:8} {growth[kind]} %   fetching {rate[kind].p50:.0f} MB/s from {settings.donors} donor(s)")
        print(f"  of processor time {cpu_growth[kind]} %")
    spreads = {
        **{f"step_ms_{kind}": spread for kind, spread in step_ms.items()},
        **{f"growth_percent_{kind}": spread for kind, spread in growth.items()},
        **{f"cpu_growth_percent_{kind}": spread for kind, spread in cpu_growth.items()},
        **{f"fetch_megabytes_per_s_{kind}": spread for kind, spread in rate.items()},
    }
    write(args.json, "fetch", asdict(settings), spreads)
    return 0


def measure(settings: Settings) -> tuple[list[list[Step]], list[Window]]:
    """Every donor's steps, and the windows."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for _ in range(settings.donors):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_donate, args=(theirs, settings), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        addresses: list[dict[str, str]] = [_receive(pipe) for pipe in pipes]
        windows = _fetch_windows(settings, addresses)
        for pipe in pipes:
            pipe.send("stop")
        return [_receive(pipe) for pipe in pipes], windows
    finally:
        for process in processes:
            process.kill()
            process.join()


def _fetch_windows(settings: Settings, addresses: list[dict[str, str]]) -> list[Window]:
    rng = random.Random(settings.seed)
    fetcher = HttpTransport(_SECRET)
    layout = _layout(settings)
    windows = []
    try:
        for _ in range(settings.rounds):
            for kind in rng.sample(WINDOWS, len(WINDOWS)):
                begin_s = time.monotonic()
                nbytes = fetches = 0

                def count(shard: Shard, donor: str, ok: bool) -> None:
                    nonlocal nbytes
                    if time.monotonic() >= begin_s + settings.window_s:  # noqa: B023 called in this round alone
                        raise _WindowOver
                    nbytes += shard.nbytes if ok else 0

                while (left_s := begin_s + settings.window_s - time.monotonic()) > 0:
                    if kind == "idle":
                        time.sleep(left_s)
                        continue
                    try:
                        fetcher.fetch(_OFFER, layout, [a[kind] for a in addresses], _START_S, count)
                        fetches += 1
                    except _WindowOver:
                        break  # in the middle of a fetch
                windows.append(Window(kind, begin_s, begin_s + settings.window_s, nbytes, fetches))
    finally:
        fetcher.close()
    return windows


def _steps_in(window: Window, steps: list[list[Step]]) -> list[Step]:
    """All donors' steps that lie in the window."""
    return [s for donor in steps for s in donor if s.begin_s >= window.begin_s + _SETTLE_S and s.end_s <= window.end_s]


def _growth(kind: str, steps: list[list[Step]], windows: list[Window], cost: Callable[[Step], float]) -> list[float]:
    """Per round, by how many percent the mean cost of a step in a `kind` window is above the round's idle one's."""
    percents = []
    for first in range(0, len(windows), len(WINDOWS)):
        of_round = {w.kind: _steps_in(w, steps) for w in windows[first : first + len(WINDOWS)]}
        if all(of_round.values()):
            means = {name: sum(map(cost, taken)) / len(taken) for name, taken in of_round.items()}
            percents.append(100 * (means[kind] / means["idle"] - 1))
    if len(percents) < 2:
        raise Retryable("the donors got hardly a step done; use longer windows or smaller matrices")
    return percents


def _state(settings: Settings) -> dict[str, torch.Tensor]:
    """Shards of an eighth of a megabyte (2**20 bytes)."""
    return {f"shard{i}": torch.full((1 << 15,), float(i)) for i in range(8 * settings.megabytes)}


def _layout(settings: Settings) -> tuple[Shard, ...]:
    return layout_of(_state(settings))


def _donate(pipe: Connection, settings: Settings) -> None:
    """A donor's process: offers its state at both paces and does steps until the request to stop."""
    torch.set_num_threads(1)
    state = _state(settings)
    paced, unpaced = HttpTransport(_SECRET, serve_cpu=settings.serve_cpu), HttpTransport(_SECRET, serve_cpu=math.inf)
    for transport in (paced, unpaced):
        transport.offer(_OFFER, state)
    left, right = torch.randn(2, settings.size, settings.size).unbind()
    out = torch.empty_like(left)
    products = _products_per_step(left, right, out)
    pipe.send({"paced": paced.address, "unpaced": unpaced.address})
    steps: list[Step] = []
    while not pipe.poll():
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        for _ in range(products):
            torch.mm(left, right, out=out)
        steps.append(Step(begin_s, time.monotonic(), begin_cpu_s, time.process_time()))
    pipe.recv()
    pipe.send(steps)


def _products_per_step(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, step_s: float = 0.02) -> int:
    taken = []
    for _ in range(20):
        begin_s = time.monotonic()
        torch.mm(left, right, out=out)
        taken.append(time.monotonic() - begin_s)
    return max(1, round(step_s / median(taken)))


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(_START_S):
        raise Retryable(f"a donor's process did not answer within {_START_S:g} s")
    return pipe.recv()
