"""`python patient_job.py key=value …`: the main job, in which whoever trains alone does so slowly.

A small model's survivor is done with all its steps before a lost replica's new process has even
imported torch. So a rank here takes a second for each batch while a replica that was ended by then
(`chaos.kill`, `chaos.fault`) has not begun to work again. Everything else is the job as it is.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from helixrt.job.chaos import SLOW
from helixrt.job.driver import Driver, new_run
from helixrt.job.local_launcher import LocalLauncher
from helixrt.replica.contracts import Launcher, RankSpec
from helixrt.replica.orphan import die_with_parent
from helixrt.train import rank
from helixrt.train.config import TrainConfig
from helixrt.train.data import ReplicaStream
from helixrt.train.driver import program_of
from helixrt.train.schema import command

PACE_S = 1.0
RANK = "rank"


class PatientRank(rank.Rank):
    def _batches(self, stream: ReplicaStream) -> Callable[[int], torch.Tensor]:
        def batch_at(position: int) -> torch.Tensor:
            if self.anyone_missing(self.context.record.step):
                time.sleep(PACE_S)
            return stream.batch_at(position)

        return batch_at

    def anyone_missing(self, step: int) -> bool:
        chaos = self.config.chaos
        ends = [*chaos.kill, *(f for f in chaos.fault if f.kind != SLOW)]
        for replica in range(self.config.mesh.replicas):
            lives = sum(e.replica == replica and e.step < step for e in ends)
            flight = self.context.output / "flight" / f"r{replica}.pp0.inc{lives}.jsonl"
            if (
                replica != self.context.replica
                and lives
                and not (flight.exists() and '"kind":"work_begin"' in flight.read_text())
            ):
                return True
        return False


class PatientDriver(Driver):
    def launcher(self) -> Launcher:
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, str(Path(__file__).resolve()), RANK]
        return LocalLauncher(argv, log_folder=self.run_.folder / "logs", environment=environment)


def run_rank() -> None:
    die_with_parent()
    rank.Rank = PatientRank  # type: ignore[misc]
    code = rank.run_rank(RankSpec.from_plain(json.loads(sys.stdin.read())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(config: TrainConfig) -> int:
    return PatientDriver(config, new_run(config), program_of(config)).run()


if __name__ == "__main__":
    if sys.argv[1:] == [RANK]:
        run_rank()
    else:
        sys.exit(command(sys.argv[1:], train))
