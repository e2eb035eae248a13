"""The launcher of ranks on the hosts of `helixrt.lab.net`, and the program of such a rank (`python -m tests.train.lab_hosts`).

HELIXRT_TEST_HOSTS names the namespace of each replica's host, in order, separated by commas. Whoever calls the launcher, the
driver or the run's keeper, stays where it was started.
"""

import ctypes
import os

from helixrt.job.launchers import RankProgram
from helixrt.job.local_launcher import LocalLauncher
from helixrt.job.session_rank import main, run_rank
from helixrt.replica.contracts import Launcher, RankSpec
from helixrt.replica.orphan import command

HOSTS = "HELIXRT_TEST_HOSTS"
LAUNCHER = f"{__name__}:ranks_on_hosts"
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def ranks_on_hosts(program: RankProgram) -> Launcher:
    environment = {**program.environment, "GLOO_SOCKET_IFNAME": "lo"}
    return LocalLauncher(command("tests.train.lab_hosts"), program.logs, environment, program.warm)


def enter(namespace: str) -> None:
    """Move this process, which has one thread and no sockets yet, to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def on_host(spec: RankSpec) -> int:
    enter(os.environ[HOSTS].split(",")[spec.coordinate.replica])
    return run_rank(spec)


if __name__ == "__main__":
    main(on_host)
