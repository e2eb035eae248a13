"""`helixrt attach RUN_FOLDER`: start a new driver for a run whose ranks continue without one, or follow a submitted job again.

In: the run's folder, or the id of a Ray job. Out: the run's console from now on, and its exit code. Ctrl-C ends the run that is
driven from here; a job that is followed goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        default="outputs/latest",
        metavar="RUN",
        help="the run's folder, or the id of a Ray job, as `helixrt.train.submit` prints it (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    if not Path(args.run).exists() and "/" not in args.run:
        from helixrt.train.submit import attach

        return attach(args.run)
    return _drive(Path(args.run).resolve())


def _drive(folder: Path) -> int:
    from helixrt.errors import ConfigError
    from helixrt.job.attaching import attached_driver
    from helixrt.job.logs import configure_logging

    if not (folder / "run.json").is_file():
        raise ConfigError("run", folder, "is not the folder of a run: it has no run.json")
    configure_logging()
    return attached_driver(folder).run()
