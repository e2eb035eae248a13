"""`python hasty_job.py key=value …`: the main job with a driver that waits for hardly anything before it kills ranks."""

import dataclasses
import sys

from helixrt.job.driver import JobProgram
from helixrt.train import driver
from helixrt.train.config import TrainConfig
from helixrt.train.schema import command

GRACE_S = 0.2
program_of = driver.program_of


def hasty(config: TrainConfig) -> JobProgram:
    return dataclasses.replace(program_of(config), exit_grace_s=GRACE_S)


if __name__ == "__main__":
    driver.program_of = hasty
    sys.exit(command(sys.argv[1:], driver.train))
