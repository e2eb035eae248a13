"""Links that are slowed down on purpose: `chaos.link=[{from: 1, to: 2, delay_ms: 60, steps: [20, 60]}]`.

In: the mappings of the settings, as they are written (`from` is no name for a field). Out: `LinkDelay`s, and the delay of a
message, which its receiver applies: it sees the message so much later, and until then the send is unfinished. Nobody's compute
is stopped for it. A link with a limited rate is a matter of network namespaces (`helixrt lab net`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helixrt.errors import ConfigError

KEYS = ("from", "to", "delay_ms", "steps")


@dataclass(frozen=True)
class LinkDelay:
    """What stage `source` sends to stage `target` of its replica in steps `first` to `end` - 1 arrives `delay_ms` later."""

    source: int
    target: int
    delay_ms: float
    first: int
    end: float  # infinite: to the end of the run


def link_delays(links: Sequence[Mapping[str, Any]], stages: int) -> tuple[LinkDelay, ...]:
    """Those of the settings, in a pipeline of so many stages; without `steps`, in all of them. Raises ConfigError."""
    return tuple(_link_delay(link, f"chaos.link[{number}]", stages) for number, link in enumerate(links))


def delay_towards(delays: Sequence[LinkDelay], target: int) -> Callable[[int, int], float]:
    """For the stage `target`: the delay in seconds of what a stage sends to it in one of that stage's steps. Several add up."""
    mine = [delay for delay in delays if delay.target == target]

    def delay_s(source: int, step: int) -> float:
        return sum(d.delay_ms / 1e3 for d in mine if d.source == source and d.first <= step < d.end)

    return delay_s


def _link_delay(link: Mapping[str, Any], key: str, stages: int) -> LinkDelay:
    if unknown := [name for name in link if name not in KEYS]:
        raise ConfigError(key, dict(link), f"unknown key {unknown[0]!r}: it has {', '.join(KEYS)}")
    if missing := [name for name in KEYS[:3] if name not in link]:
        raise ConfigError(key, dict(link), f"needs {missing[0]!r}")
    for name in ("from", "to"):
        if not isinstance(link[name], int) or not 0 <= link[name] < stages:
            raise ConfigError(f"{key}.{name}", link[name], f"must be a stage, below mesh.pp={stages}")
    if link["from"] == link["to"]:
        raise ConfigError(f"{key}.to", link["to"], "must be another stage than `from`")
    delay_ms = link["delay_ms"]
    if not isinstance(delay_ms, int | float) or not 0 < delay_ms < math.inf:
        raise ConfigError(f"{key}.delay_ms", delay_ms, "must be above 0")
    steps = link.get("steps", (1, math.inf))
    if not isinstance(steps, list | tuple) or len(steps) != 2 or not all(isinstance(each, int | float) for each in steps):
        raise ConfigError(f"{key}.steps", steps, "must be [first, end]: from step first on, no more from step end on")
    if not 1 <= steps[0] < steps[1]:
        raise ConfigError(f"{key}.steps", list(steps), "must be [first, end] with 1 <= first < end")
    return LinkDelay(link["from"], link["to"], float(delay_ms), int(steps[0]), float(steps[1]))
