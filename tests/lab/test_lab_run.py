"""`helixrt lab run` and `shell`, from outside: a command in the VM behaves as one started here, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LAB = [sys.executable, "-m", "helixrt.cli", "lab"]
DEADLINE_S = 90.0

Lab = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def vm_name(pytestconfig: pytest.Config) -> str:
    """Of the VM that this session's tests share. It runs."""
    forwarder: Any = pytestconfig.pluginmanager.get_plugin("lab")
    forwarder.machine.connect().close()
    return str(forwarder.machine.name)


@pytest.fixture
def lab(vm_name: str, tmp_path: Path) -> Lab:
    """Runs a shell script in the guest, below tmp_path."""

    def run(script: str, *options: str, told: str = "") -> subprocess.CompletedProcess[str]:
        argv = [*LAB, "run", "--name", vm_name, "--nics", "0", *options, "--", "sh", "-c", script]
        return subprocess.run(argv, cwd=tmp_path, input=told, capture_output=True, text=True, timeout=DEADLINE_S)

    return run


def begin(vm_name: str, script: str) -> subprocess.Popen[str]:
    """Starts a script in the guest and gives the client when the script has said its first line."""
    argv = [*LAB, "run", "--name", vm_name, "--nics", "0", "--", "sh", "-c", script]
    client = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    return client


@pytest.mark.vm
def test_streams_and_exit_code_are_the_commands(lab: Lab) -> None:
    done = lab("cat; echo warned >&2; exit 7", told="said\n" * 30_000)
    ours = [line for line in done.stderr.splitlines() if not line.startswith("helixrt: waiting for: ")]  # other tests
    assert done.stdout == "said\n" * 30_000
    assert (ours, done.returncode) == (["warned"], 7)
    assert lab("kill -KILL $$").returncode == 128 + signal.SIGKILL
    assert lab("no-such-program").returncode == 127


@pytest.mark.vm
def test_python_is_this_environments_in_this_folder(lab: Lab, tmp_path: Path) -> None:
    done = lab("python -c 'import helixrt, os, sys; print(sys.prefix, helixrt.__file__, os.getcwd(), os.uname().nodename)'")
    import helixrt

    assert done.stdout.split() == [sys.prefix, helixrt.__file__, str(tmp_path), "helixrt-lab"], done.stderr


@pytest.mark.vm
def test_the_guest_sees_files_as_they_are_now(lab: Lab, tmp_path: Path) -> None:
    file, later = tmp_path / "file", tmp_path / "folder" / "later"
    file.write_text("first")
    assert lab("cat file; ls").stdout == "firstfile\n"
    file.write_text("second, and longer")
    later.parent.mkdir()
    later.write_text("new")
    assert lab("cat file folder/later").stdout == "second, and longernew"
    file.unlink()
    assert lab("cat file").returncode == 1


@pytest.mark.vm
def test_what_it_writes_stays_in_the_guest_except_in_shared_folders(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "kept").write_text("kept")
    script = "echo x > lost; rm kept; echo y > shared/came; cat lost shared/came"
    assert lab(script, "--share", str(tmp_path / "shared")).stdout == "x\ny\n"
    assert (tmp_path / "shared" / "came").read_text() == "y\n"
    assert not (tmp_path / "lost").exists() and (tmp_path / "kept").exists()
    assert lab("echo z > shared/later").returncode == 0
    assert not (tmp_path / "shared" / "later").exists(), "shared for that command alone"


@pytest.mark.vm
def test_nic_pairs_are_made_anew_for_each_command(lab: Lab) -> None:
    seen = lab("ls /sys/class/infiniband; echo $HELIXRT_LAB_NICS; ip link set a2 down; ip link delete a1", "--nics", "2")
    assert seen.stdout.split() == ["rxe_a1", "rxe_a2", "rxe_b1", "rxe_b2", "2"], seen.stderr
    active = lab("cat /sys/class/infiniband/*/ports/1/state", "--nics", "3")
    assert active.stdout.splitlines() == ["4: ACTIVE"] * 6, active.stderr


@pytest.mark.vm
def test_nothing_outlives_its_command_or_its_client(lab: Lab, vm_name: str) -> None:
    count = "grep -lx sleep /proc/[0-9]*/comm | wc -l"
    begun = f"until [ $({count}) -ge 1 ]; do :; done"
    assert lab(f"setsid sleep 1000 & {begun}; {count}").stdout.strip() == "1"
    assert lab(count).stdout.strip() == "0"
    client = begin(vm_name, "sleep 1000 & setsid sleep 1000 & echo begun; wait")
    client.kill()
    client.wait()
    assert any(lab(count).stdout.strip() == "0" for _ in range(30)), "it is told of the client's end a moment later"


@pytest.mark.vm
def test_an_interrupt_goes_to_the_command(vm_name: str) -> None:
    client = begin(vm_name, "trap 'echo interrupted; exit 5' INT; echo begun; while :; do sleep 0.1; done")
    client.send_signal(signal.SIGINT)
    assert client.communicate(timeout=DEADLINE_S)[0] == "interrupted\n" and client.returncode == 5


@pytest.mark.vm
def test_a_shell_has_a_terminal_of_the_right_size(vm_name: str) -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
    env = os.environ | {"SHELL": "/bin/sh", "PS1": "ready> "}
    shell = subprocess.Popen([*LAB, "shell", "--name", vm_name], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    said = b""

    def until(word: bytes) -> None:
        nonlocal said
        end = time.monotonic() + DEADLINE_S
        while word not in said:
            assert time.monotonic() < end, said
            if select.select([ours], [], [], 1.0)[0]:
                said += os.read(ours, 4096)

    try:
        until(b"ready> ")
        os.write(ours, b"stty size; hostname; exit 3\n")
        until(b"31 97")
        until(b"helixrt-lab")
        assert shell.wait(DEADLINE_S) == 3
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


@pytest.mark.vm
@pytest.mark.slow
def test_a_fresh_vm_is_ones_own_and_its_end_is_told(tmp_path: Path) -> None:
    script = "ls /sys/class/infiniband | wc -l; echo b > /proc/sysrq-trigger; sleep 60"
    argv = [*LAB, "run", "--fresh", "--nics", "1", "--memory", "1", "--", "sh", "-c", script]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL, env=env)
    assert done.stdout == "2\n" and done.returncode == 1 and "the VM" in done.stderr
    assert not list(tmp_path.glob("helixrt-lab-*")), "its folder is gone"
