"""`helixrt train`, `python -m helixrt.train [+experiment=NAME] [key=value ...]`: train, here or as a Ray job's entrypoint.

Ctrl-C and SIGTERM end the run and all its processes, with one line and the code that shells give them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

import helixrt
from helixrt.errors import interrupted

if TYPE_CHECKING:
    from helixrt.train.config import TrainConfig

TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from helixrt.train.schema import command

        return command(argv, _train)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return interrupted()
    except SystemExit as asked:
        if asked.code != TERMINATED:
            raise
        print("terminated", file=sys.stderr)
        return TERMINATED


def _train(config: TrainConfig) -> int:
    helixrt.warm_up(config)  # ranks' imports, before the ones here
    from helixrt.train.driver import train

    return train(config)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
