"""Rails of this host by their names, as a user gives them: `eth0`, `10.0.1.7`, `mlx5_0`, `mlx5_1/2`.

In: names, in the order of preference. Out: the TCP rails and the RDMA ports among them, each in that order. What is the name
of an RDMA device (with a port, or port 1) is one; anything else must be an IP address of this host or an interface with one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.transport.tcp.rails import TcpRail, rail_on
from helixrt.transport.verbs.devices import SYSFS, VerbsRail, find_port


@dataclass(frozen=True)
class NamedRails:
    tcp: tuple[TcpRail, ...]
    rdma: tuple[VerbsRail, ...]

    def as_paths(self, count: int) -> NamedRails:
        """Each rail `count` times: TCP's connections differ by their ports, those of RDMA by their flow labels."""
        rdma = [replace(rail, flow_label=label) for label in range(1, count + 1) for rail in self.rdma]
        return NamedRails(self.tcp * count, tuple(rdma) if count > 1 else self.rdma)


def named_rails(names: Sequence[str], root: Path = SYSFS) -> NamedRails:
    """Raises ConfigError for a name that is neither, or given twice."""
    tcp, rdma = [], []
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("rail", name, "is named twice")
        device, _, port = name.partition("/")
        if device and os.path.isdir(root / device):
            if port and not port.isdecimal():
                raise ConfigError("rail", name, "must be an RDMA device, or DEVICE/PORT")
            rail = VerbsRail(device=device, port=int(port or 1))
            find_port(rail, root)
            rdma.append(rail)
        else:
            tcp.append(rail_on(name))
    return NamedRails(tuple(tcp), tuple(rdma))
