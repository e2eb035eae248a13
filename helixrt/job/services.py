"""What ranks and driver of a run share: the run's store and the membership service; and the launcher that starts the ranks.

In: the settings. Out: `Services`, which the driver uses: in its own process (`ServedHere`), or in one that outlives it
(`kept_run.KeptServices`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.job.config import MEMBERSHIPS, JobConfig
from helixrt.job.launchers import RankProgram, is_named, named_launcher
from helixrt.job.places import group_world_size
from helixrt.job.ray_run import Reserved
from helixrt.job.warm_up import actor_environment, chosen_start, rank_environment
from helixrt.replica.contracts import Launcher
from helixrt.replica.orphan import command
from helixrt.replica.store import host_store
from helixrt.timeouts import derive


class Services(ABC):
    """`address`: of torch's store, by which ranks meet, and which is the run's store too unless the run has a durable one at
    `durable` ("": it has none); `lighthouse`: of the membership service, "" where the replicas need none."""

    address: str
    durable: str = ""
    lighthouse: str

    @abstractmethod
    def launcher(self) -> Launcher:
        """What starts the ranks. Once."""

    @abstractmethod
    def close(self) -> None:
        """At the end of the run: nothing of it is needed any more."""

    def end_store(self) -> None:  # noqa: B027 nothing to do where it has ended with `close`
        """After `close`: ranks that still ask the store find none."""

    def leave(self) -> None:  # noqa: B027 nothing to do where they end with this process
        """At the end of a driver whose run may go on without it."""


class ServedHere(Services):
    """In this process, with whose end they end. Raises ConfigError for an address or a port that cannot be used."""

    def __init__(self, config: JobConfig, folder: Path, module: str, reserved: Reserved) -> None:
        self._config, self._folder, self._module, self._reserved = config, folder, module, reserved
        self._server: object | None
        self._server, self.address = host_store(config.host, config.port)
        self._membership, self.lighthouse = _serve_membership(config)

    def launcher(self) -> Launcher:
        return rank_launcher(self._config, self._folder, self._module, self._reserved, pages=True)

    def close(self) -> None:
        if self._membership is not None:
            self._membership.shutdown()  # type: ignore[attr-defined]

    def end_store(self) -> None:
        self._server = None  # it serves for as long as it lives


def membership_kind(config: JobConfig) -> str:
    """What says who takes part: torchft or store. Raises ConfigError, MissingExtra for torchft that is asked for."""
    if config.membership not in MEMBERSHIPS:
        raise ConfigError("membership", config.membership, f"must be one of {', '.join(MEMBERSHIPS)}")
    if config.membership != "auto":
        return config.membership
    return "torchft" if find_spec("torchft") is not None else "store"


def has_lighthouse(config: JobConfig) -> bool:
    """Whether the replicas of this run need torchft's lighthouse. Raises as `membership_kind`."""
    return config.mesh.replicas > 1 and membership_kind(config) == "torchft"


def _serve_membership(config: JobConfig) -> tuple[object, str]:
    if not has_lighthouse(config):
        return None, ""
    os.environ.setdefault("RUST_LOG", "error")  # torchft's server tells every quorum otherwise
    from helixrt.replica.membership import serve_lighthouse

    return serve_lighthouse(derive(config.step_timeout_s, config.heartbeat_s), config.host)


def rank_launcher(config: JobConfig, folder: Path, module: str, reserved: Reserved, pages: bool = False) -> Launcher:
    """Of ranks that run `module`, with their logs in the run's folder; they end with this process. `pages`: this process also
    asks the launcher what ranks have worked on, if it knows that. Raises ConfigError."""
    logs = folder / "logs"
    if config.launcher == "ray":
        from helixrt.ray_cluster.launcher import RayLauncher

        environment = actor_environment(config.threads)
        ranks = group_world_size(config.mesh)
        return RayLauncher(logs, f"{module}:run_rank", environment, reserved.cpus, reserved.gpus, ranks)
    environment, warm = rank_environment(config.threads), chosen_start(config.start) == "warm"
    if is_named(config.launcher):
        return named_launcher(config.launcher)(RankProgram(module, logs, environment, warm))
    from helixrt.job.local_launcher import LocalLauncher

    return LocalLauncher(command(module), logs, environment, warm, pages)
