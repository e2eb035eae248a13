"""How the keeper of a run is started: with a new life of the run, and again when it was lost.

In: the settings of a new life; or the folder of a run whose keeper has ended without having ended the run. Out: what
`keeper.json` says (`KeptRun`). Whether a keeper lives is seen by the lock that it has on `keeper.lock`.

A keeper that is started again serves the store at the same addresses, with the values of its journal. Its ranks have ended with
the one before, which it says in the store: a driver starts them again, from the newest checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from helixrt.errors import Cause, ConfigError, Fatal, HelixError
from helixrt.job.keeper import FILE, LOCK_FILE, SECRET_FILE, KeeperOrder, KeptRun
from helixrt.job.launch_orders import ENDING_KEY
from helixrt.job.launchers import is_named, module_of
from helixrt.job.machine import boot_identity
from helixrt.job.run_lock import is_locked
from helixrt.job.store_process import FOLDER
from helixrt.job.train_function import root_of
from helixrt.job.warm_up import actor_environment
from helixrt.protocol.store_journal import Identity, Refused, replay
from helixrt.replica.rank_log import last_error
from helixrt.replica.store_file import FILE as JOURNAL
from helixrt.replica.telling import tell

if TYPE_CHECKING:
    from helixrt.job.config import JobConfig
    from helixrt.job.driver import JobProgram, Run

STARTED_S = 120.0  # a keeper imports torch, on a busy machine
_GONE = 3  # looks that find no keeper, until it is said
MOST, WITHIN_S = 3, 600.0  # so often a lost keeper is started again in so much time


def start_keeper(config: JobConfig, run: Run, program: JobProgram, secret: str, away_s: float) -> KeptRun:
    """Start the keeper of a new life of the run, on this machine or, with launcher=ray, on this node of the cluster. Raises
    ConfigError for an address that it cannot use, Fatal if it does not start."""
    order = KeeperOrder(
        config.to_plain(),
        str(run.folder),
        run.name,
        run.life,
        program.module,
        asdict(program.reserved),
        secret,
        away_s,
        program.exit_grace_s,
        root_of(module_of(config.launcher)) if is_named(config.launcher) else "",
    )
    (run.folder / FILE).unlink(missing_ok=True)
    return _start(order)


def start_again(folder: Path, kept: KeptRun) -> KeptRun:
    """Start the keeper of this run again. Raises Fatal if that does not work, ConfigError (run) for a run on Ray where this
    process is not in its job: the program's code travels with the job."""
    if kept.config["launcher"] == "ray" and not _is_connected_to_ray():
        rule = "its keeper on Ray was lost; submit its program again with resume=, on the keeper's node, which starts it again"
        raise ConfigError("run", folder, rule)
    order = KeeperOrder(
        kept.config,
        str(folder),
        kept.run,
        kept.life,
        kept.module,
        kept.reserved,
        secret_of(folder),
        kept.away_s,
        kept.exit_grace_s,
        kept.path,
        kept.number + 1,
        {"store": kept.store, "durable": kept.durable, "lighthouse": kept.lighthouse},
    )
    return _start(order)


def _is_connected_to_ray() -> bool:
    from helixrt.ray_cluster.detached import is_connected

    return is_connected()


def _start(order: KeeperOrder) -> KeptRun:
    folder = Path(order.folder)
    process: subprocess.Popen[bytes] | None = None
    log = folder / "logs" / f"keeper.{order.life}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if order.config["launcher"] == "ray":
        from helixrt.ray_cluster.detached import start_detached

        name = f"{order.run}/keeper.{order.life}.{order.number}"
        environment = actor_environment(order.config["threads"])
        try:
            start_detached(name, "helixrt.job.keeper:keep_plain", asdict(order), log, environment)
        except HelixError:
            raise
        except Exception as error:  # of Ray
            why = f"{type(error).__name__}: {error}; {last_error(log)}"
            raise Fatal(Cause(f"the keeper of the run could not be started by Ray: {why}", log=str(log))) from error
    else:
        process = _as_process(order, log)
    deadline = time.monotonic() + STARTED_S
    while (kept := kept_run(folder)) is None or kept.number < order.number:
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            how = "ended at its start" if ended else f"did not start in {STARTED_S:g} s"
            raise Fatal(Cause(f"the keeper of the run {how}: {last_error(log)}", log=str(log)))
        time.sleep(0.05)
    return kept


def _as_process(order: KeeperOrder, log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "helixrt.job.keeper"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # neither Ctrl-C in a terminal nor the end of this process ends it
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended; its log says why
        process.stdin.write(json.dumps(asdict(order)).encode())
        process.stdin.close()
    return process


# ---------------------------------------------------------------- what is there


def kept_run(folder: Path) -> KeptRun | None:
    """Of the run in this folder, if it has a keeper; whether that lives is another matter."""
    try:
        return KeptRun(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError("run", folder, f"its {FILE} is of another version: {error}") from error


def secret_of(folder: Path) -> str:
    """Of the run in this folder, which has a keeper. Raises ConfigError (run) for a user who may not read it."""
    try:
        return (folder / SECRET_FILE).read_text(encoding="ascii")
    except OSError as error:
        rule = f"its {SECRET_FILE} cannot be read, which has the secret of its store: {error.strerror or error}"
        raise ConfigError("run", folder, rule) from error


def keeper_lives(folder: Path) -> bool:
    """Whether the run's keeper has not ended, as its lock says; True where the file system has no locks, which cannot tell."""
    return is_locked(folder / LOCK_FILE)


def is_lost(folder: Path, kept: KeptRun) -> bool:
    """Whether the run's keeper has ended and can be started again: on this machine, and since it was last started, so that the
    journal of its store is whole; and it was not ending the run. Rank actors on other nodes of a Ray cluster may live a little
    longer than their keeper: they are over all the same, since the store says that they have ended."""
    if keeper_lives(folder):
        return False
    try:
        values, _ = replay((folder / FOLDER / JOURNAL).read_bytes(), Identity(kept.run, kept.life, boot_identity()))
    except (OSError, Refused):
        return False
    return ENDING_KEY not in values


class KeeperWatch:
    """Of a driver, from its construction to `close`: a thread that starts the run's keeper again when it is lost."""

    def __init__(self, folder: Path, period_s: float = 1.0) -> None:
        self._folder, self._period_s = folder, period_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="helixrt-keeper-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        lost_s: list[float] = []
        told, gone = "", 0
        while not self._closed.wait(self._period_s):
            try:
                kept = kept_run(self._folder)
                gone = 0 if kept is None or keeper_lives(self._folder) else gone + 1
                if kept is None or not is_lost(self._folder, kept):
                    if kept is not None and gone == _GONE:
                        why = "it was ending the run, or its journal is damaged, or of another machine or start of this one"
                        tell(f"the keeper of the run ({kept.where}) has ended, and cannot be started again here: {why}")
                    continue
                lost_s = [at for at in lost_s if time.monotonic() - at < WITHIN_S] + [time.monotonic()]
                if len(lost_s) > MOST:
                    said = f"was lost {len(lost_s)} times in {WITHIN_S:g} s, and is not started again"
                    tell(f"the keeper of the run {said}")
                    return
                again = start_again(self._folder, kept)
                tell(f"the keeper of the run ({kept.where}) was lost; now it is {again.where}")
                told = ""
            except Exception as error:  # of Ray, too; the next look may succeed, and MOST bounds the attempts
                if str(error) != told:
                    tell(f"the keeper of the run is lost, and is not back yet: {error}")
                told = str(error)

    def close(self) -> None:
        """Idempotent; does not wait for a keeper that is just being started."""
        self._closed.set()
        self._thread.join(self._period_s)
