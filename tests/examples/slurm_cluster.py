"""A Slurm cluster on this machine, of the distribution's own programs: munged, slurmctld, and a slurmd for each node.

In: a folder, and how many nodes. Out: a `Cluster` whose commands (`sbatch`, `srun`, `scontrol` ...) are run with its
configuration. All that it writes is in the folder. Nodes are names of this machine and listen on loopback; with a `Network`
each is a host of its own, in a network namespace, and finds the others by their names. Nothing limits what a job uses, and each
node says that it has CPUS processors.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from getpass import getuser
from pathlib import Path
from types import TracebackType

from helixrt.lab import namespaces
from helixrt.lab.net import Network

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
CPUS = 32
ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
START_S, END_S, CALL_S = 60.0, 60.0, 120.0
_PORT = 6820  # and the following ones, in namespaces of the cluster's own
_NEVER_TOLD = ("HELIXRT_", "SLURM_", "SBATCH_", "MASTER_", "GLOO_", "NCCL_")  # of the variables around


def lacking() -> str:
    """Why Slurm cannot run on this machine; empty if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if absent:
        how = "apt-get install slurmctld slurmd slurm-client munge"
        return f"Slurm is not installed, no {', '.join(absent)}: {how}"
    return "" if os.path.ismount("/sys/fs/cgroup") else "slurmd needs control groups mounted at /sys/fs/cgroup"


class Cluster:
    """Nodes n0, n1, ... A context manager."""

    def __init__(self, folder: Path, nodes: int, network: Network | None = None) -> None:
        self.folder, self.nodes, self._network = folder, nodes, network
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---------------------------------------------------------------- commands

    def environment(self, **more: str) -> dict[str, str]:
        """Of a command, and so of the jobs that it submits: `python` is this one, and finds this checkout."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_NEVER_TOLD)}
        mine = {"PATH": PATH, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return {**kept, **mine, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def start(self, argv: Sequence[str | int | Path], log: Path | None = None, **more: str) -> subprocess.Popen[str]:
        """A command, on node 0. Its output goes to `log`, or can be read."""
        command = self._on(0, [str(word) for word in argv])
        out = subprocess.PIPE if log is None else log.open("w")
        try:
            return subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, text=True, env=self.environment(**more), cwd=ROOT
            )
        finally:
            if log is not None:
                out.close()  # type: ignore[union-attr]

    def call(self, *argv: str | int | Path, **more: str) -> str:
        """What a command prints; it must end well."""
        process = self.start(argv, **more)
        said, _ = process.communicate(timeout=CALL_S)
        assert process.returncode == 0, f"{argv}: {said}"
        return said.strip()

    def submit(self, *argv: str | int | Path, **more: str) -> int:
        """The number of the job. Its output goes to `job-NUMBER.out`, each element's of an array to one of its own."""
        return int(self.call("sbatch", "--parsable", "-o", self.folder / "job-%j.out", *argv, **more))

    def state(self, job: int | str) -> dict[str, str]:
        """What Slurm knows of a job, or an element of an array (JOB_ELEMENT)."""
        said = self.call("scontrol", "show", "job", job, "--oneliner")
        return dict(word.split("=", 1) for word in said.splitlines()[0].split() if "=" in word)

    def ended(self, job: int | str, limit_s: float) -> tuple[str, str]:
        """State and exit code of a job as soon as it is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.state(job)["JobState"] in over, f"job {job} does not end", limit_s)
        found = self.state(job)
        return found["JobState"], found["ExitCode"]

    def until(self, what: Callable[[], bool], why: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < deadline, f"{why}:\n{self.said()}"
            time.sleep(0.2)

    def said(self) -> str:
        """The output of all jobs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.out")))

    # ---------------------------------------------------------------- the cluster's life

    def _start(self) -> None:
        self.folder.chmod(0o755)  # munged insists that its socket can be reached
        (self.folder / "munge.key").touch(0o600)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text("\n".join([*self._settings(), *self._node_lines(), ""]))
        if self._network is not None:
            hosts = [f"{self._network.address(node)} n{node}" for node in range(self.nodes)]
            (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        at = {key: self.folder / f"munge.{key}" for key in ("socket", "key", "pid", "log", "seed")}
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munged = ["munged", "--foreground", "--force", *(f"--{option}={at[key]}" for option, key in files.items())]
        self._daemon(0, "munged", munged)
        self.until(at["socket"].exists, "munged does not start", START_S)
        self._daemon(0, "slurmctld", ["slurmctld", "-D", "-c"])
        for node in range(self.nodes):
            self._daemon(node, f"slurmd.n{node}", ["slurmd", "-D", "-N", f"n{node}"])
        deadline = time.monotonic() + START_S
        while (said := self._idle()) != self.nodes:
            assert time.monotonic() < deadline, f"{said} of {self.nodes} nodes came up:\n{self._logs()}"
            time.sleep(0.2)

    def _idle(self) -> int:
        asked = self.start(["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"])
        said, _ = asked.communicate(timeout=CALL_S)
        return len(said.split()) if asked.returncode == 0 else 0

    def _settings(self) -> list[str]:
        folder, me = self.folder, getuser()
        host, port = ("localhost(127.0.0.1)", _free_port()) if self._network is None else self._named_host(0)
        settings: Mapping[str, object] = {
            "ClusterName": "test",
            "SlurmctldHost": host,
            "SlurmctldPort": port,
            "SlurmUser": me,
            "SlurmdUser": me,
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder / 'munge.socket'}",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool.%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd.%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",  # CPUS is more than this machine may have
            "KillWait": 120,  # from SIGTERM to SIGKILL
            "MpiDefault": "none",
            "ReturnToService": 2,
        }
        return [f"{key}={value}" for key, value in settings.items()]

    def _named_host(self, node: int) -> tuple[str, int]:
        assert self._network is not None
        return f"n{node}({self._network.address(node)})", _PORT

    def _node_lines(self) -> list[str]:
        lines = []
        for node in range(self.nodes):
            where = f"NodeHostname=localhost NodeAddr=127.0.0.1 Port={_free_port()}"
            if self._network is not None:
                where = f"NodeHostname=n{node} NodeAddr={self._network.address(node)} Port={_PORT + 1}"
            lines.append(f"NodeName=n{node} {where} CPUs={CPUS} State=UNKNOWN")
        return [*lines, "PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP"]

    def _on(self, node: int, argv: list[str]) -> list[str]:
        """The command that runs `argv` on a node."""
        if self._network is None:
            return argv
        named = f'mount --bind {self.folder / "hosts"} /etc/hosts && hostname n{node} && exec "$@"'
        # Not `ip netns exec`: that mounts a /sys without the control groups that slurmd looks for.
        inside = ["nsenter", f"--net={namespaces.FOLDER / self._network.namespace(node)}", "unshare", "--mount", "--uts"]
        return [*inside, "sh", "-c", named, "sh", *argv]

    def _daemon(self, node: int, name: str, argv: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = self._on(node, argv)
            daemon = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment())
            self._daemons.append((name, daemon))

    def _logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """End all jobs, then the daemons."""
        if any(name == "slurmctld" and daemon.poll() is None for name, daemon in self._daemons):
            for how in (["--signal=KILL", "--full"], []):
                self.start(["scancel", *how, "--user", getuser()]).communicate(timeout=CALL_S)
            deadline = time.monotonic() + END_S
            while self.start(["squeue", "--noheader"]).communicate(timeout=CALL_S)[0].strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for _, daemon in reversed(self._daemons):
            daemon.terminate()
        for _, daemon in self._daemons:
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.send_signal(signal.SIGKILL)
                daemon.wait(END_S)
        self._daemons = []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
