"""The user's acceptance of a loss, from `helixrt accept-loss RUN_FOLDER` to the driver of the run.

In: the run's folder. Out: files in it. The command needs no torch: it must work on a busy or broken machine.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from helixrt.errors import ConfigError

WAITING_LINE_S = 10.0  # between two lines that say who is waited for
_WAITING = "waiting"  # a file in the run's folder: who is waited for; written again with each line
_ACCEPTED = "accept_loss"  # a file in the run's folder, from the command to the driver


def accept_loss(folder: Path) -> None:
    """Tell the driver of the run in `folder` that its newest records may be lost. Raises ConfigError if there is no run, or
    none of its replicas has waited for newer state lately."""
    if not (folder / "run.json").is_file():
        raise ConfigError("RUN_FOLDER", folder, "is not the folder of a run: it has no run.json")
    waiting = folder / _WAITING
    if not waiting.is_file() or time.time() - waiting.stat().st_mtime > 6 * WAITING_LINE_S:
        raise ConfigError("RUN_FOLDER", folder, "is of a run in which no replica waits for newer state")
    (folder / _ACCEPTED).touch()


def note_waiting(folder: Path, text: str) -> None:
    """Leave a note that a replica waits, for `accept_loss`."""
    with suppress(OSError):  # the console says it as well
        (folder / _WAITING).write_text(text, encoding="utf-8")


def take_acceptance(folder: Path) -> bool:
    """Whether the user has accepted a loss since the last call; not, as long as the folder cannot be read."""
    try:
        (folder / _ACCEPTED).unlink()
    except OSError:
        return False
    return True
