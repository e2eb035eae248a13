"""The Ray actor in whose process one rank lives.

`run` is the rank's life and takes one thread of the actor; everything else is answered by others
meanwhile. All methods may be called again: they answer the same and do nothing twice. Nothing heavy
is imported before the environment is set and the log is open.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixrt.replica.variables import adopt

RUN_GROUP, CONTROL_GROUP = "run", "control"
CONCURRENCY_GROUPS = {RUN_GROUP: 2, CONTROL_GROUP: 4}  # run: the call that trains, and the request for its result


@dataclass(frozen=True)
class Process:
    """The place of an actor: its node's id, and its process id there."""

    node: str
    pid: int


@dataclass(frozen=True)
class Outcome:
    """How a rank's entry function ended: its exit code, and the error if it raised."""

    code: int
    error: str = ""


class RankActor:
    """Made into an actor by `RayLauncher`; `entry` is `module:function`, called with the spec.

    `log` is the file that gets the process's output (on a node that cannot write it, Ray's own worker
    log keeps it); `environment` is set before the entry's module is imported.
    """

    def __init__(self, entry: str, log: str, environment: Mapping[str, str]) -> None:
        self._entry = entry
        self._lock = threading.Lock()
        self._begun = False
        self._done = threading.Event()
        self._outcome = Outcome(0)
        adopt(environment)
        send_output_to(Path(log))

    def process(self) -> Process:
        import ray

        return Process(ray.get_runtime_context().get_node_id(), os.getpid())

    def run(self, spec: dict[str, Any]) -> Outcome:
        """The rank's life. A second call waits for the first and returns its outcome."""
        with self._lock:
            first, self._begun = not self._begun, True
        if first:
            self._outcome = _call(self._entry, spec)
            sys.stdout.flush()
            sys.stderr.flush()
            self._done.set()
        self._done.wait()
        return self._outcome

    def call_transport(self, method: str, *arguments: Any) -> Any:
        """A public method of what this process serves (`serve_transport`). Raises LookupError before it does."""
        transport = _served.get("transport")
        if transport is None or method.startswith("_"):
            raise LookupError(f"this rank serves no transport method {method!r}")
        return getattr(transport, method)(*arguments)


# Ray gives code inside an actor no way to its own actor object; a process holds one rank, so one entry.
_served: dict[str, Any] = {}


def serve_transport(transport: Any | None) -> None:
    """Let other ranks reach `transport` through this process's actor (`call_transport`); None ends it."""
    _served["transport"] = transport


def _call(entry: str, spec: dict[str, Any]) -> Outcome:
    try:
        from helixrt.replica.contracts import RankSpec

        module, _, function = entry.partition(":")
        return Outcome(int(getattr(importlib.import_module(module), function)(RankSpec.from_plain(spec)) or 0))
    except SystemExit as leaving:
        return Outcome(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except BaseException as error:
        traceback.print_exc()
        return Outcome(1, f"{type(error).__name__}: {error}")


def send_output_to(log: Path) -> None:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)
