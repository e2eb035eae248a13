"""`python hasty_job.py key=value …`: the main job with a driver that waits for hardly anything before it kills ranks."""

import functools
import sys

from helixrt.ray_cluster.controller import Controller
from helixrt.train import driver
from helixrt.train.schema import command

GRACE_S = 0.2

if __name__ == "__main__":
    driver.Controller = functools.partial(Controller, exit_grace_s=GRACE_S)  # type: ignore[misc,assignment]
    sys.exit(command(sys.argv[1:], driver.train))
