"""A run whose replicas are started by others: `helixrt serve`, and the server behind one local replica of `helixrt.init`.

In: a `JobConfig`, a secret. Out: a driver that hosts the run's store, the membership service, the metrics and the report, and
starts nothing. As `python -m helixrt.job.served` it reads a `ServerOrder` as JSON from standard input, and writes the place to
join as one line of JSON to the file descriptor that the order names.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from helixrt.errors import HelixError
from helixrt.job.config import JobConfig
from helixrt.job.controller import Terminated
from helixrt.job.driver import Driver, JobProgram, Run, new_run
from helixrt.job.external_launcher import ExternalLauncher, Patience
from helixrt.replica.contracts import Launcher
from helixrt.replica.run_keys import SERVED_KEY

INTERRUPTED = 130


@dataclass(frozen=True)
class ServerOrder:
    """What the server of one local replica is told."""

    config: dict[str, Any]
    secret: str
    ready: int  # file descriptor for the line that says where the run is


def fingerprint(run: str, secret: str) -> str:
    """Tells whether two processes have the same secret, without telling it."""
    return hashlib.sha256(f"{run}:{secret}".encode()).hexdigest()


class ServedDriver(Driver):
    """`wait_s`: how long a replica that nobody starts (again) is waited for."""

    def __init__(self, config: JobConfig, run: Run, secret: str, wait_s: float) -> None:
        super().__init__(config, run, JobProgram(""), secret)
        self._wait_s = wait_s
        mesh = asdict(config.mesh)
        known = {"run": run.name, "replicas": mesh.pop("replicas"), "mesh": mesh, "secret": fingerprint(run.name, self.secret)}
        self.store.put_if_absent(SERVED_KEY, json.dumps(known))

    def launcher(self) -> Launcher:
        return ExternalLauncher(self.store, self.config.mesh, Patience(1.5 * self.timeouts.step_s, self._wait_s))

    def run(self) -> int:
        """As the base's; ended by Ctrl-C or SIGTERM it still writes the report."""
        try:
            return super().run()
        except (KeyboardInterrupt, Terminated) as why:
            self._report(self._finished(), self._advance())
            self.output.say("the server was asked to end before the run had ended")
            return INTERRUPTED if isinstance(why, KeyboardInterrupt) else int(str(why.code))


def serve(config: JobConfig, secret: str, wait_s: float, ready: Callable[[ServedDriver], None] = lambda driver: None) -> int:
    """Make the run's folder, serve the run to its end; its exit code. `ready` is called as soon as replicas may come."""
    driver = ServedDriver(config, new_run(config), secret, wait_s)
    ready(driver)
    return driver.run()


def main() -> int:
    """The server of one local replica."""
    order = ServerOrder(**json.loads(sys.stdin.read()))

    def say_where(driver: ServedDriver) -> None:
        with os.fdopen(order.ready, "w", encoding="utf-8") as told:
            told.write(json.dumps({"store": driver.address, "folder": str(driver.run_.folder)}) + "\n")

    try:
        return serve(JobConfig.from_plain(order.config), order.secret, 60.0, say_where)
    except HelixError as error:
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
