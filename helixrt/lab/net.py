"""Several hosts on one machine: network namespaces joined by rails whose rate can change and which can break.

In: how many hosts and rails, and a rate. Out: a `Network` that starts programs on its hosts and changes its links while
they run. Host `h` has the devices rail0, rail1, ...; rail `r` is the subnet 10.77.r.0/24, in which host `h` is
10.77.r.(h+1). A namespace of its own, the switch, holds one bridge per rail and a port per host; so nothing of a network
is in the machine's own namespace, and removing namespaces removes all of it.

A rate holds for each direction of each host's rail: what the host sends is shaped at its device, what it receives at
its port of the switch. Needs root (`machine.lacking` says what else).
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from helixrt.errors import ConfigError
from helixrt.lab import machine, namespaces
from helixrt.lab.namespaces import NetworkError, call, signals_later
from helixrt.lab.shaping import Shape, changes

MOST_HOSTS, MOST_RAILS = 250, 250
LEAST_SEGMENT_BYTES, MOST_SEGMENT_BYTES = 2_000, 65_536
MASTER_PORT = 29500  # free: the namespace is new
_NOWHERE = "02:00:00:00:00:00"  # a locally administered hardware address that no device here has

_numbers = itertools.count()


class Direction(Enum):
    """Of a host's rail, as the host sees it."""

    OUT = ("out",)
    IN = ("in",)
    BOTH = ("out", "in")


class Cut(Enum):
    """Where a rail is cut: at the host's device, which the host detects at once, or beyond it, where the host gets no error."""

    DEVICE = "device"
    PATH = "path"


class Network:
    """`hosts` namespaces joined by `rails`; exists from `with` to the end of its block, whatever ends that.

    rate_mbit: of every rail, each way; None for no limit. delay_ms: one way, on every rail; needs a kernel with netem.
    burst_bytes, queue_ms: see `shaping.Shape`. ConfigError when a value or the machine does not allow it.

    While it exists, SIGTERM and SIGHUP, unless the program handles them, become SystemExit, so that the block is left
    and the network removed (in the main thread, the only one that may handle signals). What even that cannot catch,
    `namespaces.clean` removes later. One thread at a time may call a network.
    """

    def __init__(
        self,
        hosts: int = 2,
        rails: int = 1,
        rate_mbit: float | None = None,
        *,
        delay_ms: float = 0.0,
        burst_bytes: int | None = None,
        queue_ms: float = 200.0,
    ) -> None:
        for key, value, most in (("hosts", hosts, MOST_HOSTS), ("rails", rails, MOST_RAILS)):
            if not 1 <= value <= most:
                raise ConfigError(key, value, f"is between 1 and {most}")
        self.hosts, self.rails = hosts, rails
        self._shape = Shape(rate_mbit, delay_ms, burst_bytes, queue_ms)
        self._owner: namespaces.Owner | None = None
        self._names: list[str] = []  # of the hosts' namespaces; empty before and after
        self._switch = ""
        self._shapes: dict[tuple[str, str], Shape] = {}  # (namespace, device) -> what it is shaped to
        self._cuts: dict[tuple[int, int], Cut] = {}
        self._blocks: set[tuple[int, int, int]] = set()  # (source, target, rail)
        self._processes: list[subprocess.Popen[Any]] = []
        self._handled: list[signal.Signals] = []

    # ---- names -------------------------------------------------------------------------------

    def namespace(self, host: int) -> str:
        """Name of a host's namespace, for `ip netns exec NAME ...`."""
        self._check(host)
        if not self._names:
            raise NetworkError("the network is not there: use it inside its `with` block")
        return self._names[host]

    def device(self, rail: int = 0) -> str:
        """The interface of a rail, of the same name on every host."""
        self._check(0, rail)
        return f"rail{rail}"

    def address(self, host: int, rail: int = 0) -> str:
        """A host's IPv4 address on a rail."""
        self._check(host, rail)
        return f"10.77.{rail}.{host + 1}"

    def environment(self, host: int) -> dict[str, str]:
        """Environment of a program on a host: its host, its addresses, and what torch.distributed needs to use rail 0."""
        return {
            "HELIXRT_HOST": str(host),
            "HELIXRT_HOSTS": str(self.hosts),
            "HELIXRT_ADDRESS": self.address(host),
            "HELIXRT_RAILS": ",".join(self.device(rail) for rail in range(self.rails)),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": self.device(),
            "NCCL_SOCKET_IFNAME": self.device(),
        }

    def _check(self, host: int, rail: int = 0) -> None:
        for key, value, count in (("host", host, self.hosts), ("rail", rail, self.rails)):
            if not 0 <= value < count:
                raise ConfigError(key, value, f"is one of 0 to {count - 1}")

    def _port(self, host: int, rail: int) -> str:
        return f"h{host}r{rail}"

    # ---- life --------------------------------------------------------------------------------------

    def __enter__(self) -> Network:
        if self._owner is not None:
            raise NetworkError("a Network is entered once; make another")
        if (lack := machine.lacking()) is not None:
            raise ConfigError("lab", "net", str(lack))
        if self._shape.delay_ms and (refusal := machine.no_delay()) is not None:
            rule = f"needs netem, which this kernel lacks ({refusal}); use 0, and delay in the program"
            raise ConfigError("delay_ms", self._shape.delay_ms, rule)
        self._owner, number = namespaces.this_process(), next(_numbers)
        self._names = [namespaces.name_of(self._owner, number, f"host{h}") for h in range(self.hosts)]
        self._switch = namespaces.name_of(self._owner, number, "switch")
        atexit.register(self.close)  # for a signal that comes when the block is left but `close` has hardly begun
        try:
            self._handle_signals()
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _build(self) -> None:
        for name in (self._switch, *self._names):
            call(["ip", "netns", "add", name])
            call(["ip", "-n", name, "link", "set", "lo", "up"])
        for rail in range(self.rails):
            bridge = self.device(rail)
            call(["ip", "-n", self._switch, "link", "add", bridge, "type", "bridge", "stp_state", "0", "mcast_snooping", "0"])
            # IPv4 alone: no link-local addresses, and none of their traffic on a rated link.
            call(["ip", "-n", self._switch, "link", "set", bridge, "addrgenmode", "none", "up"])
            for host, name in enumerate(self._names):
                device, port = self.device(rail), self._port(host, rail)
                ends = ["type", "veth", "peer", "name", port, "netns", self._switch]
                call(["ip", "link", "add", device, "netns", name, *ends])
                call(["ip", "-n", self._switch, "link", "set", port, "master", bridge, "addrgenmode", "none", "up"])
                call(["ip", "-n", name, "link", "set", device, "addrgenmode", "none", "up"])
                call(["ip", "-n", name, "address", "add", f"{self.address(host, rail)}/24", "dev", device])
                self._reshape(name, device, self._shape)
                self._reshape(self._switch, port, replace(self._shape, delay_ms=0.0))

    def close(self) -> None:
        """End every process on the hosts and remove the network. Does nothing the second time, or in a forked child."""
        if not self._names or namespaces.this_process() != self._owner:
            return
        try:
            with signals_later():
                try:
                    namespaces.remove([*self._names, self._switch])
                finally:
                    self._reap()
                self._names = []
                atexit.unregister(self.close)
        finally:
            for number in self._handled:
                if signal.getsignal(number) is _leave:
                    signal.signal(number, signal.SIG_DFL)

    def _reap(self) -> None:
        for process in self._processes:
            if process.poll() is None:  # it had not entered its namespace yet, or has left it
                process.kill()
                process.wait(namespaces.KILL_S)

    def _handle_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in namespaces.ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _leave)
                self._handled.append(number)

    # ---- links -------------------------------------------------------------------------------------

    def rate(self, host: int, rail: int = 0, direction: Direction = Direction.OUT) -> float | None:
        """Mbit/s a host's rail is limited to, out or in; None for no limit."""
        if direction is Direction.BOTH:
            raise ConfigError("direction", direction.name, "is OUT or IN: the two may differ")
        return self._shapes[self._shaped(host, rail)[direction.value[0]]].rate_mbit

    def set_rate(self, host: int, rail: int, rate_mbit: float | None, direction: Direction = Direction.BOTH) -> None:
        """Change the rate of one host's rail while programs run; None takes the limit away."""
        places = self._shaped(host, rail)
        for way in direction.value:
            self._reshape(*places[way], self._shapes[places[way]].at(rate_mbit))

    def set_queue(self, host: int, rail: int, queue_ms: float, direction: Direction = Direction.BOTH) -> None:
        """Change how long packets may wait for the rate of one host's rail before they are dropped."""
        places = self._shaped(host, rail)
        for way in direction.value:
            self._reshape(*places[way], replace(self._shapes[places[way]], queue_ms=queue_ms))

    def set_segment(self, host: int, rail: int, segment_bytes: int) -> None:
        """Change the most that TCP hands at once to a host's rail, each way (64 KB before); a burst becomes a quarter more."""
        if not LEAST_SEGMENT_BYTES <= segment_bytes <= MOST_SEGMENT_BYTES:
            raise ConfigError("segment_bytes", segment_bytes, f"is between {LEAST_SEGMENT_BYTES} and {MOST_SEGMENT_BYTES}")
        for name, device in self._shaped(host, rail).values():
            call(["ip", "-n", name, "link", "set", device, "gso_max_size", str(segment_bytes)])
            self._reshape(name, device, replace(self._shapes[name, device], burst_bytes=segment_bytes * 5 // 4))
        # Connections look at a device's limit when they look for their route, and above it packets would be cut one by one.
        call(["ip", "-n", self.namespace(host), "route", "flush", "cache"])

    def cut(self, host: int, rail: int = 0, at: Cut = Cut.DEVICE) -> None:
        """Break a host's rail. Connections over it stall; with `Cut.DEVICE` new ones fail on that host at once."""
        name, _ = self._shaped(host, rail)["out"]
        if (host, rail) in self._cuts:
            raise NetworkError(f"rail {rail} of host {host} is cut already: restore it first")
        if at is Cut.DEVICE:
            call(["ip", "-n", name, "link", "set", self.device(rail), "down"])
        else:  # out of the bridge: both ends stay up, and what is sent is lost
            call(["ip", "-n", self._switch, "link", "set", self._port(host, rail), "nomaster"])
        self._cuts[host, rail] = at

    def restore(self, host: int, rail: int = 0) -> None:
        """Undo a cut; does nothing to a whole rail. Addresses and rates are as they were."""
        name, _ = self._shaped(host, rail)["out"]
        at = self._cuts.get((host, rail))
        if at is Cut.DEVICE:
            call(["ip", "-n", name, "link", "set", self.device(rail), "up"])
        elif at is Cut.PATH:
            call(["ip", "-n", self._switch, "link", "set", self._port(host, rail), "master", self.device(rail)])
        self._cuts.pop((host, rail), None)

    def block(self, source: int, target: int, rail: int = 0) -> None:
        """Lose all that host `source` sends to host `target` over a rail; nothing else is affected, the way back neither.

        No host gets an error: packets go to a hardware address that no host has. Blocking it twice is the same as once.
        """
        self._neighbour("replace", source, target, rail, "lladdr", _NOWHERE, "nud", "permanent")
        self._blocks.add((source, target, rail))

    def unblock(self, source: int, target: int, rail: int = 0) -> None:
        """Undo `block`; does nothing if it was not called."""
        if (source, target, rail) in self._blocks:
            self._neighbour("del", source, target, rail)
            self._blocks.discard((source, target, rail))

    def _neighbour(self, do: str, source: int, target: int, rail: int, *more: str) -> None:
        self._check(target, rail)
        device = self.device(rail)
        call(["ip", "-n", self.namespace(source), "neigh", do, self.address(target, rail), *more, "dev", device])

    def _shaped(self, host: int, rail: int) -> dict[str, tuple[str, str]]:
        """Where the two directions of a host's rail are shaped: (namespace, device)."""
        self._check(host, rail)
        return {"out": (self.namespace(host), self.device(rail)), "in": (self._switch, self._port(host, rail))}

    def _reshape(self, name: str, device: str, shape: Shape) -> None:
        for step in changes(device, self._shapes.get((name, device), Shape()), shape):
            call(["tc", "-n", name, *step])
        self._shapes[name, device] = shape

    # ---- programs ----------------------------------------------------------------------------------

    def run(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        cpus: Collection[int] | None = None,
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        errors: str | None = None,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host, with `environment(host)` and then `env` added to this process's environment.

        cpus: the cores it may use. stdin, stdout, stderr, text, errors: as for subprocess.Popen. The process has the
        program's own id. It and its children are ended with the network at the latest. ConfigError if there is no such program.
        """
        name = self.namespace(host)
        variables = {**os.environ, **self.environment(host), **(env or {})}
        program = Path(cwd or ".", argv[0]) if os.sep in argv[0] else argv[0]
        if shutil.which(program, path=variables.get("PATH")) is None:
            raise ConfigError("command", argv[0], "is not a program that can be run here")
        with signals_later(), _on_cpus(cpus):
            command = ["ip", "netns", "exec", name, *argv]
            process = subprocess.Popen(
                command, env=variables, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, text=text, errors=errors
            )
            self._processes.append(process)
        return process


@contextmanager
def _on_cpus(cpus: Collection[int] | None) -> Iterator[None]:
    """What this thread starts meanwhile may use only these cores: a child has its parent thread's affinity at birth."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        raise ConfigError("cpus", sorted(cpus), f"are among {sorted(before)}") from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
