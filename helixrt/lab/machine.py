"""What this machine lacks for namespaces with rated links: asked by `Network`, `helixrt doctor` and the tests' marker.

In: the running machine. Out: a `Lack` (what, and how to get it) or None. The kernel is asked by doing the things once
in a namespace without a name, which goes when the asking process ends; so nothing is left, whatever happens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

PROBES = (  # what the kernel must do, and the commands that show that it does
    ("network namespaces", "true"),
    ("veth pairs", "ip link add veth0 type veth peer name veth1"),
    ("bridges", "ip link add bridge0 type bridge"),
    ("rates (tbf)", "tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 50ms"),
)
NETEM = "tc qdisc add dev lo root netem delay 1ms"
TIMEOUT_S = 30


@dataclass(frozen=True)
class Lack:
    """One thing that is missing: what, and what to do. As text: one line."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}"


def kernel_refusal(command: str) -> str | None:
    """What `command` (of a shell, with `ip` and `tc`) prints when it fails in a new namespace; None when it works."""
    asked = ["unshare", "--net", "--mount", "sh", "-c", command]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines()
    return (said[0] if said else f"exit code {done.returncode}") if done.returncode else None


def lacking() -> Lack | None:
    """The first thing in the way of a network of namespaces here, or None."""
    if not sys.platform.startswith("linux"):
        return Lack(f"no network namespaces on {sys.platform}", "run on Linux, or in a Linux container")
    if os.geteuid() != 0:
        return Lack("not root", "run as root to test with rated links")
    for command, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            return Lack(f"no `{command}` command", f"apt-get install {package}")
    if (refusal := kernel_refusal(" && ".join(command for _, command in PROBES))) is None:
        return None
    tried: list[str] = []
    for what, command in PROBES:  # which of them it was; each may build on the ones before
        tried.append(command)
        if (refusal_here := kernel_refusal(" && ".join(tried))) is not None:
            refusal, refused = refusal_here, what
            break
    else:
        refused = "namespaces"
    fix = "start the container with --privileged" if refused == PROBES[0][0] else "use a kernel with veth, bridge and sch_tbf"
    return Lack(f"the kernel refuses {refused}: {refusal}", fix)


def unavailable() -> str | None:
    """`lacking` as one line, or None when networks of namespaces work here."""
    lack = lacking()
    return None if lack is None else str(lack)


def no_delay() -> str | None:
    """Why this kernel cannot delay packets (it has no netem), or None when it can."""
    return kernel_refusal(NETEM)
