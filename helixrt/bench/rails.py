"""A rail is lost and returns, paths become slow: the reaction of a link, recorded so that it can be replayed.

Two hosts (network namespaces) send a stream of messages over TCP. Failover: two rails, the second one stands by at half
the speed; the first is cut and restored in the middle, as in Figure 7 of the SHIFT paper. Hop: four equal paths and
Hopper's policy; the path in use becomes ten times slower, and then the one that was taken instead. Everything the
sender's link gets is recorded (`protocol/link/recording.py`) with the moments at which the network was changed, and is replayed
to a new machine at once: a recording that a machine answers otherwise than the link did is an error. `--record` keeps them.

Measured: how long nothing was acknowledged when the rail was cut, how long from its return until it carried traffic, and
how long from a path's slowness until the hop. `notebooks/03_failover.ipynb` shows two such recordings.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from helixrt.bench._hopping_rank import PERIOD_S
from helixrt.bench._lab_hosts import LabHosts
from helixrt.errors import ConfigError, Fatal
from helixrt.lab.net import Cut, Direction, Network
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.recording import Recording, said

SENDER, RECEIVER = 0, 1  # hosts
SIDE = "recorded"
PAYLOAD = 0.95  # of a link's rate, the rest is headers
LATENCY_S = 5e-3  # of an empty message, in the base RTT
FAILOVER_BYTES = 256 << 10  # of its messages
WINDOW_BYTES = 1 << 20  # under way on a rail that is to be drained
HOP_PATHS, HOP_BYTES, HOP_PERIOD_S = 4, 1 << 20, PERIOD_S
SLOWER = 10


@dataclass(frozen=True)
class Settings:
    rate_mbit: float
    before_s: float
    trouble_s: float
    after_s: float
    cut: Cut
    seed: int

    @property
    def bytes_per_s(self) -> float:
        return PAYLOAD * self.rate_mbit * 125e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate-mbit", type=float, default=100.0, help="rate of a rail; the backup rail has half of it")
    parser.add_argument(
        "--before", type=float, default=1.5, metavar="S", help="seconds before the rail is cut or the path becomes slow"
    )
    parser.add_argument(
        "--trouble", type=float, default=2.0, metavar="S", help="seconds for which a rail is cut or a path is slow"
    )
    parser.add_argument("--after", type=float, default=2.0, metavar="S", help="least seconds of messages afterwards")
    parser.add_argument("--cut", choices=[cut.value for cut in Cut], default=Cut.PATH.value,
                        help="cut the receiver's device, or the path beyond it, which causes no error")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the paths that become slow")
    parser.add_argument("--record", type=Path, default=None, metavar="FOLDER",
                        help="write rails-failover.jsonl and rails-hop.jsonl there")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError for settings that cannot work."""
    for key in ("rate_mbit", "before", "trouble", "after"):
        if not getattr(args, key) > 0:
            raise ConfigError(f"--{key.replace('_', '-')}", getattr(args, key), "must be more than 0")
    settings = Settings(args.rate_mbit, args.before, args.trouble, args.after, Cut(args.cut), args.seed)
    for name, make, tell in (("failover", failover, print_failover), ("hop", hop, print_hop)):
        recording = make(settings)
        check(recording)
        tell(recording)
        if args.record is not None:
            args.record.mkdir(parents=True, exist_ok=True)
            path = args.record / f"rails-{name}.jsonl"
            path.write_text("".join(f"{line}\n" for line in recording.lines()))
            print(f"  written to {path}")
    return 0


# ---------------------------------------------------------------- what happens


def failover(settings: Settings) -> Recording:
    """A rail is cut and restored while the other one backs it up."""
    rates = (settings.rate_mbit, settings.rate_mbit / 2)
    busy_s = settings.before_s + settings.after_s + settings.trouble_s / 2
    count = max(1, round(busy_s * settings.bytes_per_s / FAILOVER_BYTES))
    link = {"striped": False, "window_bytes": WINDOW_BYTES}
    with _stream(rates, FAILOVER_BYTES, count, 1.0, link, None, settings.seed) as stream:
        time.sleep(settings.before_s)
        stream.mark("rail 0 is cut", lambda: stream.net.cut(RECEIVER, 0, settings.cut))
        time.sleep(settings.trouble_s)
        stream.mark("rail 0 is restored", lambda: stream.net.restore(RECEIVER, 0))
        return stream.finish(settings, rates)


def hop(settings: Settings) -> Recording:
    """The path in use becomes slow, and then the one that is used instead."""
    rates = (settings.rate_mbit,) * HOP_PATHS
    busy_s = settings.before_s + 2 * settings.trouble_s + settings.after_s
    count = max(1, round(busy_s * settings.bytes_per_s / HOP_BYTES))
    floor = {"rate_bytes_per_s": settings.bytes_per_s, "latency_s": LATENCY_S}
    hopping = {"unloaded": floor, "message_bytes": HOP_BYTES, "depth_bytes": 2 * HOP_BYTES}
    with _stream(rates, HOP_BYTES, count, HOP_PERIOD_S, {}, hopping, settings.seed) as stream:
        time.sleep(settings.before_s)
        for _ in range(2):
            path = stream.busiest()
            stream.mark(f"path {path} becomes slow", lambda path=path: stream.slow(path, SLOWER))  # type: ignore[misc]
            time.sleep(settings.trouble_s)
            stream.mark(f"path {path} is as before", lambda path=path: stream.slow(path, 1))  # type: ignore[misc]
        return stream.finish(settings, rates)


class _Stream(LabHosts):
    """Two hosts, and messages on their way from the first to the second."""

    def __init__(self, net: Network, rates: tuple[float, ...]) -> None:
        super().__init__(net, 2, "helixrt.bench._rails_rank")
        self.net, self.rates = net, rates
        self.marks: list[list[Any]] = []  # [time, what]

    def mark(self, what: str, change: Callable[[], None]) -> None:
        """Change the network, and keep when that began."""
        self.marks.append([time.monotonic(), what])
        change()

    def slow(self, path: int, times: int) -> None:
        self.net.set_rate(RECEIVER, path, self.rates[path] / times, Direction.IN)

    def busiest(self) -> int:
        """The path that carries most just now."""
        before = self._bytes_out()
        time.sleep(0.3)
        grown = [after - was for after, was in zip(self._bytes_out(), before, strict=True)]
        return grown.index(max(grown))

    def _bytes_out(self) -> list[int]:
        files = [f"/sys/class/net/{self.net.device(rail)}/statistics/tx_bytes" for rail in range(len(self.rates))]
        told, _ = self.net.run(SENDER, ["cat", *files], stdout=subprocess.PIPE, text=True).communicate()
        return [int(line) for line in told.split()]

    def finish(self, settings: Settings, rates: tuple[float, ...]) -> Recording:
        """Returns the sender's recorded events when all messages have arrived."""
        self.answer(SENDER), self.answer(RECEIVER)
        self.ask(dict.fromkeys((SENDER, RECEIVER), {"do": "drive", "seconds": 0.2}))  # the last acknowledgements
        self.begin(SENDER, do="recording")
        told = Recording.of(self.answer(SENDER))
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        about = {"over": "TCP in network namespaces", "rates_mbit": rates, "cut": settings.cut.value, "machine": machine}
        return replace(told, about=about | {"marks": self.marks} | told.about)


@contextmanager
def _stream(
    rates: tuple[float, ...],
    size: int,
    count: int,
    period_s: float,
    link: dict[str, Any],
    hopping: dict[str, Any] | None,
    seed: int,
) -> Iterator[_Stream]:
    """`count` messages of `size` bytes, which begin now."""
    with Network(hosts=2, rails=len(rates)) as net:
        for rail, rate in enumerate(rates):
            for host in (SENDER, RECEIVER):
                net.set_rate(host, rail, rate)
        stream = _Stream(net, rates)
        opened = {"do": "open_recorded", "side": SIDE, "period_s": period_s, "link": link, "hopping": hopping, "seed": seed}
        addresses = stream.ask(dict.fromkeys((SENDER, RECEIVER), opened))
        meet = {"do": "connect", "side": SIDE, "generation": 1}
        stream.ask({host: meet | {"me": host, "peers": {1 - host: addresses[1 - host]}} for host in (SENDER, RECEIVER)})
        stream.begin(RECEIVER, do="receive", op=1, chunk=size, chunks={SENDER: count})
        stream.answer(RECEIVER)
        stream.begin(RECEIVER, do="arrived", count=count)
        stream.begin(SENDER, do="send", to=RECEIVER, op=1, chunk=size, count=count, at_s=time.monotonic())
        yield stream


# ---------------------------------------------------------------- what is seen


def check(recording: Recording) -> None:
    """Raises Fatal unless a new state machine takes the same actions for the same events."""
    link, again = recording.opening.link(), []
    for now, _, actions in recording.replay(link):
        again += [[now, *one] for one in said(actions)]
    counters = {"failovers": link.failovers, "failbacks": link.failbacks, "resent": link.resent}
    if again != recording.about["said"] or counters != recording.about["counters"]:
        raise Fatal("the recording is incomplete: a state machine that replays it takes other actions")


def acknowledged(recording: Recording) -> list[tuple[float, int, int]]:
    """Of every message when its acknowledgement came, on which rail it had gone last, and its bytes."""
    where: dict[tuple[int, int], tuple[int, int]] = {}
    found = []
    for now, _, actions in recording.replay(recording.opening.link()):
        for action in actions:
            if isinstance(action, m.SendData):
                where[action.frame.op, action.frame.index] = (action.rail, action.frame.length)
            elif isinstance(action, m.Sent):
                found.append((now, *where[action.op, action.index]))
    return found


def print_failover(recording: Recording) -> None:
    (cut, _), (restored, _) = recording.about["marks"]
    times = [now for now, _, _ in acknowledged(recording)]
    gap, at = max((after - before, before) for before, after in zip(times, times[1:], strict=False))
    back = [now for now, kind, *_ in recording.about["said"] if kind == "RailBack"]
    until = f"{back[0] - restored:.2f} s after its return" if back else "not while it was recorded"
    print(f"failover: {len(times)} messages; nothing acknowledged for {gap:.2f} s, from {at - cut:+.2f} s after the cut on")
    print(f"  {recording.about['counters']['resent']} messages sent again; rail 0 carries traffic {until}")


def print_hop(recording: Recording) -> None:
    slow = [(now, what) for now, what in recording.about["marks"] if what.endswith("slow")]
    print(f"hop: {len(acknowledged(recording))} messages")
    for now, kind, *values in recording.about["said"]:
        if kind == "Hopped":
            old, path, why, old_rtt_s, rtt_s = values
            since = [now - at for at, what in slow if at < now and what.split()[1] == str(old)]
            late = f", {since[-1]:.2f} s after that became slow" if since else ""
            print(f"  from path {old} ({1e3 * old_rtt_s:.0f} ms) to {path} ({1e3 * rtt_s:.0f} ms): {why}{late}")
