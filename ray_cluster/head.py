"""A Ray head of our own on this machine, for as long as a block of code.

In: how many CPUs it should claim. Out: its addresses. It comes beside any other cluster on the machine
(own address, ports and folder), dies with this process even if that is killed, and leaves nothing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from helixrt.errors import Cause, Fatal, MissingExtra
from helixrt.ray_cluster.cluster import check_version
from helixrt.replica.orphan import PARENT_VARIABLE

OBJECT_STORE_BYTES = 200 << 20
START_S = 90.0  # until the dashboard answers
MARK_VARIABLE = "HELIXRT_HEAD"  # in the environment of the head and of all it starts: how they are found again


@dataclass(frozen=True)
class Head:
    """`address` is for RAY_ADDRESS, `dashboard` for job submission, `mark` for `marked`, `folder` is Ray's."""

    address: str
    dashboard: str
    mark: str
    folder: Path


@contextmanager
def local_head(cpus: int) -> Iterator[Head]:
    """Start a head, yield it, end it and everything it started. Its folder is kept only if the block fails.

    Raises Fatal if it does not start. Scheduling must never wait for a CPU: say at least one per rank.
    """
    auth = _token_auth()
    folder, mark, kept = Path(tempfile.mkdtemp(prefix="helixrt-ray-")), secrets.token_hex(8), False
    process: subprocess.Popen[bytes] | None = None
    sweeper = _sweeper(mark, folder)
    try:
        head, process = _start(cpus, folder, mark, auth)
        yield head
    except Exception:
        print(f"Ray's own logs are in {folder}", file=sys.stderr)
        kept = True
        raise
    finally:
        _end(process, mark)
        if kept:
            sweeper.kill()
        sweeper.communicate(timeout=30)  # removes the folder


def marked(mark: str) -> list[int]:
    """The processes, other than this one, that the head with this mark has started (Linux; elsewhere none)."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry in environ.read_bytes().split(b"\0") and int(environ.parent.name) != os.getpid():
                found.append(int(environ.parent.name))
        except OSError:
            continue  # not ours, or gone
    return found


def _start(cpus: int, folder: Path, mark: str, auth: Mapping[str, str]) -> tuple[Head, subprocess.Popen[bytes]]:
    host = _own_loopback()
    ports = {name: _free_port(host) for name in ("gcs", "dashboard", "agent", "client")}
    log = folder / "head.log"
    options = {
        "node-ip-address": host,
        "port": ports["gcs"],
        "dashboard-host": "127.0.0.1",
        "dashboard-port": ports["dashboard"],
        "dashboard-agent-listen-port": ports["agent"],
        "ray-client-server-port": ports["client"],
        "num-cpus": max(cpus, os.cpu_count() or 1),
        "object-store-memory": OBJECT_STORE_BYTES,
        "temp-dir": folder,
        "include-dashboard": "true",
        "log-color": "false",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "helixrt.replica.orphan", "ray.scripts.scripts", "start", "--head", "--block", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal is for us; we end the head in good order
            env={
                **os.environ,
                **auth,
                MARK_VARIABLE: mark,
                PARENT_VARIABLE: str(os.getpid()),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_memory_monitor_refresh_ms": "0",  # would end our processes when others fill the machine
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave CUDA_VISIBLE_DEVICES of ranks without num_gpus alone
            },
        )
    head = Head(f"{host}:{ports['gcs']}", f"http://127.0.0.1:{ports['dashboard']}", mark, folder)
    deadline = time.monotonic() + START_S
    try:
        # Ray writes that file last of all; the dashboard answers earlier or later.
        while not ((folder / "ray_current_cluster").exists() and _answers(head.dashboard)):
            if process.poll() is not None or time.monotonic() > deadline:
                how = f"did not start in {START_S:g} s" if process.returncode is None else "ended at its start"
                from helixrt.replica.rank_log import last_error

                raise Fatal(Cause(f"the Ray head {how}: {last_error(log)}", log=str(log)))
            time.sleep(0.1)
    except BaseException:
        _end(process, mark)
        raise
    return head, process


def _end(process: subprocess.Popen[bytes] | None, mark: str, patience_s: float = 10.0) -> None:
    """Ask the head to end, wait until all it started is gone, kill what stays."""
    if process is None:
        return
    process.terminate()
    deadline = time.monotonic() + patience_s
    while (process.poll() is None or marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    _kill_marked(mark)


def _kill_marked(mark: str) -> None:
    """Kill whatever there is, and what that has started meanwhile, until nothing is left."""
    deadline = time.monotonic() + 10.0
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def _sweeper(mark: str, folder: Path) -> subprocess.Popen[bytes]:
    """A process that waits for our end (its input's end) to do what we then cannot do any more.

    Not all of Ray's processes end with the one that started them: some agents stay for minutes.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "helixrt.ray_cluster.head", mark, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def sweep(mark: str, folder: Path) -> None:
    """The life of the sweeper."""
    sys.stdin.buffer.read()
    _kill_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


def _token_auth() -> dict[str, str]:
    """Ray's token authentication, by the user's token file, which is made if there is none.

    The servers of a head listen on all interfaces; they refuse requests without the token. It is also set in this process,
    unless it has read its settings already: then Ray's own rule applies, which is to use a token that is there. Raises
    ConfigError (ray) for a version that knows no token, MissingExtra without ray.
    """
    try:
        check_version(metadata.version("ray"), "0.0.0.0")
    except metadata.PackageNotFoundError:
        raise MissingExtra("ray", "ray", "a Ray head on this machine") from None
    made = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
    )
    if made.returncode != 0:
        raise Fatal("Ray could not make the token of its servers: `ray get-auth-token --generate` failed")
    mode = {"RAY_AUTH_MODE": "token"}
    if "ray" not in sys.modules:
        os.environ.update(mode)
    return mode


def _own_loopback() -> str:
    """An address on loopback that no other head here has.

    Ray takes 127.0.0.1 as a wish to be reached from elsewhere; all of 127/8 is loopback on Linux alone.
    """
    if not sys.platform.startswith("linux"):
        return "127.0.0.1"
    return f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(255)}.{1 + secrets.randbelow(254)}"


def _free_port(host: str) -> int:
    """A port that is free on `host` and on 127.0.0.1: some of Ray's servers want both."""
    while True:
        with socket.socket() as here, socket.socket() as there:
            here.bind(("127.0.0.1", 0))
            port: int = here.getsockname()[1]
            try:
                if host != "127.0.0.1":
                    there.bind((host, port))
                return port
            except OSError:
                continue


def _answers(dashboard: str) -> bool:
    try:
        with urllib.request.urlopen(f"{dashboard}/api/version", timeout=5):
            return True
    except urllib.error.HTTPError:
        return True  # it asks for a token, so it is running
    except OSError:
        return False


if __name__ == "__main__":
    sweep(sys.argv[1], Path(sys.argv[2]))
