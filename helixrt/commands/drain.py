"""`helixrt drain REPLICA`: a replica leaves a run at a step boundary; `--back` starts it again.

In: the replica's number and the run's folder. Out: a request to the run's driver, which reports the result on its console.
The other replicas continue; no exchange breaks, and nothing is computed twice.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

_TAKEN_WITHIN_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("replica", type=int, metavar="REPLICA", help="number of the replica, from 0")
    parser.add_argument("--back", action="store_true", help="start the replica again")
    parser.add_argument(
        "--run",
        type=Path,
        default=Path("outputs/latest"),
        metavar="RUN_FOLDER",
        help="folder of the run (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    from helixrt.errors import ConfigError
    from helixrt.job.draining import request

    file = request(args.run, args.replica, args.back)
    deadline = time.monotonic() + _TAKEN_WITHIN_S
    while file.exists():
        if time.monotonic() >= deadline:
            file.unlink(missing_ok=True)
            raise ConfigError("run", args.run, f"its driver did not answer within {_TAKEN_WITHIN_S:g} s")
        time.sleep(0.05)
    what = "started again" if args.back else "asked to leave at a step boundary"
    print(f"replica {args.replica} of {args.run.resolve()} is {what}; the run's console reports the result")
    return 0
