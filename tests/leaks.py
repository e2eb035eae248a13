"""Leak check: a test that leaves a process, thread, descriptor or file in /dev/shm behind fails, with its name; so does one
that looks a name up.

A pytest plugin. What exists before the first test, what a fixture of a wider scope made (until that scope ends), and what
`once_per_process` lists is not a leak. What a test leaves gets `GRACE_S` and garbage collections to end by itself.
A test that has failed anyway is not checked: its traceback keeps objects alive.

- Processes: children of this process, and every process with this run's mark in its environment, whoever its parent is now.
- Threads: all of /proc/self/task, so those of native code too.
- Descriptors: number and target in /proc/self/fd.
- /dev/shm: new files which no process of others has open, and which do not carry the number of such a process in their name.
"""

from __future__ import annotations

import array
import fcntl
import gc
import ipaddress
import os
import re
import socket
import sys
import termios
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import programs

GRACE_S = 30.0
SHOWN = 12  # of what one test left
MARK = "HELIXRT_TESTS_OF"  # in the environment of all that this process starts
# Fixtures of a wider scope that start processes, or whose servers take connections, while a test runs: checked when their
# scope ends.
ON_DEMAND = frozenset({"ask_ranks", "ray_head", "replica"})
# Tests with these markers, and all that the same process runs after one, only warn of what they leave, and wait less for its
# end: Ray, the VM and Jupyter keep processes, threads and descriptors for later tests, and give them up at any time.
ONLY_WARNED = frozenset({"ray", "vm", "rdma", "notebook"})
WARNED_GRACE_S = 1.0
# Tests that leave what cannot be given up, and what. By the start of their node ids.
STILL_LEAVE = {
    "tests/test_dynamo_backend.py": "torch keeps the process group of a graph with symbolic sizes, in native code",
    "tests/test_private_api.py::test_the_packages_own_behaviour_is_used_and_one_line_says_what_is_lost[FSDP_BACKWARD]": (
        "torch 2.14 keeps how DTensors were placed anew in a cache, and with it their mesh"
    ),
}
# Native threads that torch starts once per process and never ends, by the start of their names.
POOLS = {"pt_autograd_": "one thread per device runs the backward pass"}


class Resource(NamedTuple):
    kind: str  # "process", "thread", "descriptor" or "file"
    number: int
    target: str


Resources = set[Resource]


class Processes:
    """Which processes of this machine are this one's descendants. Each is looked at once."""

    def __init__(self) -> None:
        self._mine: dict[int, bool] = {}

    def living(self) -> Iterator[int]:
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        self._mine = {pid: mine for pid, mine in self._mine.items() if pid in pids}
        for pid in sorted(pids):
            if pid not in self._mine:
                self._mine[pid] = self._is_mine(pid)
            if self._mine[pid] and not is_another_ones_zombie(pid):
                yield pid

    def others(self) -> Iterator[int]:
        return (pid for pid, mine in self._mine.items() if not mine and pid != os.getpid())

    def _is_mine(self, pid: int) -> bool:
        with suppress(OSError, IndexError):
            if self._mine.get(parent := parent_of(pid), False) or parent == os.getpid():
                return True
            return f"{MARK}={os.getpid()}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False


def state_and_parent(pid: int) -> tuple[bytes, int]:
    state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[:2]
    return state, int(parent)


def parent_of(pid: int) -> int:
    return state_and_parent(pid)[1]


def is_another_ones_zombie(pid: int) -> bool:
    """It has ended, and the process that has to wait for it is not this one: init, for a process whose parent was killed."""
    with suppress(OSError, ValueError):
        state, parent = state_and_parent(pid)
        return state in (b"Z", b"X") and parent != os.getpid()
    return False


def once_per_process() -> Iterator[Callable[[Resource], bool]]:
    """What stays on purpose until the process ends, each with its reason."""
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    yield lambda left: left.kind == "process" and left.number in servers  # multiprocessing starts each once
    yield is_of_the_forerunner
    pipes = {forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd}
    yield lambda left: left.kind == "descriptor" and left.number in pipes  # their end ends the servers
    yield lambda left: (left.kind, left.number) in programs.kept()  # one process forks all programs
    # A semaphore of a killed process is deleted with the session, by multiprocessing's server; its name does not tell whose.
    yield lambda left: left.kind == "file" and left.target.startswith("sem.mp-")
    yield is_libuv_lock
    yield lambda left: left.kind == "thread" and name_of(left.number).startswith(tuple(POOLS))
    yield is_of_tokio
    yield is_of_inductor
    yield is_of_openmp
    yield is_of_profiler
    # multiprocessing keeps the memory of its shared values for later ones.
    yield lambda left: left.kind == "descriptor" and left.target.startswith("/dev/shm/pym-")
    # matplotlib keeps the fonts that it has read.
    yield lambda left: left.kind == "descriptor" and left.target.endswith(".ttf")
    # tqdm starts one thread per process, with the first progress bar.
    yield lambda left: left.kind == "thread" and thread_named(left.number) == "tqdm_monitor"


def is_of_the_forerunner(left: Resource) -> bool:
    """Of all local launchers of this process: it ends with the process (helixrt/job/forerunner.py)."""
    one = getattr(sys.modules.get("helixrt.job.forerunner"), "_shared", None)
    if one is None or left.kind not in ("process", "descriptor"):
        return False
    return left.number in ((one.pid,) if left.kind == "process" else (one._control.fileno(), one._output.fileno()))


def is_libuv_lock(left: Resource) -> bool:
    """libuv, which is in torch's TCPStore, makes one pipe per process: both ends are here, and it holds one byte."""
    if left.kind != "descriptor" or not left.target.startswith("pipe:"):
        return False
    unread = array.array("i", [0])
    ends = [fd for fd in os.listdir("/proc/self/fd") if link_of(f"/proc/self/fd/{fd}") == left.target]
    with suppress(OSError):
        fcntl.ioctl(left.number, termios.FIONREAD, unread)
    return len(ends) == 2 and unread[0] == 1


def is_of_tokio(left: Resource, pair: set[str] = set()) -> bool:  # noqa: B006, of this process
    """tokio, which is in torchft, makes one pair of sockets per process, for signals. Both stay open here; their inodes follow
    each other. Of a pair with another process, one end is open here. A pair that is closed later is not tokio's."""
    if "torchft" in sys.modules and is_like_tokios(left):
        inode = int(left.target[len("socket:[") : -1])
        own = {one.target for one in descriptors() if is_like_tokios(one)}
        if not pair <= own:
            pair.clear()
        if not pair and (twins := own & {f"socket:[{inode - 1}]", f"socket:[{inode + 1}]"}):
            pair |= {left.target, *twins}
    return left.target in pair


def descriptors() -> Resources:
    found: Resources = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing is closed
            found.add(Resource("descriptor", int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def is_like_tokios(one: Resource) -> bool:
    """A stream without a name that does not block."""
    if one.kind == "descriptor" and one.target.startswith("socket:"):
        with suppress(OSError), socket.socket(fileno=os.dup(one.number)) as end:
            stream = (end.family, end.type) == (socket.AF_UNIX, socket.SOCK_STREAM)
            return stream and end.getsockname() == "" == end.getpeername() and not os.get_blocking(end.fileno())
    return False


def is_of_inductor(left: Resource) -> bool:
    """torch's inductor compiles in the threads of one pool per process."""
    module = sys.modules.get("torch._inductor.async_compile")
    if module is None or left.kind != "thread" or not module.AsyncCompile.pool.cache_info().currsize:
        return False
    return any(thread.native_id == left.number for thread in module.AsyncCompile.pool()._threads)


def is_of_openmp(left: Resource) -> bool:
    """OpenMP, which torch uses inside operators, keeps its threads for later operators: they wait in its library."""
    return bool(left.kind == "thread" and re.match(r"lib[gi]?omp", waits_in(left.number)))


def is_of_profiler(left: Resource, first: set[int] = set()) -> bool:  # noqa: B006, of this process
    """kineto, which is in torch, starts one thread per process with the first profile, and gives it no name. It waits in libc,
    as a thread of OpenMP does at its start alone."""
    if left.kind == "thread" and not thread_named(left.number) and name_of(left.number) == name_of(os.getpid()):
        first &= {number for number in first if waits_in(number).startswith("libc.")}
        first |= {left.number} if not first and waits_in(left.number).startswith("libc.") else set()
    return left.number in first


def waits_in(thread: int) -> str:
    """The library from which a thread called the system; empty for one that runs."""
    with suppress(OSError, ValueError):
        address = int(Path(f"/proc/self/task/{thread}/syscall").read_text().split()[-1], 16)
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, _, last = line.split()[0].partition("-")
            if int(first, 16) <= address < int(last, 16):
                return Path(line.split()[-1]).name
    return ""


def link_of(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""


def thread_named(number: int) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.native_id == number), "")


def name_of(thread: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    return ""


class LeakCheck:
    def __init__(self) -> None:
        self._processes = Processes()
        self._known: Resources = set()
        self._held: dict[Any, Resources] = {}
        self._failed = self._only_warns = False
        self._lookups: list[str] = []
        forbid_lookups(self._lookups)

    def now(self) -> Resources:
        found = {Resource("process", pid, "") for pid in self._processes.living()}
        found |= {Resource("thread", int(name), "") for name in os.listdir("/proc/self/task")}
        found |= descriptors()
        with suppress(OSError):
            found |= {Resource("file", 0, name) for name in os.listdir("/dev/shm")}
        return found

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        self._failed = False
        if self._known:  # pytest's own watchdog thread of this test
            self._known |= {Resource("thread", int(name), "") for name in os.listdir("/proc/self/task")}
        else:
            self._known = self.now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._failed = self._failed or report.failed
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self.now()
        try:
            return (yield)
        finally:
            self._held[fixturedef] = self.now() - before

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self._held.pop(fixturedef, None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._only_warns |= not ONLY_WARNED.isdisjoint(mark.name for mark in item.iter_markers())
            lookups, self._lookups[:] = self._lookups[:], []
            now, left = self.now(), set()
            self._failed = self._failed or item.nodeid.startswith(tuple(STILL_LEAVE))
            if not self._failed and (left := self._left(now)):
                now, left = self._after_grace(item)
            self._known &= now
            self._known |= left if not self._failed else now
        if problems := [*(f"name look-up: {name}" for name in lookups), *map(described, sorted(left, reverse=True))]:
            more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
            text = "left behind by this test:\n  " + "\n  ".join(problems[:SHOWN] + more)
            if not self._only_warns:
                pytest.fail(text, pytrace=False)
            warnings.warn(text, stacklevel=1)

    def _left(self, now: Resources) -> Resources:
        left = now - self._known
        return left.difference(*self._held.values()) if left else left

    def _after_grace(self, item: pytest.Item) -> tuple[Resources, Resources]:
        holders = [fixture for fixture in self._held if fixture.argname in ON_DEMAND & set(getattr(item, "fixturenames", ()))]
        getattr(item, "funcargs", {}).clear()  # pytest drops them right after this
        ends_s, wait_s = time.monotonic() + (min(WARNED_GRACE_S, GRACE_S) if self._only_warns else GRACE_S), 0.001
        while True:
            last = time.monotonic() >= ends_s
            now = self.now()
            once = list(once_per_process())
            self._known |= {one for one in self._left(now) if any(kept(one) for kept in once) or self._is_of_others(one)}
            left = self._left(now)
            if left and holders:
                self._held[holders[0]] |= left
                left = set()
            if last or not left:
                return now, left
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)
            if wait_s > 0.03:  # a thread that has just been joined ends sooner
                drop_cached_groups()
                gc.collect()

    def _is_of_others(self, left: Resource) -> bool:
        if left.kind != "file":
            return False
        path, numbers = f"/dev/shm/{left.target}", {int(number) for number in re.findall(r"\d+", left.target)}
        for pid in self._processes.others():
            with suppress(OSError):
                if pid in numbers or path in Path(f"/proc/{pid}/maps").read_text():
                    return True
                if any(os.readlink(one.path) == path for one in os.scandir(f"/proc/{pid}/fd")):
                    return True
        return False


def drop_cached_groups() -> None:
    """torch caches how operators share DTensors out, with their device meshes and so with process groups. Dynamo keeps the
    groups of what it has compiled."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "torch.distributed.tensor" in sys.modules:
        getattr(sys.modules["torch"]._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def described(left: Resource) -> str:
    if left.kind == "process":
        with suppress(OSError):
            command = Path(f"/proc/{left.number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"process {left.number}, child of {parent_of(left.number)}: {command.strip() or 'ended, not waited for'}"
    if left.kind == "thread":
        named = thread_named(left.number)
        return f"thread {left.number}: {repr(named) if named else f'{name_of(left.number)} (native)'}"
    if left.kind == "descriptor":
        peers = ""
        if left.target.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(left.number)) as end:
                peers = f", {end.family.name} {end.getsockname()!r}"
                peers += f" to {end.getpeername()!r}"
        return f"descriptor {left.number}: {left.target}{peers}"
    return f"file /dev/shm/{left.target}" if left.kind == "file" else f"{left.kind} {left.number}"


def is_looked_up(host: object) -> bool:
    """Whether the resolver would ask for this host: not for addresses, and localhost is in /etc/hosts."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost", "<broadcast>"):
        return False
    with suppress(ValueError):
        ipaddress.ip_address(str(name).partition("%")[0])
        return False
    with suppress(OSError):  # other ways to write an address, such as 0x7f000001
        socket.inet_aton(str(name))
        return False
    return True


def forbid_lookups(lookups: list[str]) -> None:
    """From now on Python's look-ups of names raise gaierror at once and are noted in `lookups`."""
    for function in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        ask = getattr(socket, function)

        def guarded(host: object, *arguments: Any, ask: Any = ask, function: str = function, **named: Any) -> Any:
            if is_looked_up(host):
                if not str(host).endswith(".invalid") and ".." not in str(host):  # no such name can have an address (RFC 2606)
                    lookups.append(f"socket.{function}({host!r})")
                raise socket.gaierror(socket.EAI_AGAIN, f"tests look no name up: {host!r}")
            return ask(host, *arguments, **named)

        setattr(socket, function, guarded)


def watch(config: pytest.Config) -> None:
    os.environ[MARK] = str(os.getpid())
    os.environ["RES_OPTIONS"] = "attempts:0"  # no process of the tests asks a name server (resolv.conf(5))
    config.pluginmanager.register(LeakCheck(), "leak check")
