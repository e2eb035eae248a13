"""`helixrt.init`: a session for a script that stays a script.

In: the environment and the settings. Out: a `Session`. Under torchrun, Slurm or in any process with HELIXRT_STORE it is one
replica of the run that `helixrt serve` serves (`environment`). Elsewhere it is one local replica: a child process serves the
run, so that `python script.py` works as it is. The session ends with the process.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import secrets
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from helixrt.engines.update import Policy
from helixrt.errors import ConfigError, Fatal, MisuseError
from helixrt.job.config import JobConfig, MeshConfig
from helixrt.job.environment import Joined, SessionChoices, joined
from helixrt.job.launch import RunOptions
from helixrt.job.logs import configure_logging
from helixrt.job.mesh import Mesh
from helixrt.job.policies import MISUSE_EXIT
from helixrt.job.served import ServerOrder
from helixrt.job.session import Session
from helixrt.job.starters import STORE, Place, check_alone, place_of, starter
from helixrt.job.train_function import RANK_VARIABLE
from helixrt.replica.orphan import PARENT_VARIABLE
from helixrt.replica.telling import flush_all, tell, tell_traceback

REPORT_S = 120.0  # for the server's report, after the replica has ended
START_S = 120.0  # for the server to start
_session: Session | None = None  # of this process


def init(
    *,
    mesh: Mesh = Mesh(),  # noqa: B008 frozen
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    policy: Policy = Policy(),  # noqa: B008 frozen
    launcher: str = "auto",
    storage: str | Path = "outputs",
    name: str = "run",
    options: RunOptions = RunOptions(),  # noqa: B008 frozen
) -> Session:
    """The session of this process, which is one replica, or a rank of one of several ranks. Call it once, in the main thread,
    before models are built.

    `mesh`: the ranks of a replica, each a process of one torchrun or srun; `session.parallelize` places the model on them.
    `launcher`: "environment" joins the run that HELIXRT_STORE names, as replica HELIXRT_REPLICA (see `helixrt.job.starters`);
    "local" is a run of this one replica, of one rank; "auto" is "environment" where HELIXRT_STORE is set or torchrun, Slurm or
    Ray started this process, else "local". The settings are those of `helixrt.run`; in a run that `helixrt serve` serves,
    `storage` and `name` are the server's, and an option of the runtime that the server does not have alike is refused. Compute
    threads stay as they are.

    The replica ends with the process: after an exception it is lost, and joins again when it is started again.
    Raises ConfigError for settings that cannot work, and MisuseError for a second call.
    """
    global _session
    if RANK_VARIABLE in os.environ:
        raise MisuseError("helixrt.init was called in a rank that helixrt.run started; its session is the argument of train")
    if _session is not None:
        raise MisuseError("helixrt.init was called twice; a process is one rank of one replica")
    configure_logging()
    mesh.check_supported()
    if launcher not in ("auto", "environment", "local"):
        raise ConfigError("launcher", launcher, "must be auto, environment or local")
    config = options.job(name, seed, storage, MeshConfig(1, 1))
    choices = SessionChoices(seed, device, dtype, policy.lr, options.buffers, options.loader_every, mesh=mesh, runtime=config)
    outside = launcher == "environment" or (launcher == "auto" and (STORE in os.environ or starter() != ""))
    stack = ExitStack()
    with ExitStack() as failing:
        failing.push(stack)
        if outside:
            place = place_of(mesh=mesh)
        else:
            if launcher == "auto":
                check_alone("local")
            if mesh.ranks > 1:
                how = f"start {mesh.ranks} for each replica with torchrun, or use helixrt.run, which starts them"
                raise ConfigError("mesh", mesh, f"this is one process; {how}")
            if multiprocessing.parent_process() is not None:
                guard = 'put the program under `if __name__ == "__main__":`, since worker processes import the script'
                raise MisuseError(f"helixrt.init was called in a worker process; {guard}")
            choices.config(config)  # wrong settings are refused before anything is started
            config.check_runtime()
            place = stack.enter_context(_local_server(config))
        here = stack.enter_context(joined(place, choices))
        _session = here.session
        failing.pop_all()
    atexit.register(_close, stack, here, os.getpid())
    return _session


@contextmanager
def _local_server(config: JobConfig) -> Iterator[Place]:
    """A child process that serves a run of one replica, and writes its report when the replica has ended."""
    secret = secrets.token_hex(32)
    read, write = os.pipe()
    with os.fdopen(read, encoding="utf-8") as told:
        server = subprocess.Popen(
            [sys.executable, "-m", "helixrt.replica.orphan", "helixrt.job.served"],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
            start_new_session=True,  # Ctrl-C is for the script, which tells the server
            env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        os.close(write)
        assert server.stdin is not None
        with server.stdin as order:
            order.write(json.dumps(asdict(ServerOrder(config.to_plain(), secret, write))).encode())
        where = told.readline() if select.select([told], [], [], START_S)[0] else ""
    if not where:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
        code = _wait(server)
        why = f"ended with exit code {code} before the run began, for which it has {START_S:g} s; see its message"
        raise Fatal(f"the server of the run {why}")
    try:
        yield Place(json.loads(where)["store"], 0, secret)
    except BaseException:
        server.send_signal(signal.SIGINT)
        _wait(server)
        raise
    if _wait(server) != 0:
        raise Fatal(f"the run failed; its folder is {json.loads(where)['folder']}")


def _wait(server: subprocess.Popen[bytes]) -> int:
    try:
        return server.wait(REPORT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def _close(stack: ExitStack, here: Joined, process: int) -> None:
    """At the end of the process: end the replica in good order, or say why it was lost."""
    if os.getpid() != process:  # a fork of it
        return
    session = here.session
    failed: Any = here.departed or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    unfinished = not session.began or session.left_early
    if failed is not None and (unfinished or not hasattr(sys, "ps1")):  # interactive: it may be of any line before
        try:  # the interpreter has printed it
            stack.__exit__(type(failed), failed, failed.__traceback__)
        except BaseException as error:
            if error is not failed:
                tell_traceback(error)
        for note in getattr(failed, "__notes__", ()):
            tell(str(note))
        return
    try:
        stack.__exit__(None, None, None)
    except BaseException as error:
        first = traceback.format_exception_only(error) if isinstance(error, MisuseError) else traceback.format_exception(error)
        tell("".join(first).rstrip("\n"))
        flush_all()
        os._exit(MISUSE_EXIT if isinstance(error, MisuseError) else 1)
