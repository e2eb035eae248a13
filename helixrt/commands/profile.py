"""`helixrt profile overlap`: which operators hide behind which on this machine (DHelix, Figure 4).

In: the command's arguments; where RANK and WORLD_SIZE are set (torchrun, `helixrt lab net run`), the ranks there are,
else some processes of its own on this machine. Out: an exit code; the first rank prints the table or JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # now: loaded while there is a group, it keeps that to the end
import torch.multiprocessing as multiprocessing

from helixrt.collectives.gloo_groups_private import one_gloo_worker
from helixrt.commands import output
from helixrt.commands.problem import whole
from helixrt.errors import ConfigError
from helixrt.passes.overlap_table import Sizes, Table, overlap_table
from helixrt.passes.profile_cache import Setting

FORMATS = ("text", "json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SIZES = {"cpu": ("512", "512", "8", "float32"), "cuda": ("8192", "8192", "64", "bfloat16")}
BUSY = 0.25  # share of the cores at work before that makes figures doubtful
DEADLINE = timedelta(minutes=5)
EPILOG = """Alone, two processes on this machine measure what is inside it. For links between hosts start it on each of them:
torchrun ... -m helixrt.cli profile overlap, or helixrt lab net run --rate 1gbit -- helixrt profile overlap."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    kinds = parser.add_subparsers(dest="profile", metavar="KIND", required=True)
    summary = (
        "overlap effectiveness factors of matrix products, attention, collectives, and a GPU's copies to and from the host"
    )
    overlap = kinds.add_parser("overlap", help=summary, description=summary, epilog=EPILOG)
    overlap.add_argument("--device", metavar="cpu|cuda", help="default: cuda if every process has a GPU of its own")
    overlap.add_argument(
        "--processes",
        metavar="N",
        help="processes to start on this machine (default 2; 1, with --device cuda: no collectives); not under torchrun",
    )
    overlap.add_argument("--tokens", metavar="N", help="tokens of a micro-batch (default: 512, on a GPU 8192)")
    overlap.add_argument("--hidden", metavar="N", help="hidden size (default: 512, on a GPU 8192)")
    overlap.add_argument("--heads", metavar="N", help="attention heads (default: 8, on a GPU 64)")
    overlap.add_argument("--dtype", metavar="TYPE", help=f"{', '.join(DTYPES)} (default: float32, on a GPU bfloat16)")
    output.add_arguments(overlap, FORMATS)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say. Returns 0; raises ConfigError for what they get wrong."""
    form = output.chosen_format(args, FORMATS)
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if started and args.processes is not None:
        raise ConfigError("--processes", args.processes, "must not be given where RANK and WORLD_SIZE are set")
    given = os.environ["WORLD_SIZE"] if started else args.processes or "2"
    least = 1 if args.device == "cuda" else 2
    processes = whole("WORLD_SIZE" if started else "--processes", given, least=least) or 2
    device = _device(args.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else processes)
    sizes = _sizes(args, device)
    if started:
        found = _measured(int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), processes, device, sizes, None)
    else:
        with tempfile.TemporaryDirectory(prefix="helixrt-profile-") as folder:
            multiprocessing.spawn(_process, (processes, device, sizes, folder), nprocs=processes)
            found = json.loads(Path(folder, "table.json").read_text(encoding="utf-8"))
    if found is not None:
        output.put(args, json.dumps(found, indent=1) + "\n" if form == "json" else _text(found))
    return 0


def _device(asked: str | None, local: int) -> str:
    """cpu or cuda; `local` processes of this machine need a GPU each, since NCCL refuses to share one."""
    cards = torch.cuda.device_count()
    if asked not in (None, "cpu", "cuda"):
        raise ConfigError("--device", asked, "must be cpu or cuda")
    if asked == "cuda" and cards < local:
        raise ConfigError("--device", asked, f"needs a GPU for each of {local} processes; this machine has {cards}")
    return asked or ("cuda" if cards >= local else "cpu")


def _sizes(args: argparse.Namespace, device: str) -> Sizes:
    tokens, hidden, heads, dtype = SIZES[device]
    if args.dtype is not None and args.dtype not in DTYPES:
        raise ConfigError("--dtype", args.dtype, f"must be one of {', '.join(DTYPES)}")
    numbers = {"tokens": args.tokens or tokens, "hidden": args.hidden or hidden, "heads": args.heads or heads}
    return Sizes(**{key: whole(f"--{key}", text) or 0 for key, text in numbers.items()}, dtype=DTYPES[args.dtype or dtype])


def _process(rank: int, processes: int, device: str, sizes: Sizes, folder: str) -> None:
    """One of the processes on this machine; each has its share of the cores."""
    if device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // processes)
        own = {cores[(rank * share + at) % len(cores)] for at in range(share)}
        os.sched_setaffinity(0, own)
        torch.set_num_threads(len(own))
    found = _measured(rank, rank, processes, device, sizes, folder)
    if found is not None:
        Path(folder, "table.json").write_text(json.dumps(found), encoding="utf-8")


def _measured(rank: int, local: int, processes: int, device: str, sizes: Sizes, folder: str | None) -> dict[str, Any] | None:
    """The table on the first rank, None on the others. Without `folder`, ranks connect through MASTER_ADDR."""
    place = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    store = None if folder is None else dist.FileStore(str(Path(folder, "store")), processes)
    backend = "nccl" if device == "cuda" else "gloo"
    one_gloo_worker()
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=DEADLINE)
    busy = os.getloadavg()[0]
    try:
        table = overlap_table(sizes, place)
        return _json(table, Setting.here(place, processes), backend, busy) if rank == 0 else None
    finally:
        dist.destroy_process_group()


def _json(table: Table, setting: Setting, backend: str, busy: float) -> dict[str, Any]:
    operators = zip(table.operators, table.what, table.alone_us, strict=True)
    return {
        "machine": asdict(setting),
        "cores": os.cpu_count(),
        "busy_cores": busy,
        "backend": backend,
        "ranks_per_host": list(table.ranks_per_host),
        "operators": [{"name": name, "what": what, "alone_us": alone} for name, what, alone in operators],
        "pairs": [
            {"first": one, "second": other, "effectiveness": pair.effectiveness, **asdict(pair)}
            for (one, other), pair in table.pairs.items()
        ],
    }


def _text(found: dict[str, Any]) -> str:
    machine, hosts = found["machine"], found["ranks_per_host"]
    names = [row["name"] for row in found["operators"]]
    factors = {(p["first"], p["second"]): p["effectiveness"] for p in found["pairs"]}
    where = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    processes = "1 process" if machine["ranks"] == 1 else f"{machine['ranks']} processes"
    threads = f", {machine['threads']} of {found['cores']} cores each" if found["backend"] == "gloo" else ""
    versions = f"{found['backend']}, torch {machine['torch_version']}"
    lines = [
        f"{machine['device']}: {processes} on {where}{threads}, {versions}",
        "overlap effectiveness factor: 1 when the shorter one is hidden, 0 when both take as long as one after the other",
        "",
    ]
    rows = [("", "alone ms", *names)]
    for row in found["operators"]:
        cells = [f"{factors[row['name'], other]:.2f}" if (row["name"], other) in factors else "" for other in names]
        rows.append((row["name"], f"{row['alone_us'] / 1e3:.3f}", *cells))
    lines += [*output.table(rows), ""]
    lines += [f"{row['name']}: {row['what']}" for row in found["operators"]]
    if hosts == [1]:
        lines.append("one process: no communication is measured")
    elif len(hosts) == 1:
        lines.append("all processes are on one host, so that nothing is measured between hosts")
    if found["busy_cores"] > BUSY * found["cores"]:
        lines.append(f"other programs kept {found['busy_cores']:.1f} of {found['cores']} cores busy before: figures are noisy")
    return "\n".join(lines) + "\n"
