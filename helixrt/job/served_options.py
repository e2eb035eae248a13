"""Settings of the runtime that a program gives although `helixrt serve` has them: what differs is refused, not left out.

In: what the program asks for, and the settings of the served run. Out: nothing, or a ConfigError. A program may give the
settings that the server has: the same script then also runs where `helixrt.run` starts the ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from helixrt.errors import ConfigError
from helixrt.job.config import JobConfig

_ELSEWHERE = ("name", "seed", "resume", "launcher", "start", "mesh", "output", "deal")  # a session's own, or of no effect here
_OPTIONS = {
    "step_timeout_s": "--step-timeout-s",
    "heartbeat_s": "--heartbeat-s",
    "restarts": "--restarts",
    "membership": "--membership",
    "host": "--host",
    "port": "--port",
    "checkpoint.every": "--checkpoint-every",
    "checkpoint.path": "--checkpoint-path",
    "transport.kind": "--transport",
    "transport.rails": "--rails",
}


def check_as_served(asked: JobConfig, served: JobConfig) -> None:
    """Raises ConfigError for the first setting of the runtime that is neither the default nor what the server has."""
    usual, there = _settings(JobConfig()), _settings(served)
    there["threads"] = torch.get_num_threads()
    for key, value in _settings(asked).items():
        if value in (usual[key], there[key]) or key.partition(".")[0] in _ELSEWHERE:
            continue
        if key == "threads":
            rule = f"this process has {there[key]}; set OMP_NUM_THREADS before it starts, or leave it out"
        elif key in _OPTIONS:
            rule = f"`helixrt serve` has {there[key]}; start it with {_OPTIONS[key]}, or leave it out in the program"
        else:
            rule = f"cannot be set in a run that `helixrt serve` serves, which has {there[key]}; leave it out"
        raise ConfigError(key, value, rule)


def _settings(config: JobConfig) -> dict[str, Any]:
    """By name, those of a component as `checkpoint.every`."""
    found: dict[str, Any] = {}
    for name, value in config.to_plain().items():
        found |= {f"{name}.{each}": inner for each, inner in value.items()} if isinstance(value, dict) else {name: value}
    return found
