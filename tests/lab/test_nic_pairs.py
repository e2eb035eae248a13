"""NIC pairs in the lab's VM: programs that know nothing of helixrt speak RDMA over a pair, and a cut cable is a cut cable.

What Soft-RoCE says of a failure is what the verbs driver classes, so it is asked here of plain pyverbs.
"""

from __future__ import annotations

import gzip
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helixrt.lab import nics
from helixrt.lab.nics import End, NicPair
from helixrt.transport.verbs.library import library

pytestmark = pytest.mark.rdma

SIZE = 4096
TIMEOUT, RETRIES = 12, 2  # 4.096 us x 2^12 x 3 = 50 ms
LIMIT_S = 60.0

RDMA_CORE_TESTS = Path("/usr/share/doc/rdma-core/tests")
RDMA_CORE_MODULES = ("tests.test_atomic", "tests.test_qp.QPTest", "tests.test_cq_events", "tests.test_mr.MWTest")
RUN_RDMA_CORE_TESTS = """
import sys, types, unittest
sys.path.insert(0, "only")
package = sys.modules["tests"] = types.ModuleType("tests")  # its own would import the tests of every vendor
package.__path__ = ["."]
from tests.args_parser import parser
sys.modules["args_parser"] = sys.modules["tests.args_parser"]
parser.parse_args()
unittest.main(module=None)
"""


def sent_bytes(pair: NicPair, end: End) -> int:
    return int((nics.NETWORK_FOLDER / pair.netdev(end) / "statistics" / "tx_bytes").read_text())


class Peer:
    """One end: a reliable queue pair of plain pyverbs, with one buffer."""

    def __init__(self, pair: NicPair, end: End) -> None:
        self.verbs = verbs = library()
        e = verbs.enums
        self.gid, self.index = pair.gid(end), pair.gid_index(end)
        self.context = verbs.Context(name=pair.rdma(end))
        self.domain = verbs.PD(self.context)
        self.memory = verbs.MR(self.domain, SIZE, e.ACCESS_LOCAL_WRITE | e.ACCESS_REMOTE_WRITE | e.ACCESS_REMOTE_READ)
        self.queue = verbs.CQ(self.context, 64, None, None, 0)
        cap = verbs.QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
        self.pair = verbs.QP(self.domain, verbs.QPInitAttr(qp_type=e.QPT_RC, scq=self.queue, rcq=self.queue, cap=cap))
        attributes = verbs.QPAttr()
        attributes.qp_state, attributes.port_num = e.QPS_INIT, 1
        attributes.qp_access_flags = e.ACCESS_LOCAL_WRITE | e.ACCESS_REMOTE_WRITE | e.ACCESS_REMOTE_READ
        self.pair.modify(attributes, e.QP_STATE | e.QP_PKEY_INDEX | e.QP_PORT | e.QP_ACCESS_FLAGS)

    def connect(self, other: Peer) -> None:
        verbs, e = self.verbs, self.verbs.enums
        route = verbs.GlobalRoute(dgid=verbs.GID(other.gid), sgid_index=self.index, hop_limit=64)
        attributes = verbs.QPAttr()
        attributes.ah_attr = verbs.AHAttr(is_global=1, port_num=1, gr=route)
        attributes.qp_state, attributes.path_mtu, attributes.dest_qp_num = e.QPS_RTR, 3, int(other.pair.qp_num)
        attributes.rq_psn, attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 7, 1, 1
        wanted = e.QP_STATE | e.QP_AV | e.QP_PATH_MTU | e.QP_DEST_QPN | e.QP_RQ_PSN
        self.pair.modify(attributes, wanted | e.QP_MAX_DEST_RD_ATOMIC | e.QP_MIN_RNR_TIMER)
        attributes = verbs.QPAttr()
        attributes.qp_state, attributes.sq_psn, attributes.max_rd_atomic = e.QPS_RTS, 7, 1
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = TIMEOUT, RETRIES, 6
        wanted = e.QP_STATE | e.QP_SQ_PSN | e.QP_MAX_QP_RD_ATOMIC | e.QP_TIMEOUT | e.QP_RETRY_CNT | e.QP_RNR_RETRY
        self.pair.modify(attributes, wanted)

    def element(self) -> Any:
        return self.verbs.SGE(self.memory.buf, SIZE, self.memory.lkey)

    def receive(self) -> None:
        self.pair.post_recv(self.verbs.RecvWR(num_sge=1, sg=[self.element()]))

    def send(self, data: bytes) -> None:
        self.memory.write(data, SIZE)
        e = self.verbs.enums
        self.pair.post_send(self.verbs.SendWR(num_sge=1, sg=[self.element()], opcode=e.WR_SEND, send_flags=e.SEND_SIGNALED))

    def completion(self) -> str:
        """The name of the next completion's status."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            count, found = self.queue.poll(1)
            if count:
                return self.verbs.enums.statuses[found[0].status]
            time.sleep(0.001)
        raise AssertionError(f"no completion within {LIMIT_S} s")

    def close(self) -> None:
        for each in (self.pair, self.queue, self.memory, self.domain, self.context):
            each.close()


@pytest.fixture
def peers(nic_pairs: list[NicPair]) -> Iterator[Callable[[NicPair], tuple[Peer, Peer]]]:
    made: list[Peer] = []

    def connected(pair: NicPair) -> tuple[Peer, Peer]:
        a, b = Peer(pair, End.A), Peer(pair, End.B)
        made.extend((a, b))
        a.connect(b)
        b.connect(a)
        return a, b

    yield connected
    for peer in made:
        peer.close()


def test_messages_of_plain_pyverbs_go_both_ways_over_the_cable(
    nic_pairs: list[NicPair], peers: Callable[[NicPair], tuple[Peer, Peer]]
) -> None:
    for pair in nic_pairs:
        a, b = peers(pair)
        before = [sent_bytes(pair, end) for end in End]
        for turn in range(20):
            sender, receiver = (a, b) if turn % 2 == 0 else (b, a)
            receiver.receive()
            data = bytes([turn]) * SIZE
            sender.send(data)
            assert sender.completion() == receiver.completion() == "SUCCESS"
            assert receiver.memory.read(SIZE, 0) == data
        for end, was in zip(End, before, strict=True):
            assert sent_bytes(pair, end) - was >= 10 * SIZE, "it went around the cable"


def test_ib_write_bw_runs_over_a_pair(nic_pairs: list[NicPair]) -> None:
    pair = nic_pairs[-1]
    before = sent_bytes(pair, End.A)
    size, count = 65536, 100

    def argv(end: End) -> list[str]:
        index = str(pair.gid_index(end))
        return ["ib_write_bw", "-F", "-d", pair.rdma(end), "-x", index, "-s", str(size), "-n", str(count)]

    server = subprocess.Popen(argv(End.B), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until = time.monotonic() + LIMIT_S
        while True:  # its own connection, over loopback, comes when it listens
            client = subprocess.run([*argv(End.A), "127.0.0.1"], capture_output=True, text=True, timeout=60)
            if client.returncode == 0 or time.monotonic() > until or server.poll() is not None:
                break
            time.sleep(0.2)
        said, _ = server.communicate(timeout=LIMIT_S)
    finally:
        server.kill()
        server.wait()
    assert client.returncode == 0 and server.returncode == 0, client.stdout + client.stderr + said
    reported = re.search(rf"^\s*{size}\s+{count}\s+([\d.]+)\s+([\d.]+)", client.stdout, re.MULTILINE)
    assert reported is not None and float(reported[2]) > 0, client.stdout
    assert sent_bytes(pair, End.A) - before >= size * count


@pytest.mark.skipif(not RDMA_CORE_TESTS.is_dir(), reason=f"this rdma-core comes without {RDMA_CORE_TESTS}")
def test_rdma_cores_own_tests_pass_on_a_nic(nic_pairs: list[NicPair], tmp_path: Path) -> None:
    """Atomic operations, memory windows, queue pairs and completion events, by the makers of pyverbs."""
    library()
    for file in RDMA_CORE_TESTS.iterdir():  # Debian packs the long ones
        unpacked = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        (tmp_path / file.name.removesuffix(".gz")).write_bytes(unpacked)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "pyverbs").symlink_to(sys.modules["pyverbs"].__path__[0])
    (tmp_path / "run.py").write_text(RUN_RDMA_CORE_TESTS)
    device, index = nic_pairs[0].rdma(End.A), nic_pairs[0].gid_index(End.A)
    argv = [sys.executable, "run.py", "--dev", device, "--gid", str(index), *RDMA_CORE_MODULES]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    ran = re.search(r"Ran (\d+) tests", done.stderr)
    assert done.returncode == 0 and ran is not None, done.stderr
    skipped = re.search(r"skipped=(\d+)", done.stderr)
    assert int(ran[1]) - (int(skipped[1]) if skipped else 0) >= 25, done.stderr


@pytest.mark.parametrize("cut", ["local down", "remote down", "blackhole"])
def test_what_a_broken_cable_looks_like_to_verbs_and_that_it_heals(
    cut: str, nic_pairs: list[NicPair], peers: Callable[[NicPair], tuple[Peer, Peer]]
) -> None:
    pair, other = nic_pairs[0], nic_pairs[1]
    a, b = peers(pair)
    if cut == "blackhole":
        pair.blackhole()
    else:
        pair.down(End.A if cut == "local down" else End.B)
    for _ in range(3):
        a.send(b"x" * SIZE)
    statuses = [a.completion() for _ in range(3)]
    first = {"LOC_QP_OP_ERR", "RETRY_EXC_ERR"} if cut == "local down" else {"RETRY_EXC_ERR"}
    assert statuses[0] in first and statuses[1:] == ["WR_FLUSH_ERR"] * 2, "what follows the first cause is flushed"

    c, d = peers(other)
    d.receive()
    c.send(b"y" * SIZE)
    assert c.completion() == d.completion() == "SUCCESS", "the other cable is whole"

    pair.heal()
    e, f = peers(pair)
    f.receive()
    e.send(b"z" * SIZE)
    assert e.completion() == f.completion() == "SUCCESS"


def test_tcp_between_bound_addresses_crosses_the_cable_too(nic_pairs: list[NicPair]) -> None:
    pair = nic_pairs[0]
    before = sent_bytes(pair, End.A)
    with socket.create_server((pair.address(End.B), 0)) as server:
        address = server.getsockname()[:2]
        with socket.create_connection(address, timeout=LIMIT_S, source_address=(pair.address(End.A), 0)) as client:
            connection, _ = server.accept()
            with connection:
                data = bytes(range(256)) * 4096
                sender = threading.Thread(target=client.sendall, args=(data,), name="sender")
                sender.start()
                connection.settimeout(LIMIT_S)
                came = b""
                while len(came) < len(data):
                    came += connection.recv(1 << 16)
                sender.join()
    assert came == data and sent_bytes(pair, End.A) - before >= len(data)


def test_a_device_that_was_down_comes_back_with_its_routes(nic_pairs: list[NicPair]) -> None:
    pair = nic_pairs[0]
    for end in End:
        pair.down(end)
        assert "UP" not in Path(nics.NETWORK_FOLDER, pair.netdev(end), "operstate").read_text().upper()
        pair.up(end)
        nics.wait_until_active([pair])
        shown = subprocess.run(["ip", "route", "show", "table", "all"], capture_output=True, text=True, timeout=LIMIT_S).stdout
        for each in End:
            assert f"{pair.address(each.other)} dev {pair.netdev(each)} table {pair.table(each)}" in shown


def test_pairs_are_broken_and_mended_from_a_shell(nic_pairs: list[NicPair], capsys: pytest.CaptureFixture[str]) -> None:
    pair = nic_pairs[0]
    state = nics.RDMA_FOLDER / pair.rdma("a") / "ports" / "1" / "state"
    assert nics.main(["down", "a1"]) == 0 and "ACTIVE" not in state.read_text()
    assert nics.main(["heal", "1"]) == 0 and "ACTIVE" in state.read_text()
    assert nics.main(["blackhole", "b1"]) == 0 and nics.main(["heal", "1"]) == 0
    assert nics.main(["down", "1"]) == nics.main([]) == 2 and nics.main(["heal", "31"]) == 1
    said = capsys.readouterr().err
    assert said.count("usage") == 2 and "no NIC pair 31" in said
