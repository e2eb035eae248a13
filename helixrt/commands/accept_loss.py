"""`helixrt accept-loss RUN_FOLDER`: let a run that waits for newer state go on without it.

In: the folder of a run whose console says for whom it waits. Out: the driver of the run is told; the replicas that are
there go on from the newest state that one of them, or a checkpoint, has. Steps after it are lost and computed again.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="as the waiting line of the run names it")


def run(args: argparse.Namespace) -> int:
    from helixrt.job.loss_acceptance import accept_loss

    accept_loss(args.run_folder)
    print(f"the driver of {args.run_folder} will let the replicas go on without the missing one")
    return 0
