"""A launcher of the user's, beside the user's script: as the local one. Leaves in the file NOTED which process called it."""

import os
from pathlib import Path

from helixrt.job.launchers import RankProgram
from helixrt.job.local_launcher import LocalLauncher
from helixrt.replica.contracts import Launcher
from helixrt.replica.orphan import command


def noting(program: RankProgram) -> Launcher:
    Path(os.environ["NOTED"]).write_text(str(os.getpid()))
    return LocalLauncher(command(program.module), program.logs, program.environment, program.warm)
