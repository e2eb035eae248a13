"""Runs on several hosts: which address the servers take, what is said where others cannot reach it, and whole runs under
torchrun on hosts in network namespaces that have no loopback address."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixrt.collectives.gloo_groups_private import bind_gloo
from helixrt.errors import ConfigError, HelixError, Retryable
from helixrt.job import environment
from helixrt.job.config import JobConfig
from helixrt.job.hosts import expanded, is_loopback, nodes, serving_host, unreachable
from helixrt.job.rules import check
from helixrt.lab.namespaces import call, processes
from helixrt.lab.net import Cut, Network
from helixrt.protocol.step.lineage import audit
from helixrt.replica.store import host_store
from helixrt.transport.auto import AutoEndpoint
from tests.examples.test_existing_loop import ROOT, variables
from tests.job.hosts_script import EVERY
from tests.job.lineage_oracle import chain, reported
from tests.job.listening import listening
from tests.ranks_context import ranks_context

# ---------------------------------------------------------------- Slurm


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[0-1],x-1.y", ["r1n0", "r1n1", "r2n0", "r2n1", "x-1.y"]),
        ("g[5]s", ["g5s"]),
    ],
)
def test_slurms_list_of_nodes_is_read(text: str, names: list[str]) -> None:
    assert expanded(text) == names


@pytest.mark.parametrize("text", ["a[1-", "a]1[", "a[[1]]", ",a", "a,,b", "a[3-1]", "a[x]", "a[0-999999999]"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST="):
        expanded(text)


SLURM = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n2", "SLURMD_NODENAME": "n2", "SLURM_PROCID": "0"}


def test_the_servers_of_a_slurm_job_take_the_address_that_leads_to_its_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def towards(address: str) -> str:
        asked.append(address)
        return "10.1.2.3"

    monkeypatch.setattr("helixrt.job.hosts.interface_towards", towards)
    assert nodes(SLURM) == ["n1", "n2", "n3", "n4"], "of the job: its step has one of them"
    assert serving_host("auto", SLURM) == "10.1.2.3" and asked[0].startswith("n1:")
    assert serving_host("10.9.9.9", SLURM) == "10.9.9.9"
    assert serving_host("auto", {}) == serving_host("auto", {**SLURM, "SLURM_JOB_NODELIST": "n2"}) == "127.0.0.1"
    monkeypatch.setattr("helixrt.job.hosts.interface_towards", lambda address: "127.0.1.1")
    with pytest.raises(ConfigError, match="host=auto: n1, another machine of this Slurm job, means 127.0.1.1 here"):
        serving_host("auto", SLURM)


def test_a_node_that_no_way_leads_to_is_refused() -> None:
    with pytest.raises(ConfigError, match="host=auto: there is no way to no-such-node.invalid"):
        serving_host("auto", {"SLURM_JOB_NODELIST": "no-such-node.invalid,here", "SLURMD_NODENAME": "here"})


def test_servers_on_loopback_in_a_job_of_several_nodes_are_worth_a_warning() -> None:
    said = unreachable("127.0.0.1", SLURM)
    assert said.startswith("the servers listen on 127.0.0.1, which n1 and 2 more of this Slurm job cannot reach"), said
    assert unreachable("10.1.2.3", SLURM) == unreachable("127.0.0.1", {}) == ""
    assert (
        is_loopback("localhost") and is_loopback("::1") and not is_loopback("10.1.2.3") and not is_loopback("no.such.invalid")
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "0x0", "0::0"])
def test_every_address_is_none_to_connect_to(host: str) -> None:
    with pytest.raises(ConfigError, match="is every address of this machine; name the one"):
        check(JobConfig(host=host))


# ---------------------------------------------------------------- a store that is elsewhere, or not there yet


def test_a_rank_waits_for_a_store_that_does_not_answer_yet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probe = socket.socket()  # bound but not listening: connections are refused
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with caplog.at_level(logging.WARNING), pytest.raises(Retryable, match=r"given up after 2 s"):
        environment._wait_for(address, 2.0)
    assert len(caplog.messages) == 1 and "that address is this host itself" in caplog.messages[0], "said once"
    served: list[object] = []

    def serve(seconds: float) -> None:
        if not served:
            probe.close()
            served.append(host_store("127.0.0.1", port))

    monkeypatch.setattr(time, "sleep", serve)
    environment._wait_for(address, 30.0)
    assert served
    with pytest.raises(ConfigError, match="HELIXRT_STORE=host: must be host:port"):
        environment._wait_for("host", 0.3)


def test_a_rank_on_loopback_says_once_that_a_peer_on_another_host_cannot_reach_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer says that it is on another host, which the shared memory's part of its address tells."""
    elsewhere = "0" * 32
    here = AutoEndpoint(b"secret", "127.0.0.1", heartbeat_s=None)
    with monkeypatch.context() as patch:
        patch.setattr("helixrt.transport.shared_memory.endpoint.host_identity", lambda: elsewhere)
        there = AutoEndpoint(b"secret", "127.0.0.2", heartbeat_s=None)
    try:
        with caplog.at_level(logging.WARNING, "helixrt.transport"):
            for generation in (1, 2):
                with pytest.raises(HelixError):
                    here.connect(generation, 0, {1: there.address()}, 0.05)
        assert [m for m in caplog.messages if "rank 0 listens on 127.0.0.1" in m and "rank 1 is on another host" in m], (
            caplog.messages
        )
        assert len(caplog.messages) == 1
    finally:
        here.close()
        there.close()


# ---------------------------------------------------------------- Gloo


def bound(rank: int, size: int, port: int) -> None:
    """One address each: every one of 127.0.0.0/8 is this machine's."""
    bind_gloo(f"127.0.0.{rank + 2}")
    store = dist.TCPStore("127.0.0.1", port, size, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for group in (dist.new_group([0, 1], use_local_synchronization=True), None):
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [3.0] * 3
    mine = listening()
    assert mine and all(address.startswith(f"127.0.0.{rank + 2}:") for address in mine), mine
    dist.destroy_process_group()


@pytest.mark.system
def test_all_gloo_groups_listen_on_the_address_that_was_given() -> None:
    """Also those that torch makes out of the first, whatever name the machine has."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    ranks = [ranks_context().Process(target=bound, args=(rank, 2, store.port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]


# ---------------------------------------------------------------- torchrun on hosts without a loopback address

STEPS, STEP_TIMEOUT_S, DEADLINE_S, PORT = 120, 8.0, 180.0, 29400


class Hosts:
    """A run served on host 0, with torchruns on both hosts. Addresses of loopback do not exist there."""

    def __init__(self, network: Network, folder: Path, replicas: int, shards: int) -> None:
        self.network, self.root, self.replicas, self.shards = network, folder, replicas, shards
        for host in range(network.hosts):
            call(["ip", "-n", network.namespace(host), "address", "flush", "dev", "lo"])
        self.runs: list[subprocess.Popen[str]] = []
        serve = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", str(replicas), "--dp-shard", str(shards)]
        serve += ["--host", network.address(0), "--storage", str(folder), "--step-timeout-s", str(STEP_TIMEOUT_S)]
        serve += ["--checkpoint-every", str(EVERY)]
        self.server = self._start(0, serve, {}, stdout=subprocess.PIPE)
        self.told = variables(self.server)
        self.folder = Path(self.told["HELIXRT_SECRET_FILE"]).parent

    def _start(self, host: int, argv: list[str], env: dict[str, str], **popen: Any) -> subprocess.Popen[str]:
        argv = ["env", "-u", "GLOO_SOCKET_IFNAME", "-u", "MASTER_ADDR", "-u", "MASTER_PORT", *argv]
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **env}
        return self.network.run(host, argv, env, text=True, stderr=subprocess.STDOUT, **popen)

    def torchrun(self, host: int, replica: int, of: tuple[int, ...]) -> None:
        """This host's part of a replica whose processes are on the hosts `of`."""
        head = self.network.address(of[0])
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(of)), "--nproc-per-node", "1"]
        argv += ["--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{PORT + replica}"]
        argv += ["--rdzv-id", str(replica), "--rdzv-conf", f"is_host={int(host == of[0])}"]
        argv += ["--local-addr", self.network.address(host), "-m", "tests.job.hosts_script"]
        argv += [str(self.root), str(self.shards), str(STEPS)]
        with open(self.root / f"torchrun{len(self.runs)}.log", "w") as log:
            self.runs.append(self._start(host, argv, {**self.told, "HELIXRT_REPLICA": str(replica)}, stdout=log))

    def contributors(self) -> list[set[tuple[int, int]]]:
        """(replica, incarnation) of each step so far."""
        begun = next((self.folder / "lineage").glob("*.json"), None) is not None
        return [set(record.contributors) for record in chain(self.folder)[1:]] if begun else []

    def until(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < deadline and self.server.poll() is None, (
                f"{why}:\n{self.contributors()[-5:]}\n{self.said()}"
            )
            time.sleep(0.1)

    def said(self) -> str:
        logs = (f"--- {path.name}\n{path.read_text()}" for path in sorted(self.root.glob("torchrun*.log")))
        return "\n".join(logs)

    def to_the_end(self) -> str:
        (self.root / "enough").touch()
        said, _ = self.server.communicate(timeout=DEADLINE_S)
        codes = [process.wait(60) for process in self.runs]
        assert (self.server.returncode, codes) == (0, [0] * len(codes)), said + self.said()
        return said

    def check(self) -> None:
        """Every batch once, no step lost, all replicas alike; every rank listened on its host's address alone."""
        records = chain(self.folder)
        found = audit(records, advance=1)
        assert (found.gaps, found.repeats, found.excluded) == (0, 0, 0)
        assert [record.step for record in records] == list(range(STEPS + 1))
        assert len(reported(self.folder)) == self.replicas and len(set(reported(self.folder))) == 1
        for replica in range(self.replicas):
            for shard in range(self.shards):
                host = replica if self.shards == 1 else shard
                at = (self.root / f"sockets.{replica}.{shard}").read_text().splitlines()
                assert at and {address.rpartition(":")[0] for address in at} == {self.network.address(host)}, at
        assert "Network is unreachable" not in self.said(), self.said()


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(hosts=2) as made:
        yield made


@pytest.mark.netns
@pytest.mark.slow  # two torchruns, three processes that import torch, and the server
@pytest.mark.timeout(400)
def test_a_host_that_is_cut_off_returns_when_its_network_does(network: Network, tmp_path: Path) -> None:
    """A replica on each host. The one that is cut off is given up by the server, so its process has to come again."""
    hosts = Hosts(network, tmp_path, replicas=2, shards=1)
    for host in range(2):
        hosts.torchrun(host, replica=host, of=(host,))
    both, alone = {(0, 0), (1, 0)}, {(0, 0)}
    hosts.until(lambda: hosts.contributors()[-3:] == [both] * 3, "they do not begin")
    network.cut(1, at=Cut.PATH)
    hosts.until(lambda: hosts.contributors()[-3:] == [alone] * 3, "the other host does not go on")
    began = time.monotonic()
    hosts.until(lambda: time.monotonic() - began > 2.0 * STEP_TIMEOUT_S, "the run does not last")
    network.restore(1)
    hosts.until(lambda: hosts.contributors()[-3:] == [{(0, 0), (1, 1)}] * 3, "the host does not come back")
    said = hosts.to_the_end()
    hosts.check()
    assert "r1      lost" in said and "r0      lost" not in said, said


@pytest.mark.netns
@pytest.mark.slow  # two torchruns, two processes that import torch twice, and the server
@pytest.mark.timeout(400)
def test_a_replica_over_two_hosts_comes_again_whole_when_one_process_is_killed(network: Network, tmp_path: Path) -> None:
    """One torchrun of two nodes: FSDP2 over Gloo between the hosts. The agents count their restarts apart."""
    hosts = Hosts(network, tmp_path, replicas=1, shards=2)
    for host in range(2):
        hosts.torchrun(host, replica=0, of=(0, 1))
    hosts.until(lambda: len(hosts.contributors()) > 3, "they do not begin")
    for process in processes([network.namespace(1)]):
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if b"torch.distributed.run" not in arguments and b"tests.job.hosts_script" in arguments:
            os.kill(process, signal.SIGKILL)
    hosts.until(lambda: {(0, 1)} in hosts.contributors(), "they do not come again")
    hosts.to_the_end()
    hosts.check()
