"""Two replicas as processes on one GPU, one of which is killed and rejoins, compared with DistributedDataParallel over Gloo.

A GPT of over 100M parameters in bfloat16 (autocast), random tokens, AdamW, clipping. A block of the other sides, the session,
and the other block again, each in two processes on the same GPU: the loop without any exchange (`plain`) and with
DistributedDataParallel (`ddp`, which ends with the loss of a process), and `helixrt.run`, whose replica 1 ends by SIGKILL.
Both processes share the GPU, its memory and its bus, and their kernels take turns; NCCL does not connect two ranks of one GPU.
At last a session of one replica and the plain loop, both in one process that has the GPU to itself (`one`, `one_plain`).
All sides start from the same weights and see the same batches; the losses of their first steps must agree, else there is no
figure.

A step's time is from one update to the next on the device. Steps of the survivor are `before` the loss, `alone`, `catching_up`
(the other replica is back in the quorum, fetches the state and adds zeros) and `after` its first contribution. `hidden` is the
share of a step's gradients, in bytes, that were exchanged before the device was done with backward. Peak memory is that of
torch's allocator. `--device cpu` runs the same without a GPU, for a look at the benchmark itself.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from helixrt.bench._arguments import add_json, add_model, check_least
from helixrt.bench._cuda_session_rank import KILLED, REPLICAS, Commit, RankFigures, Settings, other_side, train, train_one
from helixrt.bench._figures import Spread, print_spreads, write
from helixrt.errors import ConfigError, Fatal
from helixrt.job.config import CatchupConfig, JobConfig
from helixrt.job.launch import RunOptions
from helixrt.job.launch import run as run_session
from helixrt.record import Event, Kind, read_events
from helixrt.replica.store import host_store
from helixrt.train.config import ModelConfig

TOLERANCES = {"float32": 1e-3, "bfloat16": 1e-2}  # of losses, relative: sums in another order
_WARM = 3  # steps at the beginning, and after a change of the number of replicas, that are not counted
_MEMORY_GB = 24.0  # of host memory per rank, for catch-up


@dataclass(frozen=True)
class Loss:
    """What the loss of a replica and its return took. None: it was not back in time."""

    next_commit_s: float  # from the kill to the survivor's next update
    rejoined_s: float | None  # to the first update with the other replica's gradient
    snapshot_s: float  # the longest of the survivor, for the other one to fetch
    fetched_bytes: int
    fetch_s: float
    steps_alone: int


def measure_other(settings: Settings, name: str) -> dict[str, list[RankFigures]]:
    """A block of both other sides."""
    server, address = host_store("127.0.0.1")
    mp.spawn(other_side, (settings, address, name), nprocs=REPLICAS)
    del server
    folder = Path(settings.folder)
    return {
        side: [RankFigures.read(folder / f"{name}.{side}{rank}.json") for rank in range(REPLICAS)] for side in ("plain", "ddp")
    }


def measure_session(settings: Settings) -> tuple[list[RankFigures], Path]:
    """The figures of both ranks, and the run's folder."""
    folder = _run(settings, train, REPLICAS)
    return [RankFigures.read(Path(settings.folder, f"session{replica}.json")) for replica in range(REPLICAS)], folder


def measure_one(settings: Settings) -> dict[str, RankFigures]:
    """A session of one replica, and the plain loop."""
    _run(settings, train_one, 1)
    return {side: RankFigures.read(Path(settings.folder, f"one.{side}.json")) for side in ("session", "plain")}


def _run(settings: Settings, function: Callable[..., None], replicas: int) -> Path:
    with open(Path(settings.folder, "console.txt"), "w") as console, contextlib.redirect_stdout(console):
        return run_session(
            function,
            replicas=replicas,
            storage=settings.folder,
            seed=3,
            device=settings.device,
            dtype=settings.dtype,
            launcher="local",
            arguments={"settings": asdict(settings)},
            options=RunOptions(checkpoint_every=0, base=JobConfig(catchup=CatchupConfig(memory_gb=_MEMORY_GB))),
        ).folder


def check_alike(own: Sequence[float], other: Sequence[float], dtype: str) -> None:
    """Raises Fatal if the losses of two sides differ in a step that both have."""
    tolerance = TOLERANCES[dtype]
    for step, (mine, theirs) in enumerate(zip(own, other, strict=False), 1):
        if not math.isclose(mine, theirs, rel_tol=tolerance):
            raise Fatal(f"all sides must train alike, but the losses of step {step} are {mine} and {theirs}")


def step_ms(commits: Sequence[Commit]) -> list[float]:
    """From one update to the next, of steps that follow each other."""
    pairs = zip(commits, commits[1:], strict=False)
    return [1e3 * (b.committed_s - a.committed_s) for a, b in pairs if b.step == a.step + 1]


def phases(commits: Sequence[Commit], kill_at: int, behind: Collection[int]) -> dict[str, list[Commit]]:
    """The counted steps of the survivor: before the loss, alone, with the other one `behind` (in these steps), with both."""
    less = [c for c in commits if c.step > kill_at and c.replicas < REPLICAS]
    last = max((c.step for c in less), default=kill_at)
    found = {
        "before": [c for c in commits if c.step <= kill_at],
        "alone": [c for c in less if c.step not in behind],
        "catching_up": [c for c in less if c.step in behind],
        "after": [c for c in commits if c.step > last],
    }
    return {name: steps if name == "catching_up" else steps[_WARM:] for name, steps in found.items()}


def loss_of(
    commits: Sequence[Commit], killed_s: float, kill_at: int, survivor: Sequence[Event], fetches: Sequence[Event]
) -> Loss:
    """Raises Fatal if the survivor made no step after the kill."""
    later = [c for c in commits if c.step > kill_at]
    if not later:
        raise Fatal("the surviving replica made no update after the other one was killed")
    back = next((c for c in later if c.replicas == REPLICAS), None)
    nbytes = sum(int(event.detail["bytes"]) for event in fetches)
    took_s = sum(event.end_s - event.begin_s for event in fetches)
    alone = sum(c.replicas < REPLICAS for c in later)
    rejoined_s = None if back is None else back.committed_s - killed_s
    snapshot_s = max((e.end_s - e.begin_s for e in survivor if e.kind is Kind.SNAPSHOT), default=0.0)
    return Loss(later[0].committed_s - killed_s, rejoined_s, snapshot_s, nbytes, took_s, alone)


def hidden_shares(commits: Sequence[Commit], buckets: Sequence[Event]) -> list[float]:
    """Of each step, the share of its bytes whose exchange had ended when backward had."""
    of_step: dict[int, list[Event]] = {}
    for event in buckets:
        of_step.setdefault(event.step, []).append(event)
    shares = []
    for commit in commits:
        found = of_step.get(commit.step, [])
        total = sum(event.detail["bytes"] for event in found)
        if total:
            shares.append(sum(event.detail["bytes"] for event in found if event.end_s <= commit.backward_s) / total)
    return shares


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, batch=8, of="replica and step")
    parser.set_defaults(layers=12, dim=896, seq_len=1024)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="the compute type, by autocast")
    parser.add_argument("--kill-at", type=int, default=18, help="the step after which a replica is killed")
    parser.add_argument("--after", type=int, default=14, help="steps of both replicas behind its return")
    parser.add_argument(
        "--limit-s", type=float, default=40.0, help="the session ends so long after its first step at the latest"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps in a block of the other sides")
    parser.add_argument("--steps-one", type=int, default=30, help="steps of the session of one replica, and of its plain loop")
    parser.add_argument("--part", default="all", choices=("all", "pair", "one"), help="two replicas and a loss, or one replica")
    parser.add_argument("--blocks", type=int, default=2, choices=(1, 2), help="of the other sides; 1: only before the session")
    add_json(parser)


@dataclass
class Found:
    """What the benchmark prints and writes: `spreads` by name, `more` figures, lines of text."""

    spreads: dict[str, Spread] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError without a GPU, and for settings that cannot work."""
    check_least(args, **dict.fromkeys(("kill_at", "after", "steps", "steps_one"), _WARM + 3))
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda", "needs a CUDA GPU, and PyTorch sees none here")
    model = ModelConfig("gpt", args.layers, args.dim, heads=max(1, args.dim // 64), ffn=4 * args.dim)
    of_settings = {each.name for each in fields(Settings)} & set(vars(args))
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(folder=folder, model=model, **{name: getattr(args, name) for name in of_settings})
        if args.part in ("all", "pair"):
            _pair(settings, args.blocks, found)
        if args.part in ("all", "one"):
            _one(settings, found)
        given: dict[str, Any] = {**asdict(settings), "blocks": args.blocks, "part": args.part}
        del given["folder"]
    print_spreads(found.spreads)
    for name, text in found.lines:
        print(f"  {name:30} {text}")
    write(args.json, "cuda_session", given, found.spreads, versions={"cuda": torch.version.cuda}, **found.more)
    return 0


def _pair(settings: Settings, blocks_of_others: int, found: Found) -> None:
    """Two replicas, the loss of one, and the other sides."""
    with _told("plain and DDP"):
        blocks = [measure_other(settings, "first")]
    with _told("session of two replicas"):
        ranks, run_folder = measure_session(settings)
    if blocks_of_others == 2:
        with _told("plain and DDP again"):
            blocks.append(measure_other(settings, "second"))
    for block in blocks:
        together = [sum(losses) / REPLICAS for losses in zip(*(figures.losses for figures in block["ddp"]), strict=True)]
        check_alike(ranks[0].losses, together, settings.dtype)
    flight = run_folder / "flight"
    fetches = [e for e in read_events(flight / f"r{KILLED}.pp0.inc1.story.jsonl") if e.kind is Kind.FETCH_END]
    survivor = [event for file in sorted(flight.glob("r0.pp0.inc0.*jsonl")) for event in read_events(file)]
    commits = ranks[0].commits
    behind = {event.step for event in survivor if event.kind is Kind.QUORUM and event.detail["behind"]}
    counted = phases(commits, settings.kill_at, behind)
    loss = loss_of(commits, float(Path(settings.folder, "killed").read_text()), settings.kill_at, survivor, fetches)
    buckets = [event for event in survivor if event.kind is Kind.EXCHANGE_BUCKET]
    times = {name: step_ms(steps) for name, steps in counted.items()}
    for side in ("plain", "ddp"):
        times[side] = [ms for block in blocks for ms in step_ms(block[side][0].commits[_WARM:])]
    both = [*counted["before"], *counted["after"]]
    found.spreads |= {f"step_{name}_ms": Spread.of(values) for name, values in times.items() if len(values) > 1}
    found.spreads["backward_to_update_ms"] = Spread.of([1e3 * (c.committed_s - c.backward_s) for c in both])
    if len(shares := hidden_shares(both, buckets)) > 1:
        found.spreads["hidden_share"] = Spread.of(shares)
    plain, ddp = (max(figures.peak_bytes for block in blocks for figures in block[side]) for side in ("plain", "ddp"))
    peaks = {"session": max(figures.peak_bytes for figures in ranks), "plain": plain, "ddp": ddp}
    ratio = found.spreads["step_ddp_ms"].p50 / found.spreads["step_before_ms"].p50
    found.more |= {"parameters": ranks[0].parameters, "loss": asdict(loss), "peak_bytes": peaks, "ddp_to_session": ratio}
    back = "not in time" if loss.rejoined_s is None else f"{loss.rejoined_s:.2f} s"
    rate = loss.fetched_bytes / loss.fetch_s / 1e9 if loss.fetch_s else 0.0
    found.lines += [
        ("replicas", f"{REPLICAS}, processes on one device, of {ranks[0].parameters / 1e6:.1f}M parameters"),
        ("kill to next update", f"{loss.next_commit_s:.3f} s of the survivor"),
        ("kill to first contribution", f"{back}, with {loss.steps_alone} updates of the survivor alone"),
        ("fetched", f"{loss.fetched_bytes / 1e6:.1f} MB in {loss.fetch_s:.2f} s, {rate:.2f} GB/s"),
        ("snapshot to be fetched", f"{loss.snapshot_s:.2f} s, beside training"),
        ("peak memory", ", ".join(f"{name} {peak / 1e9:.2f} GB" for name, peak in peaks.items())),
        ("DDP step / session step", f"{ratio:.2f}"),
    ]


def _one(settings: Settings, found: Found) -> None:
    """What a session costs where nothing is exchanged."""
    with _told("session of one replica"):
        one = measure_one(settings)
    check_alike(one["session"].losses, one["plain"].losses, settings.dtype)
    of_session, of_plain = (Spread.of(step_ms(one[side].commits[_WARM:])) for side in ("session", "plain"))
    found.spreads |= {"step_one_ms": of_session, "step_one_plain_ms": of_plain}
    cost_ms = of_session.p50 - of_plain.p50
    found.more["session_cost_ms"] = cost_ms
    found.lines.append(("one replica: session - plain", f"{cost_ms:.2f} ms a step"))


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Around a part that takes long: it is printed when it has ended."""
    began_s = time.monotonic()
    yield
    print(f"  {what:30} measured in {time.monotonic() - began_s:.0f} s", flush=True)
