"""The leak check (leaks.py): each kind of thing that a test leaves fails that test with its name, and nothing else does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGIN = """
from tests import leaks

leaks.GRACE_S = 0.5

def pytest_configure(config):
    leaks.watch(config)
"""
TESTS = """
import gc, os, socket, subprocess, sys, threading, time
from pathlib import Path
import pytest

kept = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_clean(tmp_path):
    subprocess.run([sys.executable, "-c", ""], check=True)
    with open(tmp_path / "file", "w"), socket.socket():
        thread = threading.Thread(target=time.sleep, args=(0.1,))
        thread.start()
    socket.getaddrinfo("127.0.0.1", 1), socket.getaddrinfo("localhost", 1)
    cycle = [open(tmp_path / "file")]
    cycle.append(cycle)

def test_process():
    kept.append(subprocess.Popen(SLEEP))

def test_zombie():
    kept.append(subprocess.Popen(["true"]))

def test_orphan():
    script = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", script], check=True)

def test_thread():
    threading.Thread(target=time.sleep, args=(60,), name="left-thread", daemon=True).start()

def test_descriptor(tmp_path):
    kept.append(open(tmp_path / "left-file", "w"))

def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_memory():
    Path(f"/dev/shm/left-memory-{os.getpid()}").touch()

def test_name():
    with pytest.raises(OSError):
        socket.create_connection(("no-such-host.example", 1))

def test_name_in_a_child():
    lookup = "import socket; socket.gethostbyname('no-such-host.example')"
    said = subprocess.run([sys.executable, "-c", lookup], capture_output=True, text=True).stderr
    assert "Temporary failure in name resolution" in said, said

def as_tokio_makes():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends

def test_pair_that_is_closed_soon():
    sys.modules["torchft"] = sys
    ends = as_tokio_makes()
    threading.Timer(0.2, lambda: [end.close() for end in ends]).start()

def test_pair_of_tokio():
    kept.append(as_tokio_makes())

def test_second_pair():
    kept.append(as_tokio_makes())

@pytest.fixture(scope="module")
def other():
    program = "import os, subprocess, sys\\nfor line in sys.stdin:\\n    ended = subprocess.Popen(['true'])\\n" \
        "    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)\\n    print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process

def test_zombie_of_another_process(other):
    other.stdin.write(b"\\n")
    other.stdin.flush()
    assert other.stdout.readline()

@pytest.fixture(scope="module")
def closes():
    process = subprocess.Popen(SLEEP)
    yield
    process.kill()
    process.wait()

@pytest.fixture(scope="module")
def forgets():
    kept.append(open(__file__))

@pytest.mark.parametrize("number", range(2))
def test_wider(closes, forgets, number):
    pass

def test_last():
    os.remove(f"/dev/shm/left-memory-{os.getpid()}")
    for process in kept[:1]:
        process.kill()
"""
WARNED = """
import pytest
kept = []

@pytest.mark.parametrize("mark", [pytest.param("it", marks=pytest.mark.notebook), "one behind it"])
def test_only_warns(mark):
    kept.append(open(__file__))
"""
LEFT = {
    "test_process": r"process \d+, child of \d+: .*time.sleep\(60\)",
    "test_zombie": r"process \d+, child of \d+: ended, not waited for",
    "test_orphan": r"process \d+, child of \d+: .*time.sleep\(60\)",
    "test_thread": r"thread \d+: 'left-thread'",
    "test_descriptor": r"descriptor \d+: /.*/left-file",
    "test_socket": r"descriptor \d+: socket:\[\d+\], AF_INET \('127.0.0.1', \d+\)",
    "test_memory": r"file /dev/shm/left-memory-\d+",
    "test_name": r"name look-up: socket.getaddrinfo\('no-such-host.example'\)",
    "test_second_pair": r"descriptor \d+: socket:\[\d+\], AF_UNIX '' to ''",
    "test_last": r"descriptor \d+: .*/test_cases.py",  # of the fixture whose scope ends here
}


@pytest.mark.system
def test_what_a_test_leaves_fails_it_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_cases.py").write_text(TESTS)
    (tmp_path / "test_warned.py").write_text(WARNED)
    argv = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=200).stdout
    failed = dict(re.findall(r"_ ERROR at teardown of (\w+) _+\nleft behind by this test:\n  (.*)\n", said))
    try:
        assert failed.keys() == LEFT.keys() and said.count("UserWarning: left behind by this test") == 2, said
        assert {name: failed[name] for name, pattern in LEFT.items() if not re.fullmatch(pattern, failed[name])} == {}
    finally:
        for pid in re.findall(r"process (\d+), .*time.sleep", said):
            subprocess.run(["kill", "-KILL", pid], stderr=subprocess.DEVNULL)
