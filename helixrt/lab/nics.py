"""NIC pairs inside the lab's VM: a1-b1, a2-b2, ... each a cable between two Soft-RoCE NICs, which tests cut and mend.

In: how many. Out: `NicPair`s whose two ends are RDMA devices rxe_aN and rxe_bN. Soft-RoCE of a stock kernel knows only the
first network namespace, so both ends live in one; rules and route tables of their own, and neighbours that never expire,
make what goes between a pair's two addresses cross its cable all the same, for RDMA and for TCP (from a bound address).
Runs in the guest as root; `make` rebuilds the guest's rules, so it refuses to run anywhere else.

    python -m helixrt.lab.nics down a1 | blackhole b2 | heal 1     from a shell there
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from helixrt.errors import HelixError
from helixrt.lab import rtnetlink

GUEST = "HELIXRT_LAB"  # set for what runs in the guest
MTU = 9000  # an RDMA path of 4096 bytes
LIMIT_PACKETS = 100_000  # held by netem: none is lost for lack of room
READY_S = 10.0
CALL_S = 60.0
RDMA_FOLDER, NETWORK_FOLDER = Path("/sys/class/infiniband"), Path("/sys/class/net")
MAPPED = "0000:0000:0000:0000:0000:ffff:"  # an IPv4 address as a GID
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
OURS, LOCAL = (10, 50), 1000  # priorities of our rules, and of the table of local addresses behind them


class NicError(HelixError):
    """The guest's kernel refused a change of its NICs. One line."""


class End(StrEnum):
    A = "a"
    B = "b"

    @property
    def other(self) -> End:
        return End.B if self is End.A else End.A


@dataclass(frozen=True)
class NicPair:
    """Two NICs and the cable between them. `number` counts from 1. An end is `End.A` or "a"."""

    number: int

    def netdev(self, end: End | str) -> str:
        return f"{End(end)}{self.number}"

    def rdma(self, end: End | str) -> str:
        """Name of the RDMA device."""
        return f"rxe_{self.netdev(end)}"

    def address(self, end: End | str) -> str:
        return f"10.88.{self.number}.{1 if End(end) is End.A else 2}"

    def hardware(self, end: End | str) -> str:
        return f"02:88:00:00:{self.number:02x}:0{End(end)}"

    def table(self, end: End | str) -> int:
        """The route table of what this end sends to the other."""
        return 100 + 2 * self.number + (End(end) is End.B)

    def gid(self, end: End | str) -> str:
        """The end's IPv4 address as a GID, eight groups."""
        return MAPPED + "{:02x}{:02x}:{:02x}{:02x}".format(*socket.inet_aton(self.address(end)))

    def gid_index(self, end: End | str) -> int:
        """Which GID of the device is its IPv4 address (RoCE v2)."""
        wanted = self.gid(end)
        for file in sorted((RDMA_FOLDER / self.rdma(end) / "ports" / "1" / "gids").glob("*"), key=lambda one: int(one.name)):
            try:
                if file.read_text().strip() == wanted:
                    return int(file.name)
            except OSError:  # an empty row
                continue
        raise NicError(f"{self.rdma(end)} has no GID for {self.address(end)}: is its link down?")

    # ---- breaking ----------------------------------------------------------------------------------

    def down(self, end: End | str) -> float:
        """Take an end down, as a NIC or cable that fails; gives the monotonic time just before.

        By a system call, so that the time until detection can be measured.
        """
        return _set_up(self.netdev(end), False)

    def up(self, end: End | str) -> float:
        """Undo `down`, with the routes and neighbours that went with it; gives the monotonic time just before."""
        at = _set_up(self.netdev(end), True)
        _tell_kernel(self._ways())
        return at

    def blackhole(self, *ends: End | str) -> float:
        """Lose all that these ends send (both, when none is named): both stay up, and no error is reported. Gives the monotonic
        time just before.

        By messages to the kernel, as `down`.
        """
        at = time.monotonic()
        _tell_kernel(rtnetlink.lose_all(self.netdev(end), LIMIT_PACKETS) for end in ends or End)
        return at

    def delay(self, one_way_ms: float, *ends: End | str) -> None:
        """Hold all that these ends send."""
        self.impair(f"delay {one_way_ms}ms", *ends)

    def lose(self, percent: float, *ends: End | str) -> None:
        self.impair(f"loss {percent}%", *ends)

    def impair(self, netem: str, *ends: End | str) -> None:
        """Put netem with these words before what these ends send; it takes the place of what was there."""
        lines = [f"qdisc replace dev {self.netdev(end)} root netem limit {LIMIT_PACKETS} {netem}" for end in ends or End]
        _batch("tc", lines)

    def heal(self) -> float:
        """Both ends up, nothing lost or held; gives the monotonic time just before.

        By system calls and messages to the kernel, as `down` and `blackhole`.
        """
        at = time.monotonic()
        for end in End:
            _set_up(self.netdev(end), True)
        _tell_kernel([*self._ways(), *(rtnetlink.lose_nothing(self.netdev(end)) for end in End)])
        wait_until_active([self])
        return at

    def _ways(self) -> list[rtnetlink.Message]:
        """Routes and neighbours each way: the kernel removes them when a device goes down."""
        messages = []
        for end in End:
            device, peer = self.netdev(end), self.address(end.other)
            messages.append(rtnetlink.route(device, peer, self.address(end), self.table(end)))
            messages.append(rtnetlink.neighbour(device, peer, self.hardware(end.other)))
        return messages


# ---- making ------------------------------------------------------------------------------------


def make(count: int) -> list[NicPair]:
    """Remove all pairs and make `count` new ones, complete and active. Raises NicError if the kernel fails."""
    if GUEST not in os.environ:
        raise NicError("NIC pairs are made in the lab's VM only: helixrt lab run --nics N -- COMMAND")
    remove()
    for name in ("all", "default"):
        _relax(name)
    pairs = [NicPair(number) for number in range(1, count + 1)]
    ip(_links(pairs))
    for pair in pairs:
        for end in End:
            _relax(pair.netdev(end))
    ip(_rules(pairs))
    _tell_kernel(message for pair in pairs for message in pair._ways())
    _batch("rdma", [f"link add {pair.rdma(end)} type rxe netdev {pair.netdev(end)}" for pair in pairs for end in End])
    wait_until_active(pairs)
    return pairs


def existing() -> list[NicPair]:
    """The pairs there are, by number."""
    numbers = {int(found[1]) for entry in NETWORK_FOLDER.iterdir() if (found := re.fullmatch(r"a(\d+)", entry.name))}
    return [NicPair(number) for number in sorted(numbers)]


def remove() -> None:
    """Remove all pairs, with their RDMA devices, and the rules that belong to them."""
    pairs = existing()
    devices = [pair.rdma(end) for pair in pairs for end in End if (RDMA_FOLDER / pair.rdma(end)).exists()]
    _batch("rdma", [f"link delete {device}" for device in devices])
    rules = re.findall(r"^(\d+):", _call(["ip", "rule", "show"]), re.MULTILINE)
    gone = [f"link delete {pair.netdev(End.A)}" for pair in pairs]
    ip([*gone, *(f"rule delete pref {rule}" for rule in rules if int(rule) in OURS)])


def wait_until_active(pairs: Iterable[NicPair]) -> None:
    """Until every RDMA device can be used: its port is active and it has its address as a GID."""
    until = time.monotonic() + READY_S
    for pair in pairs:
        for end in End:
            state = RDMA_FOLDER / pair.rdma(end) / "ports" / "1" / "state"
            while True:
                try:
                    if "ACTIVE" in state.read_text() and pair.gid_index(end) >= 0:
                        break
                except (OSError, NicError):
                    pass
                if time.monotonic() > until:
                    raise NicError(f"{pair.rdma(end)} did not become active in {READY_S:g} s")
                time.sleep(0.005)


def _links(pairs: Sequence[NicPair]) -> list[str]:
    lines = []
    for pair in pairs:
        a, b = (f"{pair.netdev(end)} mtu {MTU} address {pair.hardware(end)}" for end in End)
        lines.append(f"link add {a} type veth peer name {b}")
        lines += [f"address add {pair.address(end)}/24 dev {pair.netdev(end)}" for end in End]
        lines += [f"link set {pair.netdev(end)} up" for end in End]
    return lines


def _rules(pairs: Sequence[NicPair]) -> list[str]:
    """What comes in is looked for among local addresses; what goes from one end to the other is not, until its route was."""
    present = set(re.findall(r"^(\d+):", _call(["ip", "rule", "show"]), re.MULTILINE))
    lines = [] if str(LOCAL) in present else [f"rule add pref {LOCAL} lookup local"]
    for pair in pairs:
        for end in End:
            lines.append(f"rule add pref {OURS[0]} iif {pair.netdev(end)} lookup local")
            between = f"from {pair.address(end)} to {pair.address(end.other)}"
            lines.append(f"rule add pref {OURS[1]} {between} lookup {pair.table(end)}")
    return [*lines, *(["rule delete pref 0"] if "0" in present else [])]


def _relax(device: str) -> None:
    """Take packets from an address of this very machine, and answer for a device's own address alone."""
    for key, value in (("accept_local", 1), ("rp_filter", 0), ("arp_ignore", 1)):
        Path(f"/proc/sys/net/ipv4/conf/{device}/{key}").write_text(str(value))


def _set_up(device: str, up: bool) -> float:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("16sh14x", device.encode(), 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(asked, GET_FLAGS, request), 16)
        request = struct.pack("16sh14x", device.encode(), flags | UP if up else flags & ~UP)
        at = time.monotonic()
        fcntl.ioctl(asked, SET_FLAGS, request)
    return at


def _tell_kernel(messages: Iterable[rtnetlink.Message]) -> None:
    try:
        rtnetlink.say(messages)
    except OSError as error:
        raise NicError(f"the kernel refused a route, a neighbour or a queue: {error}") from error


def ip(lines: Sequence[str]) -> None:
    """Many `ip` commands by one process."""
    _batch("ip", lines)


def _batch(program: str, lines: Sequence[str]) -> None:
    if lines:
        _call([program, "-b", "-"], "\n".join(lines) + "\n")


def _call(argv: Sequence[str], told: str = "") -> str:
    try:
        done = subprocess.run(argv, input=told, capture_output=True, text=True, timeout=CALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NicError(f"{' '.join(argv)}: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NicError(f"{' '.join(argv)}: {said}" + (f" in: {told.strip()[:2000]!r}" if told else ""))
    return done.stdout


# ---- from a shell ------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Break an end, or mend a pair; an exit code."""
    found = re.fullmatch(r"(?:(down|blackhole) ([ab])|heal )(\d+)", " ".join(argv))
    if found is None:
        print("usage: down END | blackhole END | heal NUMBER; an end is a1, b1, a2, ...", file=sys.stderr)
        return 2
    action, end, number = found.groups()
    pair = NicPair(int(number))
    if pair not in existing():
        print(f"there is no NIC pair {number} here", file=sys.stderr)
        return 1
    if action == "down":
        pair.down(end)
    elif action == "blackhole":
        pair.blackhole(end)
    else:
        pair.heal()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
