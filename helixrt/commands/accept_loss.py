"""`helixrt accept-loss RUN_FOLDER`: end the wait of a run for newer state that is lost.

In: the folder of a run whose console names the replica it waits for. Out: a request to the driver; the running replicas
continue from the newest state that one of them, or a checkpoint, has. Steps after it are lost and computed again.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", type=Path, metavar="RUN_FOLDER", help="folder of the run, as its console prints it while it waits"
    )


def run(args: argparse.Namespace) -> int:
    from helixrt.job.loss_acceptance import accept_loss

    accept_loss(args.run_folder)
    print(f"the driver of {args.run_folder} lets the replicas continue without the missing one")
    return 0
