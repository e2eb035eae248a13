"""A program on a host of a lab's network: it reads orders, one in a line, and writes lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from helixrt.lab.net import Network


class Told:
    def __init__(self, net: Network, host: int, *argv: str) -> None:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = net.run(host, [sys.executable, *argv], **pipes, text=True)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)
