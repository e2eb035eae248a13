"""Which launcher starts the ranks of a run: what a user names, or what the environment of this process says.

In: `helixrt.run(launcher=)` and variables of the environment. Out: "local" (processes of this host), "ray" (actors of a Ray
cluster) or "environment" (this process is itself one replica of a run that `helixrt serve` serves).
"""

from __future__ import annotations

import os

from helixrt.errors import ConfigError
from helixrt.job.starters import STORE, starter

LAUNCHERS = ("auto", "local", "ray", "environment")

def chosen_launcher(launcher: str) -> str:
    """The launcher that `auto` means here. Raises ConfigError."""
    if launcher not in LAUNCHERS:
        raise ConfigError("launcher", launcher, f"must be one of {', '.join(LAUNCHERS)}")
    if launcher != "auto":
        return launcher
    who = starter()
    if STORE in os.environ or who in ("torchrun", "Slurm"):
        return "environment"
    address = os.environ.get("RAY_ADDRESS", "")  # http: a dashboard, where jobs are submitted
    return "ray" if who == "Ray" or (address and not address.startswith("http")) else "local"
