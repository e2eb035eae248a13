"""`python lab_job.py key=value …`: the main job, each replica's ranks on a host of their own of `helixrt.lab.net`.

HELIXRT_TEST_HOSTS names the namespace of each replica's host, in order, separated by commas. The driver runs where it was
started. Until there is a file `enough` in the folder `output.root`, a batch takes PACE_S longer, so that a test can change
the network in the meantime.
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import helixrt
from helixrt.job import attaching
from helixrt.job.driver import Driver
from helixrt.job.local_launcher import LocalLauncher
from helixrt.job.session_rank import main, run_rank
from helixrt.replica.contracts import Launcher, RankSpec
from helixrt.replica.orphan import die_with_parent
from helixrt.train import driver
from helixrt.train.config import TrainConfig
from helixrt.train.data import BatchAt, ReplicaStream
from helixrt.train.loop import LoopHooks, train
from helixrt.train.schema import command

PACE_S = 1.0
RANK, HOSTS, ENOUGH = "rank", "HELIXRT_TEST_HOSTS", "enough"
_CLONE_NEWNET = 0x40000000  # linux/sched.h


class LabDriver(Driver):
    def launcher(self) -> Launcher:
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        argv = [sys.executable, str(Path(__file__).resolve()), RANK]
        return LocalLauncher(argv, log_folder=self.run_.folder / "logs", environment=environment)


def enter(namespace: str) -> None:
    """Move this process, which has one thread and no sockets yet, to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def on_host(spec: RankSpec) -> int:
    enter(os.environ[HOSTS].split(",")[spec.coordinate.replica])
    return run_rank(spec)


def paced(session: helixrt.Session, config: dict[str, Any]) -> None:
    settings = TrainConfig.from_plain(config)
    enough = Path(settings.output.root, ENOUGH)

    def batches(stream: ReplicaStream) -> BatchAt:
        def batch_at(position: int) -> torch.Tensor:
            if not enough.exists():
                time.sleep(PACE_S)
            return stream.batch_at(position)

        return batch_at

    train(session, settings, LoopHooks(batches=batches))


if __name__ == "__main__":
    if sys.argv[1:] == [RANK]:
        die_with_parent()
        main(on_host)
    attaching.Driver = LabDriver  # type: ignore[misc]
    sys.exit(command(sys.argv[1:], lambda config: driver.train(config, paced)))
