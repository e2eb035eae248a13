"""Programs as `_hopping_rank`, one on each host of a lab's network: their requests and answers are lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from helixrt.errors import Fatal
from helixrt.lab.net import Network


class LabHosts:
    """The network ends them."""

    def __init__(self, net: Network, count: int, module: str) -> None:
        argv, pipe = [sys.executable, "-P", "-m", module], subprocess.PIPE
        self._programs = [net.run(host, argv, stdin=pipe, stdout=pipe, text=True) for host in range(count)]

    def begin(self, host: int, **request: Any) -> None:
        stream = self._programs[host].stdin
        assert stream is not None
        stream.write(json.dumps(request) + "\n")
        stream.flush()

    def answer(self, host: int) -> Any:
        """Raises Fatal if the host has ended."""
        out = self._programs[host].stdout
        assert out is not None
        line = out.readline()
        if not line:
            raise Fatal(f"host {host} ended: its error is above")
        return json.loads(line)

    def ask(self, requests: Mapping[int, Mapping[str, Any]]) -> list[Any]:
        """Each host its request, all at once; the answers."""
        for host, request in requests.items():
            self.begin(host, **request)
        return [self.answer(host) for host in requests]
