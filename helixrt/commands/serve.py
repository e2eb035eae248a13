"""`helixrt serve --replicas N`: serve a run whose replicas are started by torchrun, Slurm or by hand.

In: how many replicas of how many ranks, where the run's folder goes (or which run is resumed), the settings of the runtime.
Out: the variables that each replica's processes need; then the run's store, membership, metrics and report, until the run has
ended. Exit code 0 if it ended well.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from helixrt.errors import ConfigError

if TYPE_CHECKING:
    from helixrt.job.config import JobConfig
    from helixrt.job.served import ServedDriver

SHORTEST_SECRET = 16
AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replicas", type=int, required=True, metavar="N", help="number of replicas of the run")
    add("--pp", type=int, default=1, help="pipeline stages of a replica, as in the programs' Mesh")
    add("--dp-shard", type=int, default=1, help="ranks over which a replica shards its parameters, as in the programs' Mesh")
    add("--cp", type=int, default=1, help="ranks over which a replica divides sequences, as in the programs' Mesh")
    add("--tp", type=int, default=1, help="ranks over which a replica divides matrices, as in the programs' Mesh")
    add(
        "--storage",
        type=Path,
        default=Path("outputs"),
        help="the run's folder is made here; all machines must share this folder",
    )
    add("--name", default="run", help="name of the run")
    add("--resume", default="", metavar="RUN_FOLDER|latest", help="go on with a served run, from its newest checkpoint")
    add(
        "--host",
        default=AUTO,
        help="the address of this machine that the servers bind to, and replicas connect to; auto: in a Slurm job of several "
        "machines that on the way to the others, else loopback",
    )
    add("--port", type=int, default=0, help="port of the run's store; 0: any free port")
    add("--membership", default="auto", help="decides which replicas take part: auto, torchft or store (without torchft)")
    add(
        "--step-timeout-s",
        type=float,
        default=60.0,
        help="upper limit for a step of a healthy replica; other timeouts are derived from it",
    )
    add("--heartbeat-s", type=float, default=0.0, help="heartbeat of the membership; 0: derived from the step timeout")
    add("--checkpoint-every", type=int, default=50, help="steps between two checkpoints; 0: none")
    add(
        "--checkpoint-path",
        default="",
        metavar="ADDRESS",
        help="s3://BUCKET/FOLDER or another fsspec address; default: the run's folder",
    )
    add("--transport", default="auto", metavar="KIND", help="between replicas: auto, tcp, shared_memory or verbs")
    add(
        "--rails",
        nargs="+",
        default=(),
        metavar="NIC",
        help="network interfaces or RDMA devices between replicas, the default first; a|b: a for replica 0, b for replica 1, "
        "in turn; default: the interface that leads to the run's store, and every active RDMA port",
    )
    add("--restarts", type=int, default=100, help="how often a replica may be started again without a commit")
    add("--fatal-restarts", type=int, default=2, help="how many of these may follow an exception of one of its processes")
    add("--wait-s", type=float, default=1800.0, help="how long to wait for a replica that is not started, or not started again")
    add(
        "--secret-file",
        type=Path,
        help="file with the run's secret; default: HELIXRT_SECRET, else a new file in the run's folder",
    )


def run(args: argparse.Namespace) -> int:
    from helixrt.job.hosts import unreachable
    from helixrt.job.served import serve

    config = _config(args)
    if why := unreachable(config.host, os.environ):
        print(f"helixrt: warning: {why}", file=sys.stderr, flush=True)
    given = _given_secret(args.secret_file)
    secret = given or secrets.token_hex(32)
    return serve(config, secret, args.wait_s, lambda driver: _say(driver, args, given), args.resume)


def _config(args: argparse.Namespace) -> JobConfig:
    from helixrt.job.config import CheckpointConfig, JobConfig, MeshConfig, OutputConfig, TransportConfig
    from helixrt.job.hosts import serving_host
    from helixrt.job.mesh import Mesh
    from helixrt.job.rules import check_address
    from helixrt.job.services import membership_kind
    from helixrt.job.stored_path import check_storage
    from helixrt.timeouts import derive
    from helixrt.transport.auto import check_transport

    for key in ("replicas", "restarts", "fatal_restarts", "checkpoint_every"):
        least = 1 if key == "replicas" else 0
        if getattr(args, key) < least:
            raise ConfigError(key, getattr(args, key), f"must be at least {least}")
    mesh = Mesh(args.pp, args.dp_shard, args.cp, args.tp)
    mesh.check_supported()
    if not args.wait_s > 0:
        raise ConfigError("wait_s", args.wait_s, "must be above 0")
    derive(args.step_timeout_s, args.heartbeat_s)
    config = JobConfig(
        name=args.name,
        launcher="environment",
        step_timeout_s=args.step_timeout_s,
        heartbeat_s=args.heartbeat_s,
        restarts=args.restarts,
        fatal_restarts=args.fatal_restarts,
        membership=args.membership,
        host=serving_host(args.host, os.environ),
        port=args.port,
        mesh=MeshConfig(args.replicas, mesh.pp, mesh.dp_shard, mesh.cp, mesh.tp),
        checkpoint=replace(CheckpointConfig(), every=args.checkpoint_every, path=args.checkpoint_path),
        transport=TransportConfig(kind=args.transport, rails=tuple(args.rails)),
        output=OutputConfig(str(args.storage.resolve())),
    )
    check_storage("checkpoint_path", args.checkpoint_path)
    membership_kind(config)
    check_transport(config.transport.kind, "transport")
    check_address(config.host, config.port)
    return config


def _given_secret(file: Path | None) -> str:
    if file is not None:
        try:
            secret = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError("secret-file", file, f"cannot be read: {why}") from error
    else:
        secret = os.environ.get("HELIXRT_SECRET", "")
        if not secret:
            return ""
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError("secret", "...", f"must have at least {SHORTEST_SECRET} characters")
    return secret


def _say(driver: ServedDriver, args: argparse.Namespace, given: str) -> None:
    """Print what a replica's process needs; the secret itself is in a file or in a variable that the user set."""
    from helixrt.job.hosts import is_loopback

    print(f"serving run {driver.run_.name} in {driver.run_.folder}; start each replica with")
    alone = "  # for replicas on other machines: --host ADDRESS" if is_loopback(driver.config.host) else ""
    print(f"  export HELIXRT_STORE={driver.address}{alone}")
    if not given:
        file = driver.run_.folder / "secret"
        file.unlink(missing_ok=True)  # of the life before, if the run is resumed
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
            written.write(driver.secret + "\n")
        print(f"  export HELIXRT_SECRET_FILE={shlex.quote(str(file))}")
    elif args.secret_file is not None:
        print(f"  export HELIXRT_SECRET_FILE={shlex.quote(str(args.secret_file.resolve()))}")
    else:
        print("  HELIXRT_SECRET as it is set here")
    numbers = "0" if args.replicas == 1 else f"0 ... {args.replicas - 1}"
    ranks = args.pp * args.dp_shard * args.cp * args.tp
    processes = f", of {ranks} processes each (torchrun --nproc-per-node {ranks})" if ranks > 1 else ""
    print(f"  export HELIXRT_REPLICA=R  # {numbers}, another one for each replica{processes}", flush=True)
