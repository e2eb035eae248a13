"""What the RDMA lab's VM is made of, and fetching it: programs of the system, a stock kernel, a shell for its first second.

The machine's own kernel may have no Soft-RoCE and load no modules; Debian's stock kernel has it, and QEMU runs that
kernel anywhere. In: a Debian (or derived) system with apt. Out: `Parts`, files in a cache folder
(`$XDG_CACHE_HOME/helixrt/lab`, else `~/.cache/helixrt/lab`). The kernel's package is downloaded and unpacked there, never
installed: nothing goes to /boot. The programs are installed with apt, which needs root; all else does not.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from helixrt.errors import HelixError
from helixrt.lab.machine import Lack

SETUP = "helixrt lab setup"
ARCHITECTURE = "x86_64"
KERNEL, SHELL = "linux-image-amd64", "busybox-static"  # packages; the first only names the newest kernel's
CALL_TIMEOUT_S = 900
PROGRAMS = {  # what must be there, a command or a file -> the package that brings it
    "qemu-system-x86_64": "qemu-system-x86",
    "ip": "iproute2",
    "rdma": "iproute2",
    "depmod": "kmod",
    "modprobe": "kmod",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
    "/etc/rdma": "rdma-core",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",  # what PyPI's pyverbs is built with
    "/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs",
}
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")  # not on every user's PATH


class LabError(HelixError):
    """The lab cannot be set up, started or reached. One line, with what to do."""


@dataclass(frozen=True)
class Parts:
    """What is in the cache. `modules` is what modprobe takes by -d: it holds lib/modules/VERSION."""

    version: str
    kernel: Path
    modules: Path
    busybox: Path


def cache_folder() -> Path:
    home = os.path.expanduser("~")
    if not os.path.isabs(home):  # neither HOME nor an entry of this user
        home = os.path.join(tempfile.gettempdir(), f"user-{os.getuid()}")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache")) / "helixrt" / "lab"


# ---- what is missing ---------------------------------------------------------------------------


def program(name: str) -> str | None:
    """Where a command (by name) or a file (by absolute path) is, the system's folders included; None when it is not."""
    if name.startswith("/"):
        return name if os.path.exists(name) else None
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])
    return shutil.which(name, path=path)


def missing_packages() -> list[str]:
    """Packages of the system that the lab needs and that are not here."""
    return sorted({package for name, package in PROGRAMS.items() if program(name) is None})


def find_parts(cache: Path | None = None) -> Parts | None:
    """The newest kernel in the cache with what belongs to it, or None."""
    cache = cache or cache_folder()
    busybox = cache / "busybox" / "bin" / "busybox"
    found = [
        Parts(version, kernel, folder, busybox)
        for folder in cache.glob("kernel-*")
        if "." in (version := folder.name.removeprefix("kernel-")) and not folder.name.endswith(".part")
        if (kernel := folder / "boot" / f"vmlinuz-{version}").is_file()
        if (folder / "lib" / "modules" / version / "modules.dep").is_file()
    ]
    return max(found, key=lambda parts: parts.kernel.stat().st_mtime) if found and busybox.is_file() else None


def lacking() -> Lack | None:
    """The first thing in the way of running the lab's VM here, or None."""
    if not sys.platform.startswith("linux") or platform.machine() != ARCHITECTURE:
        return Lack(f"no VM lab on {sys.platform} {platform.machine()}", f"run on Linux {ARCHITECTURE}")
    if packages := missing_packages():
        return Lack(f"not installed: {' '.join(packages)}", f"as root, on Debian: {SETUP}")
    if find_parts() is None:
        return Lack(f"no kernel for the VM in {cache_folder()}", SETUP)
    return None


# ---- fetching ----------------------------------------------------------------------------------


def set_up(say: Callable[[str], None], cache: Path | None = None) -> Parts:
    """Fetch what is missing; does nothing when all is here. LabError in one line when it cannot."""
    if not sys.platform.startswith("linux") or platform.machine() != ARCHITECTURE:
        raise LabError(f"the lab's VM runs on Linux {ARCHITECTURE}; this is {sys.platform} {platform.machine()}")
    cache = cache or cache_folder()
    packages = missing_packages()
    parts = find_parts(cache)
    if (packages or parts is None) and (shutil.which("apt-get") is None or shutil.which("dpkg") is None):
        wanted = " ".join([*packages, *(() if parts else (KERNEL, SHELL))])
        raise LabError(f"no apt here: the lab is set up on Debian and its relatives only (it needs {wanted})")
    updated = False
    if packages:
        if os.geteuid() != 0:
            raise LabError(f"not root: install these first, as root: apt-get install {' '.join(packages)}")
        say(f"installing {' '.join(packages)}")
        _apt(["apt-get", "update", "-qq"], "the package lists")
        updated = True
        _apt(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages], " ".join(packages))
        if still := missing_packages():
            raise LabError(f"apt-get installed {' '.join(still)}, but without what the lab looks for; is it a newer release?")
    if parts is None:
        if not updated and os.geteuid() == 0:
            _apt(["apt-get", "update", "-qq"], "the package lists")
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / "busybox").is_dir():
            say(f"fetching {SHELL}")
            _unpack(SHELL, cache / "busybox", _nothing_more)
        package = newest_kernel(_apt(["apt-cache", "depends", "--important", KERNEL], KERNEL))
        version = package.removeprefix("linux-image-")
        if not (cache / f"kernel-{version}").is_dir():
            say(f"fetching {package} (70 to 120 MB)")
            _unpack(package, cache / f"kernel-{version}", lambda folder: _index(folder, version))
        parts = find_parts(cache)
        if parts is None:
            raise LabError(f"{cache} holds no whole kernel: remove that folder and run {SETUP} again")
    say(f"ready: kernel {parts.version} in {cache}")
    return parts


def newest_kernel(said: str) -> str:
    """The package of the kernel, from what `apt-cache depends` says of the package that names the newest."""
    for line in said.splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-") and any(letter.isdigit() for letter in name):
            return name
    raise LabError(f"apt does not know the kernel {KERNEL}: run apt-get update; Ubuntu's kernels are not supported")


def _nothing_more(folder: Path) -> None:
    pass


def _index(folder: Path, version: str) -> None:
    """Which module needs which; a package of a release that keeps /lib in /usr/lib is laid as the others."""
    if not (folder / "lib").exists() and (folder / "usr" / "lib" / "modules").is_dir():
        (folder / "lib").symlink_to("usr/lib")
    depmod = program("depmod")
    assert depmod is not None  # one of PROGRAMS
    _call([depmod, "-b", str(folder), version], f"the index of {version}'s modules")


def _unpack(package: str, folder: Path, finish: Callable[[Path], None]) -> None:
    """Download a package and unpack it as `folder`, which appears whole or not at all."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="helixrt-lab-") as downloads:
        os.chmod(downloads, 0o755)  # apt downloads as a user of its own
        _apt(["apt-get", "download", "-q", package], package, downloads)
        (archive,) = Path(downloads).glob("*.deb")
        _call(["dpkg", "-x", str(archive), str(part)], package)
    finish(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _apt(argv: Sequence[str], what: str, folder: str | None = None) -> str:
    try:
        return _call(argv, what, folder)
    except LabError as error:
        said = str(error)
        if any(sign in said for sign in ("Could not resolve", "Failed to fetch", "Could not connect", "Unable to connect")):
            raise LabError(f"no network, or the mirror does not answer: {said}") from error
        if "Unable to locate" in said or "No packages found" in said or "Can't find" in said:
            raise LabError(f"apt does not know {what} (run apt-get update; the lab follows Debian's names): {said}") from error
        if "Could not get lock" in said or "Unable to acquire" in said:
            raise LabError(f"another apt is running; try again when it has ended: {said}") from error
        raise


def _call(argv: Sequence[str], what: str, folder: str | None = None) -> str:
    """Run a program of the system; gives its output. LabError with its first error line when it fails."""
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_TIMEOUT_S,
            cwd=folder,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{what}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.startswith("E:")] or done.stderr.strip().splitlines()
        raise LabError(f"{what}: {argv[0]} {argv[1]} failed: {lines[0] if lines else f'exit code {done.returncode}'}")
    return done.stdout
