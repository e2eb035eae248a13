"""`python -m helixrt.train.submit [--detach] [+experiment=NAME] [key=value ...]`: train as a Ray job and watch it.

In: hydra overrides, as for `helixrt.train`. Out: the job's output as it comes, its exit code. The
cluster is the one RAY_ADDRESS names, else a head on this machine, with token authentication, that lives as long as this
command. Settings are checked before anything is started. Ctrl-C stops the job, and the head if it is
ours; nothing stays behind.

A connection that is lost does not stop the job: it is made again. With `--detach` the command ends when the job is submitted.
`helixrt attach JOB` follows a job again; its end, and Ctrl-C there, leave the job alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from helixrt.errors import ConfigError, Fatal, MissingExtra, interrupted
from helixrt.ray_cluster.cluster import code_env
from helixrt.train.config import TrainConfig

DEFAULT_EXPERIMENT = "tiny"
DETACH = "--detach"
# Lines that Ray writes into a job's output: deaths of processes that our own log explains better, and greetings.
_RAYS_OWN = re.compile(r"(\x1b\[\d+m)?\((raylet|autoscaler)|Running entrypoint for job |.*\tINFO job_manager\.py:|$")
AGENT_S = 60.0  # how long a head may take until it accepts jobs
STOP_S = 15.0  # how long a job may take to stop
RECONNECT_S = 300.0  # how long a cluster that does not answer is asked again


class Unreachable(Fatal):
    """The cluster does not answer any more. The job is left alone."""


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """The overrides with an experiment, where they name none."""
    experiments = [o for o in overrides if _key(o) == "experiment"] or [f"+experiment={DEFAULT_EXPERIMENT}"]
    return [*experiments, *(o for o in overrides if _key(o) != "experiment")]


def at(root: str, overrides: Sequence[str]) -> list[str]:
    """The overrides with the absolute path of the folder `root` as `output.root`: the job runs in another folder."""
    path = str(Path(root).absolute())
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + m[2].replace("'", r"\'"), path).replace("${", r"\${")
    return [*(o for o in overrides if _key(o) != "output.root"), f"output.root='{escaped}'"]


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def check(config: TrainConfig) -> None:
    """Raise ConfigError unless the settings are valid for a Ray job. Where the cluster is not this machine's, the job itself
    checks what depends on the machine: files, packages, addresses."""
    from helixrt.train.validate import check_settings, validate

    if importlib.util.find_spec("ray") is None:
        raise MissingExtra("ray", "ray", "`make train`")
    if config.launcher == "local":
        raise ConfigError("launcher", "local", "a Ray job runs its ranks with Ray; for local ranks: python -m helixrt.train")
    (check_settings if os.environ.get("RAY_ADDRESS") else validate)(config)


def entrypoint(overrides: Sequence[str]) -> str:
    """The job's shell command: this Python where the node has it, else the node's own."""
    python = shlex.quote(sys.executable)
    return f'P={python}; [ -x "$P" ] || P=python; exec "$P" -m helixrt.train {shlex.join(overrides)}'


def working_dir() -> Path | None:
    """The checkout this package runs from; None when it is installed, and so on the cluster's side too."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").exists() else None


def runtime_env() -> dict[str, Any]:
    env: dict[str, Any] = {"env_vars": {"PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0"}}
    root = working_dir()
    return {**env, **code_env("" if root is None else str(root))}


def begin(client: Any, job: str, overrides: Sequence[str]) -> None:
    """Submit the job under the id `job`. A head that has just started may have no agent for it yet: tried again."""
    deadline = time.monotonic() + AGENT_S
    while True:
        try:
            client.submit_job(submission_id=job, entrypoint=entrypoint(overrides), runtime_env=runtime_env())
            return
        except RuntimeError as refused:
            if "No available agent" not in str(refused) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def follow(client: Any, job: str) -> None:
    """Print the job's output as it comes, until the job has ended."""
    shown, line = 0, ""

    def show(text: str) -> None:
        """Print the lines that are complete and ours."""
        nonlocal line
        *complete, line = (line + text).split("\n")
        for one in complete:
            if not _RAYS_OWN.match(one):
                print(one, flush=True)

    async def tail() -> None:
        nonlocal shown
        received = 0
        async for text in client.tail_job_logs(job):
            # A tail begins at the start of the log: after a broken connection, skip what was shown.
            new = text[max(0, shown - received) :]
            received += len(text)
            shown = max(shown, received)
            show(new)

    lost_s: float | None = None  # since when the cluster has not answered; the job has not ended for that
    while True:
        with suppress(Exception):  # of no common class; whether the cluster answers shows below
            asyncio.run(tail())
        try:
            if client.get_job_status(job).is_terminal():
                show(client.get_job_logs(job)[shown:] + "\n")
                return
            lost_s = None
            time.sleep(0.1)
        except (RuntimeError, OSError) as error:
            now = time.monotonic()
            if lost_s is None:
                lost_s = now
                print(f"the connection to the cluster is lost ({_first_line(error)}); the job goes on", file=sys.stderr)
            elif now - lost_s > RECONNECT_S:
                raise Unreachable(f"the cluster did not answer for {RECONNECT_S:g} s; {again(job)}") from error
            time.sleep(1.0)


def again(job: str) -> str:
    """How the job is seen again."""
    return f"job {job} goes on; follow it with: helixrt attach {job}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def exit_code(client: Any, job: str) -> int:
    """The exit code of the job's command; 1 when it never ran, with Ray's word on why."""
    info = client.get_job_info(job)
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    if str(info.status) != "SUCCEEDED":
        print(f"the job did not run: {info.message}", file=sys.stderr)
    return 0 if str(info.status) == "SUCCEEDED" else 1


def stop(client: Any, job: str) -> None:
    """Stop the job and wait until it has ended, for a limited time."""
    client.stop_job(job)
    deadline = time.monotonic() + STOP_S
    while not client.get_job_status(job).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.1)


def client_of(address: str | None) -> Any:
    """Of the cluster at `address` (a dashboard's URL, or whatever RAY_ADDRESS may be). Raises ConfigError (RAY_ADDRESS)."""
    import ray.exceptions
    from ray.job_submission import JobSubmissionClient

    no_token: Any = getattr(ray.exceptions, "AuthenticationError", ())  # older versions of Ray ask for none
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, ValueError) as unreachable:
        where = address or os.environ.get("RAY_ADDRESS", "")
        raise ConfigError("RAY_ADDRESS", where, "no Ray cluster with a dashboard answers there") from unreachable
    except no_token as refused:
        where = address or os.environ.get("RAY_ADDRESS", "")
        rule = "requires a token that was not found; put it into RAY_AUTH_TOKEN, or a file named by RAY_AUTH_TOKEN_PATH"
        raise ConfigError("RAY_ADDRESS", where, rule) from refused


def submit(address: str | None, overrides: Sequence[str], detach: bool = False) -> int:
    """Run the job on the cluster at `address`, as `client_of` takes it; `detach`: leave it alone once it is submitted."""
    client = client_of(address)
    job = f"helixrt-{secrets.token_hex(6)}"
    try:
        begin(client, job, overrides)
        if detach:
            print(again(job))
            return 0
        follow(client, job)
        return exit_code(client, job)
    except Unreachable:
        raise
    except BaseException:
        with suppress(RuntimeError, OSError):  # not begun, or the cluster is gone: the first exception is more useful
            stop(client, job)
        raise


def attach(job: str) -> int:
    """Follow a job that was submitted before, to its end; the job's exit code. Ctrl-C leaves the job alone. Raises ConfigError
    for a cluster that does not answer or does not know the job."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtra("ray", "ray", "following a Ray job")
    if not os.environ.get("RAY_ADDRESS"):
        rule = "is not set; it names the cluster of the job (a dashboard's URL, or `auto` on one of its nodes)"
        raise ConfigError("RAY_ADDRESS", "", rule)
    use_token()
    logging.disable(logging.WARNING)
    client = client_of(None)
    try:
        client.get_job_status(job)
    except RuntimeError as unknown:
        raise ConfigError("job", job, f"the cluster does not know this job: {_first_line(unknown)}") from unknown
    try:
        follow(client, job)
    except KeyboardInterrupt:
        print(again(job), file=sys.stderr)
        return interrupted()
    return exit_code(client, job)


def use_token() -> None:
    """Show a running cluster our token if we have one: new versions of Ray ask for it, and by default show none."""
    tokens = (os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH"))
    if any(tokens) or Path("~/.ray/auth_token").expanduser().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def main(arguments: Sequence[str]) -> int:
    from helixrt.train.schema import command

    detach = DETACH in arguments
    overrides = with_defaults([argument for argument in arguments if argument != DETACH])
    return command(overrides, lambda config: run(config, at(config.output.root, overrides), detach))


def run(config: TrainConfig, overrides: Sequence[str], detach: bool = False) -> int:
    """Train as the job that the overrides describe; `config` is what they make. Returns an exit code."""
    from helixrt.ray_cluster.head import local_head
    from helixrt.train.mesh import mesh_of

    if os.environ.get("RAY_ADDRESS"):
        use_token()
    elif detach:
        rule = "needs RAY_ADDRESS, a cluster that stays: the head that this command starts ends with it"
        raise ConfigError("argument", DETACH, rule)
    check(config)
    logging.disable(logging.WARNING)  # this process only submits; Ray's modules each set their own level
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if os.environ.get("RAY_ADDRESS"):
            return submit(None, overrides, detach)
        print("starting a Ray head on this machine …", flush=True)
        with local_head(config.mesh.replicas * mesh_of(config).ranks) as head:
            return submit(head.dashboard, overrides)
    except Fatal as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return interrupted()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
