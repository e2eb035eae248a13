"""The VM's first file system: a shell, the modules to reach the host's files, and a script that goes over to them.

In: the unpacked kernel and what the guest's agent is started with. Out: an initial RAM disk (cpio, "newc" format), made in
Python, so that nothing but the kernel's package and one static program is needed. The guest's root is the host's, through
9p and read only, under an overlay in the guest's memory: programs may write anywhere, and nothing of it reaches the host.
"""

from __future__ import annotations

import gzip
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from helixrt.lab.vm_setup import LabError, Parts

MODULES = ("virtio_pci", "virtio_rng", "virtio_console", "9p", "9pnet_virtio", "overlay")
ROOT_TAG, WRITABLE_TAG = "root", "writable"
WRITABLE = "/run/helixrt/host"  # the host's files once more in the guest, not cached and writable
NINE_P = "trans=virtio,version=9p2000.L,msize=512000"

SCRIPT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /lower /upper /whole
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in {modules}; do insmod /modules/$module || echo "helixrt: cannot load $module"; done
mount -t 9p -o ro,{nine_p},cache=loose {root} /lower || echo "helixrt: no files of the host"
mount -t tmpfs -o size=80% upper /upper
mkdir /upper/changes /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/changes,workdir=/upper/work whole /whole || echo "helixrt: no overlay"
mount --move /proc /whole/proc
mount --move /sys /whole/sys
mount --move /dev /whole/dev
mkdir -p /whole/dev/pts /whole/dev/shm
mount -t devpts -o mode=620,ptmxmode=666 pts /whole/dev/pts
mount -t tmpfs shm /whole/dev/shm
mount -t tmpfs run /whole/run
mkdir -p /whole{writable_at}
mount -t 9p -o rw,{nine_p},cache=none {writable} /whole{writable_at} || echo "helixrt: no writable files"
exec switch_root /whole /bin/sh -c {command}
"""


@dataclass(frozen=True)
class Entry:
    """One file or folder of an archive."""

    name: str
    data: bytes = b""
    mode: int = stat.S_IFREG | 0o644


def archive(entries: Iterable[Entry]) -> bytes:
    """A cpio archive in the format the kernel unpacks: header of thirteen hexadecimal fields, name, data, each padded to 4."""
    blocks = []
    for number, entry in enumerate([*entries, Entry("TRAILER!!!", mode=0)], start=1):
        name = entry.name.encode() + b"\0"
        fields = (number, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields) + name
        blocks += [header + b"\0" * (-len(header) % 4), entry.data + b"\0" * (-len(entry.data) % 4)]
    return b"".join(blocks)


def load_order(wanted: Sequence[str], dependencies: str, builtin: str) -> list[str]:
    """Files of modules, each after those it needs. `dependencies`, `builtin`: the text of modules.dep and modules.builtin."""
    needs = {}
    for line in dependencies.splitlines():
        file, _, rest = line.partition(":")
        needs[_name(file)] = (file, rest.split())
    inside = {_name(line) for line in builtin.splitlines()}
    order: list[str] = []

    def add(file: str) -> None:
        if file not in order:
            for before in needs[_name(file)][1]:
                add(before)
            order.append(file)

    for name in wanted:
        if (key := _name(name)) in needs:
            add(needs[key][0])
        elif key not in inside:
            raise LabError(f"the kernel has no module {name}, as Debian's stock kernels have: see helixrt lab setup")
    return order


def _name(file: str) -> str:
    return Path(file).name.partition(".ko")[0].replace("-", "_")


def image(parts: Parts, agent: Sequence[str]) -> bytes:
    """The RAM disk that ends in running `agent` (a command with its arguments) as the guest's first program.

    When the agent ends, so does the machine.
    """
    folder = parts.modules / "lib" / "modules" / parts.version
    order = load_order(MODULES, (folder / "modules.dep").read_text(), (folder / "modules.builtin").read_text())
    command = f"{shlex.join(agent)}; echo o > /proc/sysrq-trigger; sleep 60"
    script = SCRIPT.format(
        modules=" ".join(f"{_name(file)}.ko" for file in order),
        nine_p=NINE_P,
        root=ROOT_TAG,
        writable=WRITABLE_TAG,
        writable_at=WRITABLE,
        command=shlex.quote(command),
    )
    return archive(_entries(parts, folder, order, script))


def _entries(parts: Parts, folder: Path, order: Sequence[str], script: str) -> Iterator[Entry]:
    for name in ("bin", "dev", "modules"):
        yield Entry(name, mode=stat.S_IFDIR | 0o755)
    yield Entry("init", script.encode(), stat.S_IFREG | 0o755)
    yield Entry("bin/busybox", parts.busybox.read_bytes(), stat.S_IFREG | 0o755)
    for file in order:
        yield Entry(f"modules/{_name(file)}.ko", _unpacked(folder / file))


def _unpacked(file: Path) -> bytes:
    data = file.read_bytes()
    if file.suffix == ".xz":
        import lzma  # not in every Python

        return lzma.decompress(data)
    if file.suffix == ".gz":
        return gzip.decompress(data)
    if file.suffix != ".ko":
        raise LabError(f"{file} is packed in a way this Python cannot unpack")
    return data
