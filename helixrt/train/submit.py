"""`python -m helixrt.train.submit [+experiment=NAME] [key=value ...]`: train as a Ray job and watch it.

In: hydra overrides, as for `helixrt.train`. Out: the job's output as it comes, its exit code. The
cluster is the one RAY_ADDRESS names, else a local head on loopback that lives as long as this
command. Settings are checked before anything is started. Ctrl-C stops the job, and the head if it is
ours; nothing stays behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helixrt.errors import ConfigError, MissingExtra
from helixrt.train.config import TrainConfig

DEFAULT_EXPERIMENT = "tiny"
# Ray takes 127.0.0.1 as a wish to be reached from elsewhere; all of 127/8 is loopback on Linux alone.
LOOPBACK_NODE = "127.0.0.2" if sys.platform.startswith("linux") else "127.0.0.1"
OBJECT_STORE_BYTES = 200 << 20
_RAYS_OWN = re.compile(r"(\x1b\[\d+m)?\((raylet|autoscaler)|Running entrypoint for job |$")
STOP_S = 15.0  # how long a job may take to stop
HEAD_VARIABLE = "HELIXRT_HEAD"  # in the environment of our head and of all it starts: how they are found again

# What a job does not need; also everything .gitignore names (Ray reads it).
EXCLUDES = (
    ".git", ".venv", "outputs", "benchmarks", "papers", "notebooks", "tests", "build", "dist", "__pycache__",
    ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".import_linter_cache", "*.egg-info",
)  # fmt: skip


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """The overrides with an experiment and an absolute `output.root` where they name none."""
    experiments = [o for o in overrides if _key(o) == "experiment"] or [f"+experiment={DEFAULT_EXPERIMENT}"]
    roots = [o.partition("=")[2] for o in overrides if _key(o) == "output.root"] or ["outputs"]
    rest = [o for o in overrides if _key(o) not in ("experiment", "output.root")]
    return [*experiments, *rest, f"output.root={Path(roots[-1]).absolute()}"]


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def check(config: TrainConfig) -> None:
    """Raise ConfigError unless the settings are valid for a Ray job."""
    from helixrt.train.validate import validate

    try:
        import ray.job_submission  # noqa: F401
    except ImportError:
        raise MissingExtra("ray", "ray", "`make train`") from None
    if config.launcher == "local":
        raise ConfigError("launcher", "local", "a Ray job runs its ranks with Ray; for local ranks: python -m helixrt.train")
    validate(config)


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
    return env if root is None else {**env, "working_dir": str(root), "excludes": list(EXCLUDES)}


@contextmanager
def local_head(cpus: int) -> Iterator[str]:
    """A Ray head of our own on loopback; yields its dashboard's URL.

    Its processes are this process's children and die with it. Session files are kept only if the
    block raises. Scheduling must never wait for a CPU, so it claims at least one per rank.
    """
    import ray

    folder = Path(tempfile.mkdtemp(prefix="helixrt-ray-"))
    token = secrets.token_hex(8)
    settings = {
        HEAD_VARIABLE: token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # ends processes of a machine that others fill
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        context = ray.init(
            address="local",
            num_cpus=max(cpus, os.cpu_count() or 1),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            _node_ip_address=LOOPBACK_NODE,
            _temp_dir=str(folder),
        )
        yield f"http://{context.dashboard_url}"
    finally:
        ray.shutdown()
        _end_marked(token)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    shutil.rmtree(folder, ignore_errors=True)


def _end_marked(token: str, patience_s: float = 5.0) -> None:
    """Wait for what our head started to be gone, then kill what is not (Linux; elsewhere Ray's own care has to do)."""
    deadline = time.monotonic() + patience_s
    while (left := marked(token)) and time.monotonic() < deadline + 5.0:
        if time.monotonic() > deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(0.05)


def marked(token: str) -> list[int]:
    """The processes, other than this one, that were started with this token in their environment."""
    mark = f"{HEAD_VARIABLE}={token}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0") and int(environ.parent.name) != os.getpid():
                found.append(int(environ.parent.name))
        except OSError:
            continue  # not ours, or gone
    return found


def follow(client: Any, job: str) -> None:
    """Print the job's output as it comes, until the job has ended."""
    shown, line = 0, ""

    def show(text: str) -> None:
        """Print the lines that are complete, and not Ray's own account of processes that the log explains."""
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

    while True:
        try:
            asyncio.run(tail())
        except (RuntimeError, OSError):
            time.sleep(0.5)  # the connection broke; the job has not ended for that
        if client.get_job_status(job).is_terminal():
            break
        time.sleep(0.1)
    show(client.get_job_logs(job)[shown:] + "\n")


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


def submit(address: str | None, overrides: Sequence[str]) -> int:
    """Run the job on the cluster at `address` (a dashboard's URL, or whatever RAY_ADDRESS may be)."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(address)
    job = client.submit_job(entrypoint=entrypoint(overrides), runtime_env=runtime_env())
    try:
        follow(client, job)
        return exit_code(client, job)
    except BaseException:
        stop(client, job)
        raise


def main(arguments: Sequence[str]) -> int:
    from helixrt.train.schema import command

    overrides = with_defaults(arguments)
    return command(overrides, lambda config: run(config, overrides))


def run(config: TrainConfig, overrides: Sequence[str]) -> int:
    """Train as the job that the overrides describe; `config` is what they make. Returns an exit code."""
    check(config)
    logging.getLogger("ray").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if os.environ.get("RAY_ADDRESS"):
            return submit(None, overrides)
        with local_head(config.mesh.replicas * config.mesh.pp) as address:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Ray has set its own
            return submit(address, overrides)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
