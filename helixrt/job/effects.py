"""Settings that have no effect in this run: each that was changed is said once, when the run begins.

In: a `JobConfig`. Out: one line for each setting that is not its default and that nothing reads. `CASES` names settings, alone
or in groups, and when nothing reads them; a test compares it with all settings there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from helixrt.job.config import JobConfig

_ONE_REPLICA = "catchup membership heartbeat_s exchange supersede_after_s checks.every checks.on_divergence"
_OF_CHECKPOINTS = "checkpoint.keep checkpoint.path checkpoint.write_s checkpoint.retry_s"

Case = tuple[str, Callable[[JobConfig], bool], str]  # settings or groups of them, when they have no effect, and why

CASES: tuple[Case, ...] = (
    (_ONE_REPLICA, lambda c: c.mesh.replicas == 1, "there is one replica (mesh.replicas=1)"),
    ("checks.on_divergence", lambda c: c.mesh.replicas > 1 and c.checks.every == 0, "checks.every=0"),
    ("checks.same_streams", lambda c: c.mesh.replicas * c.mesh.dp_shard == 1, "there is one stream of data"),
    ("transport", lambda c: c.mesh.replicas == c.mesh.pp == 1, "there is one replica in one stage"),
    ("pipeline chaos.slow", lambda c: c.mesh.pp == 1, "a replica is one stage (mesh.pp=1)"),
    ("ray", lambda c: c.launcher != "ray", "ranks are no Ray actors"),
    ("start", lambda c: c.launcher in ("ray", "environment"), "ranks are not started here"),
    ("fatal_restarts", lambda c: c.restarts == 0, "restarts=0"),
    (_OF_CHECKPOINTS, lambda c: c.checkpoint.every == 0, "checkpoint.every=0"),
)
"""All others are always read, or refused where they do not fit (`rules`)."""


def without_effect(config: JobConfig) -> Iterator[str]:
    """A line for each changed setting that nothing reads in this run."""
    usual = JobConfig()
    for names, unread, why in CASES:
        for name in names.split() if unread(config) else ():
            for setting in changed(name, attrgetter(name)(config), attrgetter(name)(usual)):
                yield f"{setting} has no effect: {why}"


def changed(name: str, value: Any, usual: Any) -> Iterator[str]:
    """`NAME=VALUE` of each setting of a group that is not its default."""
    if is_dataclass(value):
        for each in fields(value):
            yield from changed(f"{name}.{each.name}", getattr(value, each.name), getattr(usual, each.name))
    elif value != usual:
        yield f"{name}={value}"
