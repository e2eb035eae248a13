"""The variables of a program's environment that go with it to the processes which a cluster starts on other machines.

In: this process's environment, or what another one sent. Out: the variables that travel, or this environment with them. The
standard library alone: a process calls `adopt` before it imports anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_ALIKE = ("HELIXRT_LOG", "HELIXRT_HUGE_PAGES", "HELIXRT_NATIVE_STACKS", "HELIXRT_ANY_VERSION")
_OF_MACHINES = ("NCCL_", "GLOO_", "TORCH_")  # what they begin with; a machine may have its own, such as an interface's name


def travelling() -> dict[str, str]:
    """Of this process's environment."""
    return {name: value for name, value in os.environ.items() if name in _ALIKE or name.startswith(_OF_MACHINES)}


def adopt(environment: Mapping[str, str]) -> None:
    """Set these in this process, but for those of the machine that it has itself."""
    os.environ.update({n: v for n, v in environment.items() if not (n.startswith(_OF_MACHINES) and n in os.environ)})
