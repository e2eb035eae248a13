"""The Ray cluster that this process belongs to: connects to it, finds this node's address, refuses unsafe clusters.

In: RAY_ADDRESS, and what travels to the nodes (`runtime_env`). Out: a connected process.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from helixrt.errors import ConfigError, MissingExtra

TOKEN_SINCE = (2, 52)  # the first version of Ray whose servers can ask for a token
# Of a folder that travels to the nodes: what no rank needs. Ray leaves out what .gitignore names as well.
EXCLUDES = (
    ".git", ".venv", "outputs", "benchmarks", "papers", "notebooks", "tests", "build", "dist", "__pycache__",
    ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".import_linter_cache", "*.egg-info",
)  # fmt: skip


def connect(runtime_env: Mapping[str, Any] | None = None, namespace: str | None = None) -> bool:
    """Connect this process to the cluster it belongs to (RAY_ADDRESS); False if it was connected.

    `runtime_env`: what every actor and task of this process gets on its node; not used in a process that a Ray job has
    started, whose own it has. Raises MissingExtra without ray, ConfigError (launcher) without a cluster, ConfigError (ray.code)
    for a folder that does not travel, such as one that is too large, ConfigError (ray) for
    a version whose servers cannot ask for a token, on an address that other machines reach.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "launcher=ray") from None
    ours = not ray.is_initialized()
    before = signal.getsignal(signal.SIGTERM)
    if ours:
        given: dict[str, Any] = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, namespace=namespace, **given)
        except ConnectionError:
            rule = "no Ray cluster is running here; start one with `ray start --head`, or set RAY_ADDRESS"
            raise ConfigError("launcher", "ray", rule) from None
        except ray.exceptions.RuntimeEnvSetupError as error:
            ray.shutdown()  # it is connected by then
            told = " ".join(str(error).split())
            size = re.search(r"Package size \(\S+\) exceeds the maximum size of [\d.]+\w+", told)
            how = "name what ranks do not need in its .gitignore, or set ray.code=none and have the code on all nodes"
            rule = f"cannot be copied to the nodes: {size[0] if size else told}; {how}"
            raise ConfigError("ray.code", (runtime_env or {}).get("working_dir"), rule) from error
    _handle_sigterm(before)
    try:
        check_version(ray.__version__, node_address())
    except ConfigError:
        if ours:
            ray.shutdown()
        raise
    return ours


def _handle_sigterm(before: Any) -> None:
    """In place of Ray's handler, by which a driver ends with exit code 15: the one before it, else one that ends with 143."""
    is_rays = getattr(signal.getsignal(signal.SIGTERM), "__module__", "").startswith("ray.")
    if is_rays and threading.current_thread() is threading.main_thread():
        other = before not in (None, signal.SIG_DFL) and not getattr(before, "__module__", "").startswith("ray.")
        signal.signal(signal.SIGTERM, before if other else lambda number, frame: sys.exit(128 + number))


@contextmanager
def connected(runtime_env: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Connected to the cluster inside; afterwards as before. Raises what `connect` raises."""
    ours = connect(runtime_env)
    try:
        yield
    finally:
        if ours:
            import ray

            ray.shutdown()


def node_address() -> str:
    """The address by which the other nodes of the cluster reach this one. Needs a connected process."""
    import ray

    return str(ray.util.get_node_ip_address())


def cluster_gpus() -> float:
    """How many GPUs the cluster has, in use or not. Needs a connected process."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0.0))


def has_token(version: str) -> bool:
    """Whether the servers of this version of Ray can ask for a token."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= TOKEN_SINCE  # a build without a number is a new one


def check_version(version: str, address: str) -> None:
    """Raises ConfigError (ray) for a version whose servers accept requests from any client, on an address that other machines
    reach."""
    if has_token(version) or ipaddress.ip_address(address).is_loopback:
        return
    since = ".".join(map(str, TOKEN_SINCE))
    token = f"Ray {since} and later can ask for a token (RAY_AUTH_MODE=token)"
    rule = f"its servers at {address} run programs of any client; {token}"
    raise ConfigError("ray", version, f"{rule}: install that, or bind the cluster to a loopback address")


def code_env(folder: str) -> dict[str, Any]:
    """A `runtime_env` by which `folder` is the working directory of what runs on the nodes; "": nothing travels."""
    return {"working_dir": folder, "excludes": list(EXCLUDES)} if folder else {}
