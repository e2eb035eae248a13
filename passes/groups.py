"""Groups: over which process groups a part communicates, and whether these stay on one host.

In: parts; every rank of their groups calls `locate` at the same time. Out: for each group's name a `Group`: how many
ranks on how many hosts, which backend. A group on one host communicates inside the node, every other one between nodes
(DHelix, section 3.1, separates the two because they use different wires).

A host is identified by `HELIXRT_HOST`, else by this machine's name, boot and network: processes in two network namespaces of
one machine reach each other over a link and count as two hosts.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.agree import exchange
from helixrt.passes.communication import arguments, communication
from helixrt.passes.errors import VerifyError
from helixrt.passes.group_private import group_named
from helixrt.passes.operators import Kind
from helixrt.passes.parts import Part

DEADLINE_S = 60.0  # ranks come here from capture, which takes its time


@dataclass(frozen=True, slots=True)
class Group:
    """Where a process group's ranks are. `ranks_per_host` in falling order."""

    ranks_per_host: tuple[int, ...]
    backend: str = ""

    @property
    def size(self) -> int:
        return sum(self.ranks_per_host)

    @property
    def kind(self) -> Kind:
        return Kind.INTRA if len(self.ranks_per_host) == 1 else Kind.INTER

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.ranks_per_host))} ranks {self.backend}".rstrip()


def locate(parts: Part | Iterable[Part], *, host: str | None = None, deadline_s: float = DEADLINE_S) -> dict[str, Group]:
    """The groups that `parts` communicate in, by name, in the order they are first used.

    `host` overrides what this rank calls its host. Raises VerifyError for a group this process does not know and
    DisagreementError when a rank of one does not answer in time.
    """
    named: dict[str, Any] = {}
    for part in [parts] if isinstance(parts, Part) else parts:
        for node in part.graph.nodes:
            if nodes.communicates(node) and (name := group_name(node)) not in named:
                named[name] = _group(node, name)
    return {name: place(group, host=host, deadline_s=deadline_s) for name, group in named.items()}


def place(group: Any, *, host: str | None = None, deadline_s: float = DEADLINE_S) -> Group:
    """Where the ranks of one group are; every one of them calls it."""
    backend, device = transport(group)
    mine = hashlib.sha256((host or this_host()).encode()).digest()
    hosts = exchange(mine, group, deadline_s, device)
    return Group(tuple(sorted((hosts.count(host) for host in set(hosts)), reverse=True)), backend)


def transport(group: Any) -> tuple[str, torch.device]:
    """Name of a group's backend, and the device it takes tensors from."""
    backend = str(group.name()) if callable(getattr(group, "name", None)) else str(getattr(group, "backend", ""))
    on_gpu = backend.lower() in ("nccl", "ncclx", "rccl", "xccl")
    return backend.lower(), torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def group_name(collective: fx.Node) -> str:
    """The name of the group a collective runs in. Raises VerifyError for one that names none."""
    how = communication(collective)
    given = arguments(collective) if how is not None else {}
    if how is not None and how.group in given:
        return _name(given[how.group])
    raise VerifyError(f"collective {collective} ({collective.target}) names no process group")


def this_host() -> str:
    """What this process calls its host."""
    if said := os.environ.get("HELIXRT_HOST"):
        return said
    found = [socket.gethostname()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/net"))
    return " ".join(found)


def _name(value: object) -> str:
    """Groups are in graphs by name; torch 2.13 may also put the group itself there."""
    return value if isinstance(value, str) else str(getattr(value, "group_name", value))


def _group(node: fx.Node, name: str) -> Any:
    try:
        return group_named(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise VerifyError(f"collective {node} runs in group {name!r}, which is no process group of this process") from error
