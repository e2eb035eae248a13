"""The hosts of a network as nodes of one Ray cluster, each with a raylet, an object store and session files of its own.

In: a `Network`, which of its hosts are nodes, what each has. Out: `RayNodes`, which starts and ends nodes while jobs run.
Host 0 is the head; hosts that are no nodes are outside of the cluster, and submit jobs.

Two raylets on one machine would use the same folders: each node has a mount namespace in which `/dev/shm` and the cluster's
session folder are its own. All else of the file system is shared by the nodes, so a folder of it is shared storage; `private`
takes that away.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from helixrt.errors import ConfigError
from helixrt.lab import namespaces
from helixrt.lab.namespaces import NetworkError
from helixrt.lab.net import Network

PORT, DASHBOARD_PORT = 6379, 8265  # free: each host is a namespace
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes is 75 MiB
START_S = 180.0
TRIES = 3  # Ray gives a node half a minute to start, which is too short on a busy machine
# A node is lost after four checks without an answer, of at most a second each; Ray's own figures are minutes.
_CHECKS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
_STARTED = b"Ray runtime started"
_ANSWERS = """
import sys, time, urllib.error, urllib.request
while True:
    try:
        urllib.request.urlopen(sys.argv[1] + "/api/version", timeout=5).close()
        break
    except urllib.error.HTTPError:
        break  # it asks for a token, so it is running
    except OSError:
        time.sleep(0.2)
"""


class RayNodes:
    """`nodes` hosts of the network, 0 the head, with `cpus` each; a cluster from `with` to the end of its block.

    `environment`: of all nodes, and so of the jobs. `private`: host -> folders that it does not share with the others. Raises
    ConfigError without Ray or with fewer hosts, NetworkError for a node that does not start; `folder` has its log then.
    """

    def __init__(
        self,
        network: Network,
        nodes: int = 3,
        cpus: int = 1,
        environment: Mapping[str, str] | None = None,
        private: Mapping[int, Iterable[Path]] | None = None,
    ) -> None:
        if not 1 <= nodes <= network.hosts:
            raise ConfigError("nodes", nodes, f"is between 1 and the hosts of the network, {network.hosts}")
        if cpus < 0:
            raise ConfigError("cpus", cpus, "must not be negative")
        self.network, self.nodes, self.cpus = network, nodes, cpus
        self._private = {host: list(folders) for host, folders in (private or {}).items()}
        self._given = dict(environment or {})
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = 0
        self.folder = Path()

    @property
    def address(self) -> str:
        """For RAY_ADDRESS on a node."""
        return f"{self.network.address(0)}:{PORT}"

    @property
    def dashboard(self) -> str:
        """For RAY_ADDRESS outside of the cluster, where jobs are submitted."""
        return f"http://{self.network.address(0)}:{DASHBOARD_PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to reach the cluster from a host."""
        return {
            **self._given,
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # would end processes when others fill the machine
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }

    def __enter__(self) -> RayNodes:
        _make_token()
        self.folder = Path(tempfile.mkdtemp(prefix="hray-", dir="/tmp"))  # short: Ray puts sockets below it
        (self.folder / "session").mkdir()
        try:
            self.start_all()
        except BaseException:
            self.close(keep=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(keep=kind is not None)

    def start_all(self) -> None:
        """Start a cluster, the head first; it takes jobs when this returns. Raises NetworkError if a node does not start."""
        for host in range(self.nodes):
            self.start(host)
            self.wait(host)
        self._wait_for_dashboard()

    def start(self, host: int) -> None:
        """Start the node of a host; a host is a node once. It takes part when `wait` returns."""
        if host in self._processes:
            raise NetworkError(f"host {host} is a node already: end it first")
        self._starts += 1
        own = self.folder / f"node{host}.{self._starts}"
        own.mkdir()
        mounts = [
            "mount -t tmpfs -o size=256m tmpfs /dev/shm",
            f"mount --bind {own} {self.folder / 'session'}",
            *(f"mount -t tmpfs tmpfs {shlex.quote(str(folder))}" for folder in self._private.get(host, [])),
        ]
        options = [f"--node-ip-address={self.network.address(host)}", f"--num-cpus={self.cpus}", "--num-gpus=0", "--block"]
        options += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--log-color=false"]
        if host == 0:
            options += ["--head", f"--port={PORT}", f"--dashboard-host={self.network.address(0)}"]
            options += [f"--dashboard-port={DASHBOARD_PORT}", f"--temp-dir={self.folder / 'session'}"]
        else:
            options += [f"--address={self.address}"]
        ray = shlex.join([sys.executable, "-m", "ray.scripts.scripts", "start", *options])
        argv = ["unshare", "-m", "--propagation", "private", "sh", "-c", " && ".join([*mounts, f"exec {ray}"])]
        environment = {**self.environment, **_CHECKS}
        with open(self._log(host), "wb") as log:
            self._processes[host] = self.network.run(
                host, argv, environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self, host: int) -> None:
        """Wait until a node that was started takes part. Raises NetworkError if it does not."""
        deadline, tries = time.monotonic() + START_S, 1
        while _STARTED not in self._log(host).read_bytes():
            code = self._processes[host].poll()
            if code is not None and tries < TRIES:
                tries += 1
                self.end(host)
                self.start(host)
            elif code is not None or time.monotonic() > deadline:
                how = f"did not start in {START_S:g} s" if code is None else f"ended at its start with exit code {code}"
                raise NetworkError(f"the Ray node of host {host} {how}; its log is {self._log(host)}")
            time.sleep(0.1)

    def end(self, host: int, at_once: bool = False) -> None:
        """End everything that runs on a host, as a machine that goes down does; `at_once`: as one without power does."""
        namespaces.end_processes([self.network.namespace(host)], at_once)
        process = self._processes.pop(host, None)
        if process is not None:
            process.wait(namespaces.KILL_S)

    def close(self, keep: bool = False) -> None:
        """End all nodes, and what runs on their hosts; `keep` their logs."""
        for host in sorted(self._processes, reverse=True):
            self.end(host)
        if self.folder != Path() and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif keep:
            print(f"Ray's own logs are in {self.folder}", file=sys.stderr)

    def _log(self, host: int) -> Path:
        return self.folder / f"node{host}.log"

    def _wait_for_dashboard(self) -> None:
        probe = self.network.run(0, [sys.executable, "-S", "-c", _ANSWERS, self.dashboard])
        try:
            probe.wait(START_S)
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.wait()
            raise NetworkError(f"Ray's dashboard did not answer in {START_S:g} s") from None


def _make_token() -> None:
    """The nodes listen on all interfaces of their hosts, as on real ones; they refuse requests without the user's token."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120, env=os.environ)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ConfigError("lab", "ray", f"Ray 2.52 or later is needed, whose servers can ask for a token ({said[0]})")
