"""How ranks on this machine are started, and the start of their forerunner before anything heavy is imported here.

In: the settings of a run. Out: "warm" or "cold", the variables that a rank's environment has besides this process's, and, by
`helixrt.warm_up`, a forerunner that imports while this process does. Imports neither torch nor NumPy.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

from helixrt.errors import ConfigError
from helixrt.job.config import JobConfig
from helixrt.job.forerunner import ForerunnerLost, shared
from helixrt.job.launchers import chosen_launcher
from helixrt.job.train_function import RANK_VARIABLE
from helixrt.replica.variables import travelling
from helixrt.replica.versions import VARIABLE as VERSIONS
from helixrt.replica.versions import versions

PROGRAM = "helixrt.job.session_rank"  # the module that a rank of `helixrt.run` runs
STARTS = ("auto", "warm", "cold")


def chosen_start(start: str) -> str:
    """What `auto` means here: warm on Linux. Raises ConfigError."""
    linux = sys.platform.startswith("linux") and os.path.exists("/proc/thread-self/status")
    if start not in STARTS:
        raise ConfigError("start", start, f"must be one of {', '.join(STARTS)}")
    if start == "warm" and not linux:
        rule = "needs Linux with /proc, where a process can adopt another one's forks; auto is cold here"
        raise ConfigError("start", start, rule)
    return "cold" if start == "cold" or not linux else "warm"


def rank_environment(threads: int) -> dict[str, str]:
    """Variables of a rank's environment besides this process's own."""
    # A wait in the store that ends without an answer is no news; torch would print a warning for each.
    return {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def actor_environment(threads: int) -> dict[str, str]:
    """Variables of the environment of a process that Ray starts, which has the cluster's and not this one's."""
    return travelling() | rank_environment(threads) | {VERSIONS: json.dumps(versions())}


def warm_up(settings: JobConfig = JobConfig()) -> None:  # noqa: B008 frozen
    """Begin to import what ranks on this machine need, in a process beside this one, before `helixrt.run` is called with the
    same `threads`, `launcher` and `start`, which does so otherwise. A program whose own imports take seconds calls it before
    them. It returns at once; a change of the environment or of the working directory makes it useless. It does nothing in a
    rank, and where ranks are not processes of this machine or `settings.start` is cold. Raises ConfigError."""
    warm = chosen_start(settings.start) == "warm"
    if warm and chosen_launcher(settings.launcher) == "local" and RANK_VARIABLE not in os.environ:
        with suppress(ForerunnerLost):  # the first rank tells
            shared(PROGRAM, {**os.environ, **rank_environment(settings.threads)})
