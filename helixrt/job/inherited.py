"""What a process inherits from the one that starts it: environment, working directory, limits, affinity, namespaces, ids.

In: the state of this process and thread. Out: `Inherited`, and the first difference of two. A process that was started earlier
can stand in for a new one only while there is none. Linux (`/proc`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from helixrt.replica.orphan import PARENT_VARIABLE

# Variables that neither the start of an interpreter nor an import of a rank's modules reads.
READ_LATER = frozenset({PARENT_VARIABLE, "HELIXRT_LOG", "RUST_LOG", "PWD", "OLDPWD", "SHLVL", "_", "PYTEST_CURRENT_TEST"})
_STATUS = (
    "Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cap", "NoNewPrivs", "Seccomp:", "Cpus_allowed:", "Mems_allowed:",
)  # fmt: skip
_ME = Path("/proc/thread-self")


@dataclass(frozen=True)
class Inherited:
    """`environment` is the child's; `others` are texts by what they describe."""

    environment: Mapping[str, str]
    others: Mapping[str, str]


def inherited(environment: Mapping[str, str]) -> Inherited:
    """What a child that this thread starts now with `environment` has from it."""
    return Inherited(dict(environment), dict(_others()))


def _others() -> Iterator[tuple[str, str]]:
    yield "working directory", os.readlink("/proc/self/cwd")
    yield "nice value", str(os.getpriority(os.PRIO_PROCESS, 0))
    yield "scheduling policy", str(os.sched_getscheduler(0))
    for line in (_ME / "status").read_text().splitlines():
        if line.startswith(_STATUS):
            yield line.partition(":")[0], line
    for name, file in (("resource limits", "limits"), ("control group", "cgroup"), ("oom_score_adj", "oom_score_adj")):
        yield name, (_ME / file).read_text()
    for space in (_ME / "ns").iterdir():
        yield f"namespace {space.name}", os.readlink(space)


def difference(earlier: Inherited, now: Inherited, made: Mapping[str, str]) -> str:
    """The first thing in which a child of `now` would differ from one of `earlier`, as "the working directory"; "" for none.

    `made`: variables that the earlier child's imports have set, where they were not set. A child of now would set them too, so
    it may have none or an equal value.
    """
    then = {**earlier.environment, **made}
    for name in sorted({*then, *now.environment} - READ_LATER):
        if then.get(name) != now.environment.get(name) and not (name in made and name not in now.environment):
            return f"{name} of the environment"
    for name in (*earlier.others, *now.others):
        if earlier.others.get(name) != now.others.get(name):
            return f"the {name}"
    return ""
