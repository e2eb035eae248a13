"""A host between which and the store's host the network is cut: its calls end, and it has the store again with the network."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from helixrt.collectives.lost_hosts import SILENT_S
from helixrt.lab.net import Cut, Network

pytestmark = [pytest.mark.netns, pytest.mark.timeout(180)]

LATE_S = 20.0  # more than the kernel needs to notice, on a busy machine
SERVE = """
import sys
from helixrt.replica.store import host_store
server, address = host_store(sys.argv[1])
print(address, flush=True)
sys.stdin.read()
"""
CALL = """
import socket, sys
from helixrt.errors import Retryable
from helixrt.replica.store import TcpRunStore
socket.setdefaulttimeout(5.0)  # as programs have it: nobody's waits may depend on it
store = TcpRunStore(sys.argv[1])
calls = {"get": lambda: store.get("k"), "wait": lambda: store.wait("never", 600.0), "set": lambda: store.set("k", "w")}
store.set("k", "v")
print("ready", flush=True)
for line in sys.stdin:
    try:
        print("found", calls[line.strip()](), flush=True)
    except Retryable as error:
        print("lost", error, flush=True)
"""


@contextmanager
def program(network: Network, host: int, code: str, *arguments: str) -> Iterator[tuple[IO[str], IO[str]]]:
    argv = [sys.executable, "-c", code, *arguments]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = network.run(host, argv, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdin, process.stdout
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("asked", ["before the cut", "after the cut"])
def test_a_call_ends_when_the_stores_host_is_cut_off_and_the_next_one_after_it_is_back_is_answered(asked: str) -> None:
    """Without an error from the network. `asked`: a call whose answer is awaited then, and one that is sent in vain."""
    with Network(hosts=2) as network, program(network, 0, SERVE, network.address(0)) as (_, served):
        address = served.readline().strip()
        with program(network, 1, CALL, address) as (orders, answers):
            assert answers.readline() == "ready\n"
            call = "wait" if asked == "before the cut" else "get"
            if call == "wait":
                print(call, file=orders, flush=True)
                time.sleep(1.0)  # for the request to be sent; if it is not, the call is one that is sent in vain
            network.cut(1, at=Cut.PATH)
            if call == "get":
                print(call, file=orders, flush=True)
            said: list[str] = []
            reader = threading.Thread(target=lambda: said.append(answers.readline()), daemon=True)
            reader.start()
            reader.join(SILENT_S + LATE_S)
            assert said and said[0].startswith(f"lost the run's store at {address} cannot be reached"), said
            network.restore(1)
            print("get", file=orders, flush=True)
            while (answer := answers.readline()).startswith("lost"):
                print("get", file=orders, flush=True)
            assert answer == "found v\n"
