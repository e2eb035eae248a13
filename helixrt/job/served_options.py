"""Settings of the runtime that a program gives although `helixrt serve` has them: what differs is refused, not left out.

In: what the program asks for, and the settings of the served run. Out: nothing, or a ConfigError. A program may give the
settings that the server has: the same script then also runs where `helixrt.run` starts the ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from helixrt.errors import ConfigError
from helixrt.job.config import JobConfig

# A session's own, or of no effect where others start the ranks: one script may serve several launchers.
_ELSEWHERE = ("name", "seed", "resume", "launcher", "start", "mesh", "output", "deal", "ray", "driver_away_s")
_log = logging.getLogger(__name__)
_OPTIONS = {
    "step_timeout_s": "--step-timeout-s",
    "heartbeat_s": "--heartbeat-s",
    "restarts": "--restarts",
    "fatal_restarts": "--fatal-restarts",
    "membership": "--membership",
    "host": "--host",
    "port": "--port",
    "checkpoint.every": "--checkpoint-every",
    "checkpoint.path": "--checkpoint-path",
    "transport.kind": "--transport",
    "transport.rails": "--rails",
}


def check_as_served(asked: JobConfig, served: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first setting of the runtime that is neither the default nor what the server has."""
    usual, there = _settings(JobConfig().to_plain()), _settings(served)
    for key, value in _settings(asked.to_plain()).items():
        if value in (usual[key], there[key]):
            continue
        if key == "threads":
            found = torch.get_num_threads()
            if value != found:
                _log.warning("threads=%s has no effect in a process that others start, which has %s threads", value, found)
            continue
        if key in _OPTIONS:
            rule = f"`helixrt serve` has {there[key]}; start it with {_OPTIONS[key]}, or leave it out in the program"
        else:
            rule = f"cannot be set in a run that `helixrt serve` serves, which has {there[key]}; leave it out"
        raise ConfigError(key, value, rule)


def _settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Of the runtime, by name, as they are after their way through JSON; those of a component as `checkpoint.every`."""
    found: dict[str, Any] = {}
    for field in fields(JobConfig):  # a program's configuration may have more
        value = json.loads(json.dumps(plain[field.name]))
        if field.name in _ELSEWHERE:
            continue
        parts = value if isinstance(value, dict) else {"": value}
        found |= {f"{field.name}.{name}".rstrip("."): inner for name, inner in parts.items()}
    return found
