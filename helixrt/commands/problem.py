"""The planning problem that command-line options describe.

In: options as text (`add_costs`, `add_replay`, parsed by argparse). Out: a `Problem`: costs to plan under, costs to
replay under, the number of micro-batches. Everything wrong is a ConfigError that names the option and what was given.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs, uniform, with_delays
from helixrt.schedule.exchange.profile import read
from helixrt.schedule.planner.bounds import check_reachable
from helixrt.schedule.simulate import DELEGATED, Comm, Direct

_DELAY = re.compile(r"([0-9]{1,6})(?:>([0-9]{1,6}))?:(.+)")


@dataclass(frozen=True)
class Problem:
    """Costs of one chunk per stage: `plan` is what planners see, `run` what the schedule is replayed under."""

    plan: Costs
    run: Costs
    microbatches: int


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the planning problem."""
    parser.add_argument("--stages", metavar="S", help="pipeline stages")
    parser.add_argument("--microbatches", metavar="N", help="micro-batches of a step")
    parser.add_argument(
        "--cost", metavar="F,B,W", help="ms of F, B and W of each stage: forward, backward for inputs, backward for weights"
    )
    parser.add_argument("--profile", metavar="FILE.json", help='costs per stage: {"f": [..], "b": [..], "w": [..], ...}')
    parser.add_argument("--delay", action="append", default=[], metavar="I:MS", help="latency of a link that the plan assumes")
    parser.add_argument(
        "--memory", metavar="M", help="memory cap of every stage, in activations (a micro-batch holds 1 from F to W)"
    )
    parser.set_defaults(run_delay=[])


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a schedule is run."""
    parser.add_argument(
        "--run-delay", action="append", default=[], metavar="I:MS", help="latency in the simulation, if it differs from --delay"
    )
    parser.add_argument("--comm", default="delegated", metavar="MODE", help="delegated (default), direct or direct:DEPTH")


def problem(
    args: argparse.Namespace, stages: int | None = None, microbatches: int | None = None, of: str = "the order's"
) -> Problem:
    """The problem in the options; `stages` and `microbatches` are those that something else has, named by `of`.

    Delays of --delay stand over the profile's for planning, those of --run-delay over the profile's for the replay.
    Raises ConfigError for everything that cannot be, caps that no schedule fits included.
    """
    given = {"--stages": whole("--stages", args.stages), "--microbatches": whole("--microbatches", args.microbatches)}
    if args.profile is not None:
        if args.cost is not None:
            raise ConfigError("--cost", args.cost, "goes with --stages, not with --profile, which has the costs of every stage")
        profile = read(read_text("--profile", args.profile), "--profile", args.profile)
        costs, of_profile = profile.costs, profile.microbatches
        _agree("--stages", given["--stages"], costs.stages, "the profile's")
    else:
        number = given["--stages"] or stages
        if number is None:
            raise ConfigError("--stages", "''", "is needed, or a --profile")
        forward, backward, weight = _costs("1,1,1" if args.cost is None else args.cost)
        costs = uniform(number, forward, backward, weight)
        of_profile = None
    if args.memory is not None:
        cap = _parsed("--memory", args.memory, args.memory, "must be a number, at least 0")
        costs = replace(costs, memory=(cap,) * costs.stages)
    _agree(f"{of} stages", stages, costs.stages, "as many as have costs")
    _agree(f"{of} micro-batches", microbatches, given["--microbatches"], "as many as --microbatches")
    count = given["--microbatches"] or microbatches or of_profile
    if count is None:
        raise ConfigError("--microbatches", "''", "is needed")
    plan = with_delays(costs, dict(_delays("--delay", args.delay, costs.stages)))
    run = with_delays(costs, dict(_delays("--run-delay", args.run_delay, costs.stages))) if args.run_delay else plan
    check_reachable(plan)
    return Problem(plan, run, count)


def comm(text: str) -> Comm:
    """How stages communicate: `delegated`, `direct`, or `direct:DEPTH`."""
    mode, colon, depth = text.partition(":")
    if mode == "direct":
        return Direct(whole("--comm direct:DEPTH", depth) or 1) if colon else Direct()
    if text != "delegated":
        raise ConfigError("--comm", text, "must be delegated, direct or direct:DEPTH")
    return DELEGATED


def number(option: str, text: str | None) -> float | None:
    """The number in an option's text, at least 0 and finite; None for none."""
    if text is None:
        return None
    value = _parsed(option, text, text, rule := "must be a number, at least 0")
    if math.isinf(value):
        raise ConfigError(option, text, rule)
    return value


def read_text(option: str, path: str) -> str:
    """The text of a file that an option names. Raises ConfigError when there is none that can be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(option, path, f"cannot be read: {reason}") from None


def _delays(option: str, values: Iterable[str], stages: int) -> Iterable[tuple[tuple[int, int], float]]:
    for value in values:
        found = _DELAY.fullmatch(value)
        if found is None:
            raise ConfigError(option, value, "must be I:MS, both ways between stages I and I+1, or I>J:MS, one way")
        source = int(found[1])
        target = int(found[2]) if found[2] else source + 1
        if source == target or max(source, target) >= stages:
            raise ConfigError(option, value, f"must join two different stages below {stages}")
        delay_ms = _parsed(option, found[3], value)
        if math.isinf(delay_ms):
            raise ConfigError(option, value, "must be a number of ms")
        yield (source, target), delay_ms
        if not found[2]:
            yield (target, source), delay_ms


def _costs(text: str) -> list[float]:
    parts = text.split(",")
    if len(parts) != 3:
        raise ConfigError("--cost", text, "must be three times in ms: forward, backward for inputs, backward for weights")
    return [_parsed("--cost", part, text) for part in parts]


def _parsed(option: str, part: str, text: str, rule: str = "must be numbers, at least 0") -> float:
    """The number in a part of an option's text; it may be infinite."""
    try:
        value = float(part)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ConfigError(option, text, rule)
    return value


def whole(option: str, text: str | None, least: int = 1) -> int | None:
    """The whole number in an option's text; None for none."""
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        raise ConfigError(option, text or "''", f"must be a whole number, at least {least} and below 1000000")
    return int(text)


def _agree(key: str, value: int | None, expected: int | None, of: str) -> None:
    if value is not None and expected is not None and value != expected:
        raise ConfigError(key, value, f"must be {of}, {expected}")
