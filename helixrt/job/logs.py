"""Logging of the library: warnings alone, unless HELIXRT_LOG names a level, for all of helixrt or for parts of it.

HELIXRT_LOG=INFO, or HELIXRT_LOG=helixrt.job=DEBUG,helixrt.replica=INFO. Lines go to standard error, which in a rank is its log.
Lines that cannot be written, on a full disk, are lost; they do not change the exit code of the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

from helixrt.errors import ConfigError
from helixrt.replica.telling import lose_unprinted

VARIABLE = "HELIXRT_LOG"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure_logging(label: str = "", setting: str | None = None) -> None:
    """Set the levels that HELIXRT_LOG (or `setting`) names; `label` is put before each line. Handlers of the user's own are
    left alone. Raises ConfigError for a level that does not exist."""
    text = os.environ.get(VARIABLE, "") if setting is None else setting
    levels = [_level(part) for part in text.split(",") if part.strip()]
    root = logging.getLogger("helixrt")
    if not any(isinstance(handler, _Handler) for handler in root.handlers):
        handler = _Handler(sys.stderr)
        who = f"{label} " if label else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        atexit.register(lose_unprinted)  # called after the handlers that are registered later, which may print
    for name, level in levels:
        logging.getLogger(name).setLevel(level)


class _Handler(logging.StreamHandler):
    """Ours, to be known again."""


def _level(part: str) -> tuple[str, str]:
    name, _, level = part.strip().rpartition("=")
    if level.upper() not in _LEVELS or not (name or "helixrt").startswith("helixrt"):
        raise ConfigError(VARIABLE, part, f"must be a level ({', '.join(_LEVELS)}), or helixrt.PART=LEVEL, separated by commas")
    return name or "helixrt", level.upper()
