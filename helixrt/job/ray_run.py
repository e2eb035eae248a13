"""What a run on a Ray cluster needs before it begins: the connection, the address, shared storage, what a rank reserves.

In: the settings, where the driver runs. Out: the settings that hold in the cluster. With another launcher nothing happens.
"""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from helixrt.errors import ConfigError
from helixrt.job.session_config import SessionConfig
from helixrt.job.starters import starter
from helixrt.job.train_function import CODE_VARIABLE

NO_CODE = "none"
_STOP_VARIABLE, _STOP_S = "RAY_JOB_STOP_WAIT_TIME_S", 3.0  # of Ray: a variable of the job, and its default


@dataclass(frozen=True)
class Reserved:
    """What the cluster keeps for each rank."""

    cpus: float = 1.0
    gpus: float = 0.0


@contextmanager
def in_cluster(config: SessionConfig) -> Iterator[tuple[SessionConfig, Reserved]]:
    """Connected to the Ray cluster, where ranks are Ray actors: the settings with this node's address, and what a rank
    reserves. Raises MissingExtra without ray, ConfigError without a cluster, or for storage that its nodes do not share."""
    if config.launcher != "ray":
        yield config, Reserved()
        return
    from helixrt.ray_cluster.cluster import connected, node_address
    from helixrt.ray_cluster.storage import check_shared

    with connected(code_of(config)):
        if _is_loopback(config.host):
            config = replace(config, host=node_address())
        rank = _reserved(config)
        root = Path(config.output.root).resolve()
        root.mkdir(parents=True, exist_ok=True)
        check_shared(root, {"CPU": rank.cpus, "GPU": rank.gpus})
        yield config, rank


def code_of(config: SessionConfig) -> dict[str, Any] | None:
    """The `runtime_env` that brings the train function's folder to all nodes; None where a Ray job has brought its own, or
    nothing is to travel. Raises ConfigError (ray.code)."""
    if starter() == "Ray" or config.ray.code == NO_CODE:
        return None
    folder = config.ray.code or config.train.path
    if not folder:
        return None  # a module of an installed package
    path = Path(folder).resolve()
    if not path.is_dir():
        raise ConfigError("ray.code", folder, "is no folder; give the one that holds the program's modules, or none")
    from helixrt.ray_cluster.cluster import code_env

    env = code_env(str(path))
    with suppress(ValueError):  # elsewhere
        env["excludes"] += [str(Path(config.output.root).resolve().relative_to(path))]
    return {**env, "env_vars": {CODE_VARIABLE: str(path)}}


def stop_s() -> float:
    """How long Ray waits between SIGTERM and SIGKILL when it stops the job that this process is the driver of; else without
    limit."""
    return float(os.environ.get(_STOP_VARIABLE, _STOP_S)) if starter() == "Ray" else math.inf


def _reserved(config: SessionConfig) -> Reserved:
    from helixrt.ray_cluster.cluster import cluster_gpus

    gpus = config.ray.gpus
    if gpus < 0:
        gpus = 1.0 if config.device == "cuda" or (config.device == "auto" and cluster_gpus() > 0) else 0.0
    return Reserved(config.ray.cpus or float(config.threads), gpus)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
