"""The VM lab, as far as any machine can tell: what is missing, the RAM disk, frames, and what users get for wrong settings."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from helixrt import cli
from helixrt.lab import vm, vm_setup
from helixrt.lab.nics import End, NicError, NicPair, make
from helixrt.lab.vm_channel import Command, Frame, Frames, Kind, Status
from helixrt.lab.vm_image import load_order
from helixrt.lab.vm_setup import LabError

DEPENDENCIES = """\
kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/netfs/netfs.ko kernel/fs/fscache/fscache.ko
kernel/fs/netfs/netfs.ko:
kernel/fs/fscache/fscache.ko: kernel/fs/netfs/netfs.ko
kernel/net/9p/9pnet.ko:
kernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio.ko:
"""


# ---- frames ------------------------------------------------------------------------------------


def test_frames_arrive_whole_however_the_bytes_are_cut(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 9, 500]) for _ in range(50)]
    sent = [Frame(draw.choice(list(Kind)), draw.randrange(2**32), draw.randbytes(size)) for size in sizes]
    data = b"".join(frame.encode() for frame in sent)
    cuts = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(80))})
    frames = Frames()
    assert [frame for a, b in itertools.pairwise(cuts) for frame in frames.feed(data[a:b])] == sent


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        list(Frames().feed(b"GET / HTTP/1.1\r\n\r\n"))


def test_commands_and_states_come_back_as_they_were() -> None:
    command = Command(("echo", "ä b"), "/tmp", {"A": "1"}, 2, ("/x",), 3, 4)
    assert Command.decode(command.encode()) == command
    status = Status(2048, 2, True, ("pytest",))
    assert Status.decode(status.encode()) == status


# ---- the RAM disk ------------------------------------------------------------------------------


def test_modules_come_after_those_they_need() -> None:
    order = load_order(("9p", "9pnet_virtio", "virtio_pci"), DEPENDENCIES, "kernel/drivers/virtio/virtio-pci.ko\n")
    assert len(order) == len(set(order)) == 6, "each once; what is built in is not loaded"
    for line in DEPENDENCIES.splitlines():
        file, _, needs = line.partition(":")
        assert all(order.index(need) < order.index(file) for need in needs.split()), order


def test_a_kernel_without_a_module_is_refused() -> None:
    with pytest.raises(LabError, match="no module overlay"):
        load_order(("overlay",), DEPENDENCIES, "")


# ---- set-up ------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any of the lab's programs, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vm_setup, "program", lambda name: None)
    return tmp_path


def a_kernel(cache: Path, version: str) -> Path:
    folder = cache / f"kernel-{version}"
    (folder / "boot").mkdir(parents=True)
    (folder / "boot" / f"vmlinuz-{version}").touch()
    (folder / "lib" / "modules" / version).mkdir(parents=True)
    (folder / "lib" / "modules" / version / "modules.dep").touch()
    return folder


def test_a_kernel_counts_only_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "busybox" / "bin").mkdir(parents=True)
    (tmp_path / "busybox" / "bin" / "busybox").touch()
    assert vm_setup.find_parts(tmp_path) is None
    a_kernel(tmp_path, "6.1.0-9-amd64").rename(tmp_path / "kernel-6.1.0-9-amd64.part")
    assert vm_setup.find_parts(tmp_path) is None, "its unpacking was broken off"
    a_kernel(tmp_path, "6.1.0-9-amd64")
    found = vm_setup.find_parts(tmp_path)
    assert found is not None and found.version == "6.1.0-9-amd64"
    (found.modules / "lib" / "modules" / found.version / "modules.dep").unlink()
    assert vm_setup.find_parts(tmp_path) is None


def test_the_kernel_is_the_one_the_distribution_names() -> None:
    said = "linux-image-amd64\n  Depends: linux-image-6.1.0-37-amd64\n"
    assert vm_setup.newest_kernel(said) == "linux-image-6.1.0-37-amd64"
    with pytest.raises(LabError, match="apt does not know the kernel linux-image-amd64"):
        vm_setup.newest_kernel("linux-image-amd64\n")


def test_setup_says_what_is_missing_and_how_to_get_it(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["lab", "setup"]) == 1
    assert "as root: apt-get install" in (said := capsys.readouterr().err) and said.count("\n") == 1
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert cli.main(["lab", "setup"]) == 1
    assert "no apt here" in (said := capsys.readouterr().err) and "qemu-system-x86" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        ("W: noise\nE: Failed to fetch http://x  Could not resolve 'x'\n", "no network"),
        ("E: Unable to locate package linux-image-amd64\n", "apt does not know"),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend\n", "another apt is running"),
        ("E: Sub-process /usr/bin/dpkg returned an error code (1)\n", "E: Sub-process"),
    ],
)
def test_what_apt_says_is_told_in_one_line(stderr: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{stderr}END\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LabError, match=says) as caught:
        vm_setup._apt(["apt-get", "update"], "the lists")
    assert "\n" not in str(caught.value)


def test_a_run_without_the_lab_says_how_to_set_it_up(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ([], ["--fresh"]):
        assert cli.main(["lab", "run", *option, "--", "true"]) == 1
        assert "helixrt lab setup" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["run"], "command"),
        (["run", "--nics", "99", "--", "true"], "nics"),
        (["run", "--memory", "0.1", "--", "true"], "memory"),
        (["run", "--cpus", "0", "--", "true"], "cpus"),
        (["run", "--share", "/no/such/folder", "--", "true"], "share"),
        (["stop", "--name", "../x"], "name"),
        (["shell"], "shell"),
    ],
)
def test_wrong_settings_are_told_in_one_line(
    arguments: list[str], key: str, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"helixrt: {key}=")


def test_stop_without_a_vm(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "stop"]) == 0
    assert capsys.readouterr().out == "no VM was running\n"


def test_the_guests_python_is_this_one() -> None:
    found = shutil.which("python", path=vm.environment()["PATH"])
    assert found is not None and Path(found).parent == Path(sys.prefix, "bin")


# ---- NIC pairs ---------------------------------------------------------------------------------


def test_pairs_have_names_addresses_and_tables_of_their_own() -> None:
    pairs = [NicPair(number) for number in range(1, vm.MOST_NICS + 1)]
    for of in (NicPair.address, NicPair.hardware, NicPair.table, NicPair.rdma):
        values = [of(pair, end) for pair in pairs for end in End]
        assert len(set(values)) == 2 * len(pairs)
    assert not {pair.table(end) for pair in pairs for end in End} & {0, 253, 254, 255}, "the kernel's own tables"


def test_pairs_are_made_in_the_guest_only() -> None:
    with pytest.raises(NicError, match="helixrt lab run"):
        make(1)
