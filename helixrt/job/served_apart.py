"""The services of a run with a keeper, in a process of their own (`store_process`), which the keeper starts again if it is
lost.

In: the settings, the run's secret; for a keeper that takes over, the addresses of before. Out: `Services`, whose addresses stay
the same: the keeper has the listening sockets, the process serves them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from helixrt.errors import Cause, ConfigError, Fatal
from helixrt.job.config import JobConfig
from helixrt.job.ray_run import Reserved
from helixrt.job.services import Services, has_lighthouse, rank_launcher
from helixrt.job.store_process import NO_LIGHTHOUSE, REFUSED_CODE, StoreOrder
from helixrt.replica.contracts import Launcher
from helixrt.replica.orphan import PARENT_VARIABLE, command
from helixrt.replica.rank_log import last_error
from helixrt.replica.store import address_of, listener_on, split_address
from helixrt.replica.telling import tell

READY_S = 120.0  # for the process's first word, on a busy machine
_PORT_S, _PORT_PAUSE_S = 30.0, 0.2  # how long a port of before is tried, and how often
_SOON_S, _MOST = 10.0, 5  # a process that ends so soon has failed; failures in a row


@dataclass(frozen=True)
class Addresses:
    """Of a run's services: torch's store, the durable one (both `host:port`), and the lighthouse ("": none)."""

    store: str
    durable: str
    lighthouse: str


class ServedApart(Services):
    """Of the life `life` of the run `run`. The process ends with the thread that has made this. Raises ConfigError for an
    address or a port that cannot be used, Fatal if the process does not start."""

    def __init__(
        self,
        config: JobConfig,
        folder: Path,
        module: str,
        reserved: Reserved,
        run: str,
        life: int,
        secret: str,
        log: Path,
        before: Addresses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._folder, self._module, self._reserved = config, folder, module, reserved
        self._run, self._life, self._secret, self._log, self._clock = run, life, secret, log, clock
        durable = split_address(before.durable)[1] if before else 0
        plain = split_address(before.store)[1] if before else config.port
        again_s = _PORT_S if before else 0.0
        self._durable_listener = _listener(config.host, durable, again_s)
        self._plain_listener = _listener(config.host, plain, again_s)
        self.durable = address_of(self._durable_listener, config.host)
        self.address = address_of(self._plain_listener, config.host)
        self._lighthouse_port = 0 if has_lighthouse(config) else NO_LIGHTHOUSE
        if before is not None and before.lighthouse:
            self._lighthouse_port = int(before.lighthouse.rsplit(":", 1)[1])
        self._failures, self._begun_s = 0, 0.0
        self._process, told = self._start(begun=before is not None)
        try:
            self.lighthouse = self._first_word(told)
        except BaseException:
            self.close()
            raise
        if self.lighthouse:
            self._lighthouse_port = int(self.lighthouse.rsplit(":", 1)[1])

    def _start(self, begun: bool) -> tuple[subprocess.Popen[bytes], int]:
        told, tells = os.pipe()
        durable, plain = self._durable_listener.fileno(), self._plain_listener.fileno()
        order = StoreOrder(
            str(self._folder),
            self._run,
            self._life,
            self._secret,
            self._config.host,
            durable,
            plain,
            self.address,
            tells,
            self._lighthouse_port,
            self._config.step_timeout_s,
            self._config.heartbeat_s,
            begun,
        )
        self._begun_s = self._clock()
        with open(self._log, "ab") as output:
            process = subprocess.Popen(
                command("helixrt.job.store_process"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                pass_fds=[durable, plain, tells],
                start_new_session=True,
            )
        os.close(tells)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; its log says why
            process.stdin.write(order.to_line())
            process.stdin.flush()
        return process, told

    def _first_word(self, told: int) -> str:
        """The lighthouse's address."""
        with open(told, "rb", buffering=0) as pipe:
            line = pipe.readline() if select.select([pipe], [], [], READY_S)[0] else b""
        if not line:
            raise Fatal(self._cause("did not begin to serve"))
        found: str = json.loads(line)
        return found

    def _cause(self, what: str) -> Cause:
        return Cause(f"the process of the run's store {what}: {last_error(self._log)}", log=str(self._log))

    def look(self) -> None:
        """Start the process again if it has ended. To be called again and again, by the thread that has made this. Raises Fatal
        where that does not help."""
        code = self._process.poll()
        if code is None:
            return
        self._failures = self._failures + 1 if self._clock() - self._begun_s < _SOON_S else 0
        if code == REFUSED_CODE or self._failures >= _MOST:
            raise Fatal(self._cause(f"ended with code {code}, and cannot go on"))
        tell(f"the process of the run's store ended with code {code}; it is started again", sys.stdout)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process, told = self._start(begun=True)
        os.close(told)  # the lighthouse is where it was

    @property
    def pid(self) -> int:
        """Of the process now."""
        return self._process.pid

    def launcher(self) -> Launcher:
        return rank_launcher(self._config, self._folder, self._module, self._reserved)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._durable_listener.close()
        self._plain_listener.close()


def _listener(host: str, port: int, again_s: float) -> socket.socket:
    """Raises ConfigError if the port stays taken for so long."""
    deadline = time.monotonic() + again_s
    while True:
        try:
            return listener_on(host, port)
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PORT_PAUSE_S)
