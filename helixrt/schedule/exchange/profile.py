"""Costs of every stage in a JSON file: what a run measures and writes, and what `helixrt schedule` and a job plan from.

In: `{"f": [..], "b": [..], "w": [..]}`, one time in ms per stage, and as far as they are known `stages`, `microbatches`,
`delay` and `wire` ([[forward, backward], ..] in ms, one pair per link between neighbours), `memory` (null is no cap),
`activation` and `kept` in any one unit, `pair_factor` as in `Costs`. Out: a `Profile`, or a ConfigError that names the place in
the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from helixrt.errors import ConfigError
from helixrt.schedule.costs import LARGEST, Costs, Link
from helixrt.schedule.ir import linear

_REQUIRED = ("f", "b", "w")
_OPTIONAL = ("stages", "microbatches", "delay", "wire", "memory", "activation", "kept", "pair_factor")


@dataclass(frozen=True)
class Profile:
    """Costs of one chunk per stage; `microbatches` is None if the file does not contain it."""

    costs: Costs
    microbatches: int | None


def read(text: str, key: str, path: str) -> Profile:
    """The profile in a JSON text, which is that of the file `path`, given as `key`. Raises ConfigError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(key, path, f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(key, path, 'must be an object such as {"f": [1, 1], "b": [1, 1], "w": [1, 1]}')
    if lacking := [name for name in _REQUIRED if name not in found]:
        raise ConfigError(key, path, f"lacks {lacking[0]!r}: the times of every stage")
    if unknown := sorted(set(found) - {*_REQUIRED, *_OPTIONAL}):
        raise ConfigError(key, path, f"has {unknown[0]!r}; it may have {', '.join((*_REQUIRED, *_OPTIONAL))}")
    stages = len(found["f"]) if isinstance(found["f"], list) else 0
    if "stages" in found:
        stages = _json_whole(f"{path} stages", found["stages"])
    lists = {name: _list(path, name, found[name], stages) for name in ("f", "b", "w", "activation", "kept") if name in found}
    memory = found.get("memory")
    if isinstance(memory, list):
        memory = [math.inf if cap is None else cap for cap in memory]
    delays, wires = (_ways(path, name, found.get(name), stages) for name in ("delay", "wire"))
    links = {way: Link(delays.get(way, 0.0), wires.get(way, 0.0)) for way in {**delays, **wires}}
    costs = Costs(
        placement=linear(stages),
        forward=lists["f"],
        backward=lists["b"],
        weight=lists["w"],
        links=links,
        activation=lists.get("activation", ()),
        kept=lists.get("kept", ()),
        memory=_list(path, "memory", memory, stages) if memory is not None else (),
        pair_factor=_factor(f"{path} pair_factor", found.get("pair_factor", 1)),
    )
    count = _json_whole(f"{path} microbatches", found["microbatches"]) if "microbatches" in found else None
    return Profile(costs, count)


def _list(path: str, key: str, values: object, stages: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != stages:
        many = f"{len(values)} values" if isinstance(values, list) else "no list"
        raise ConfigError(f"{path} {key}", many, f"must be one number per stage, {stages} in all")
    for stage, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{path} {key}[{stage}]", json.dumps(value), "must be a number, at least 0")
        if LARGEST < value < math.inf:  # asked before it becomes a float: whole numbers in JSON have no end
            raise ConfigError(f"{path} {key}[{stage}]", _short(value), f"must be at most {LARGEST:g}")
    return tuple(map(float, values))


def _factor(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ConfigError(key, _short(json.dumps(value)), f"must be a number above 0, at most {LARGEST:g}")
    return float(value)


def _short(value: object, most: int = 20) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _ways(path: str, key: str, values: object, stages: int) -> dict[tuple[int, int], float]:
    """Directed times from [[forward, backward], ...], one pair per link between neighbours."""
    if values is None:
        return {}
    if not isinstance(values, list) or len(values) != stages - 1:
        many = f"{len(values)} values" if isinstance(values, list) else "no list"
        raise ConfigError(f"{path} {key}", many, f"must be one [forward, backward] per link, {stages - 1} in all")
    ways: dict[tuple[int, int], float] = {}
    for link, both in enumerate(values):
        if not isinstance(both, list) or len(both) != 2:
            raise ConfigError(f"{path} {key}[{link}]", json.dumps(both), "must be [forward, backward] in ms")
        forward, backward = _list(path, f"{key}[{link}]", both, 2)
        ways[link, link + 1], ways[link + 1, link] = forward, backward
    return ways


def _json_whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 10**6:
        raise ConfigError(key, _short(json.dumps(value)), "must be a whole number, at least 1 and below 1000000")
    return value
