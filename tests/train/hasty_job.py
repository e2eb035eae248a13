"""`python hasty_job.py key=value …`: the main job with a driver that waits for hardly anything before it kills ranks."""

import sys

from helixrt.train import driver
from helixrt.train.schema import command

if __name__ == "__main__":
    driver.EXIT_GRACE_S = 0.2
    sys.exit(command(sys.argv[1:], driver.train))
