"""Which launcher starts the ranks of a run: what a user names, or what the environment of this process says.

In: `helixrt.run(launcher=)` and variables of the environment. Out: "local" (processes of this host), "ray" (actors of a Ray
cluster), "environment" (this process is itself one replica of a run that `helixrt serve` serves), or the name of a function of
the user's, which makes a `Launcher`.

Such a function is named as "MODULE:NAME", since a run's keeper, which is another process, imports it again.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helixrt.errors import ConfigError
from helixrt.job.starters import STORE, check_alone, starter

if TYPE_CHECKING:
    from helixrt.replica.contracts import Launcher

LAUNCHERS = ("auto", "local", "ray", "environment")


@dataclass(frozen=True)
class RankProgram:
    """What a launcher of the user's starts for each rank, with the rank's spec as JSON on its standard input: `python -m
    MODULE`, by `replica.orphan.command` on this host. `logs`: the folder for its output, by `replica.rank_log.log_name`;
    `environment`: variables besides this process's own; `warm`: ranks may be forks (`forerunner`)."""

    module: str
    logs: Path
    environment: Mapping[str, str]
    warm: bool


def is_named(launcher: str) -> bool:
    """Whether it is a function of the user's."""
    return ":" in launcher


def module_of(launcher: str) -> str:
    """Of one that is named."""
    return launcher.partition(":")[0]


def named_launcher(launcher: str) -> Callable[[RankProgram], Launcher]:
    """Import it. What its module raises is raised as it is; ConfigError (launcher) if it is not there."""
    module, name = module_of(launcher), launcher.partition(":")[2]
    if not module or not name:
        raise ConfigError("launcher", launcher, "must be MODULE:NAME, of a function that makes a launcher")
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        rule = f"there is no module {error.name}; name a function that makes a launcher as MODULE:NAME"
        raise ConfigError("launcher", launcher, rule) from None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError("launcher", launcher, f"{name} is no function at the top level of the module {module}")
    return found


def check_launcher(launcher: str) -> None:
    """Raises ConfigError (launcher) for one that there is not."""
    if is_named(launcher):
        named_launcher(launcher)
    elif launcher not in LAUNCHERS:
        raise ConfigError("launcher", launcher, f"must be one of {', '.join(LAUNCHERS)}, or MODULE:NAME")


def chosen_launcher(launcher: str) -> str:
    """The launcher that `auto` means here. Raises ConfigError."""
    check_launcher(launcher)
    if launcher != "auto":
        return launcher
    who = starter()
    if STORE in os.environ or who in ("torchrun", "Slurm"):
        return "environment"
    address = os.environ.get("RAY_ADDRESS", "")  # http: a dashboard, where jobs are submitted
    return check_alone("ray" if who == "Ray" or (address and not address.startswith("http")) else "local")
