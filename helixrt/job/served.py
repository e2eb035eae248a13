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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from helixrt.errors import ConfigError, HelixError, interrupted
from helixrt.job.config import JobConfig
from helixrt.job.controller import Terminated
from helixrt.job.driver import Driver, JobProgram, Run, new_run, reopened_run
from helixrt.job.external_launcher import ExternalLauncher, Patience
from helixrt.job.lineage_files import write_durably
from helixrt.job.resume import checkpoint_to_resume, deals_of
from helixrt.job.way_back import way_back
from helixrt.replica.contracts import Launcher, RunStore
from helixrt.replica.run_keys import SERVED_KEY
from helixrt.replica.versions import versions

SETTINGS_KEY = "served/settings"  # of the sessions, which all replicas must have alike
SETTINGS_FILE = "sessions.json"  # in the run's folder: the same, for a resumption


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
        self._settings_kept = _restore_settings(self.store, run)
        mesh = asdict(config.mesh)
        known = {"run": run.name, "replicas": mesh.pop("replicas"), "mesh": mesh, "secret": fingerprint(run.name, self.secret)}
        known |= {"config": config.to_plain(), "versions": versions()}
        self.store.put_if_absent(SERVED_KEY, json.dumps(known))

    def launcher(self) -> Launcher:
        patience = Patience(1.5 * self.timeouts.step_s, self._wait_s, start_s=self.timeouts.start_s)
        return ExternalLauncher(self.store, self.config.mesh, patience)

    def _tick(self) -> None:
        super()._tick()
        if not self._settings_kept and (agreed := self.store.get(SETTINGS_KEY)) is not None:
            with suppress(OSError):  # it is tried again
                write_durably(self.run_.folder / SETTINGS_FILE, agreed)
                self._settings_kept = True

    def run(self) -> int:
        """As the base's; the exit code also after a signal."""
        try:
            return super().run()
        except (KeyboardInterrupt, Terminated) as why:
            return interrupted() if isinstance(why, KeyboardInterrupt) else int(str(why.code))


def _restore_settings(store: RunStore, run: Run) -> bool:
    """Have the replicas of a resumed run agree on the settings that their sessions had before; whether they are known."""
    file = run.folder / SETTINGS_FILE
    if run.life == 0 or not file.is_file():
        return False
    store.put_if_absent(SETTINGS_KEY, file.read_text(encoding="utf-8"))
    return True


def serve(
    config: JobConfig,
    secret: str,
    wait_s: float,
    ready: Callable[[ServedDriver], None] = lambda driver: None,
    resume: str = "",
) -> int:
    """Make the run's folder, or go on with the run that `resume` names (a folder, or "latest"), and serve it to its end; its
    exit code. `ready` is called as soon as replicas may come. Raises ConfigError for a run that cannot be resumed, or a folder
    that cannot be made."""
    try:
        config, run = resumed(config, resume) if resume else (config, new_run(config))
    except OSError as error:
        raise ConfigError("storage", config.output.root, f"cannot be written: {error.strerror or error}") from error
    try:
        driver = ServedDriver(config, run, secret, wait_s)
        ready(driver)
    except BaseException:
        if run.lock is not None:
            run.lock.close()
        raise
    while (code := driver.run()) != 0 and (back := way_back(driver)) is not None:
        config = replace(config, resume=True, deal=back.deal, port=int(driver.address.rpartition(":")[2]))
        driver = ServedDriver(config, back.run, secret, wait_s)
        driver.output.say(f"{back.text}; its programs are waited for: start them again, if torchrun does not")
    return code


def resumed(config: JobConfig, which: str) -> tuple[JobConfig, Run]:
    """The settings and the new life of a served run. Raises ConfigError (resume; replicas or mesh.dp_shard if
    its data cannot be dealt over so many streams)."""
    folder, checkpoint = checkpoint_to_resume(config, which)
    try:
        begun = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "train" in begun:
            raise ConfigError("resume", folder, "was begun by helixrt.run; resume it by helixrt.run(resume=...)")
        JobConfig.from_plain(begun)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("resume", folder, f"its config.json cannot be read: {error}") from error
    deal = deals_of(config.mesh, folder, checkpoint.record)
    dealt = deal != checkpoint.record.deal
    if dealt and not (folder / SETTINGS_FILE).is_file():
        rule = f"has no {SETTINGS_FILE}, whose seed the order of its data follows: resume it with as many replicas and dp_shard"
        raise ConfigError("resume", folder, f"{rule} ranks as before")
    return replace(config, resume=True, deal=deal), reopened_run(folder, checkpoint, config.mesh.replicas, dealt=dealt)


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
