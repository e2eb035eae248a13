"""`helixrt lab net`: networks of namespaces from a shell.

In: the command's arguments. Out: an exit code. `up` keeps a network until Ctrl-C, `run` runs a command once on every
host, `measure` compares the configured rate with that of a connection, `clean` removes networks of programs that have ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO

from helixrt.errors import ConfigError
from helixrt.lab import machine, namespaces
from helixrt.lab.namespaces import NetworkError
from helixrt.lab.net import Network
from helixrt.lab.shaping import parse_rate

LOOK_S = 0.05  # between two looks at which host has ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="net", metavar="COMMAND", required=True)

    shape = argparse.ArgumentParser(add_help=False)
    shape.add_argument("--hosts", type=int, default=2, help="how many hosts (default 2)")
    shape.add_argument("--rails", type=int, default=1, help="devices of each host, each in its own subnet (default 1)")
    shape.add_argument("--rate", default="none", help="rate of each rail, each way: 500mbit, 1.5gbit, 64kbit; none (default)")
    shape.add_argument(
        "--delay-ms", type=float, default=0.0, help="delay of each rail, one way; needs a kernel with netem (default 0)"
    )

    commands.add_parser("up", parents=[shape], help="make a network and keep it until Ctrl-C")
    run = commands.add_parser(
        "run",
        parents=[shape],
        help="run a command once on every host",
        description="Runs COMMAND once on every host, with HELIXRT_HOST (its number), HELIXRT_HOSTS, HELIXRT_ADDRESS, "
        "MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and GLOO_SOCKET_IFNAME set, so that torch.distributed connects the hosts "
        "without further settings. The exit code is that of the first host to fail.",
    )
    run.add_argument("--pin", action="store_true", help="give each host a core of its own, in turn")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")
    measure = commands.add_parser(
        "measure", parents=[shape], help="measure the rate of a connection between hosts 0 and 1, each way"
    )
    measure.add_argument("--seconds", type=float, default=2.0, help="duration of each connection (default 2)")
    commands.add_parser("clean", help="remove networks whose owner has ended, and end their processes")


def run(args: argparse.Namespace) -> int:
    """Run one of the commands; returns its exit code. ConfigError for a wrong setting."""
    try:
        if args.net == "clean":
            return _clean()
        network = Network(args.hosts, args.rails, parse_rate(args.rate), delay_ms=args.delay_ms)
        if args.net == "up":
            return _up(network)
        if args.net == "measure":
            return _measure(network, args.seconds)
        return _run(network, args.argv[1:] if args.argv[:1] == ["--"] else args.argv, args.pin)
    except NetworkError as error:
        print(f"helixrt: {error}", file=sys.stderr)
        return 1


def _clean() -> int:
    if (lack := machine.lacking()) is not None:
        raise ConfigError("lab", "net", str(lack))
    for name in namespaces.clean():
        print(f"removed {name}")
    return 0


def _up(network: Network) -> int:
    try:
        with network:
            for host in range(network.hosts):
                addresses = ", ".join(f"{network.device(r)} {network.address(host, r)}" for r in range(network.rails))
                print(f"host {host}: {addresses}\n  ip netns exec {network.namespace(host)} bash")
            print("up until Ctrl-C", flush=True)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0


def _measure(network: Network, seconds: float) -> int:
    from helixrt.lab.flow import measure

    if network.hosts < 2:
        raise ConfigError("hosts", network.hosts, "is at least 2 to measure between them")
    if not 0.1 <= seconds <= 600:
        raise ConfigError("seconds", seconds, "is between 0.1 and 600")
    with network:
        for rail in range(network.rails):
            for source, target in ((0, 1), (1, 0)):
                asked = network.rate(source, rail)
                got = measure(network, source, target, rail, seconds)
                limit = "no limit" if asked is None else f"of {asked:g}"
                print(f"{network.device(rail)}  host {source} -> host {target}  {got:8.1f} Mbit/s  {limit}", flush=True)
    return 0


def _run(network: Network, argv: list[str], pin: bool) -> int:
    if not argv:
        raise ConfigError("command", "''", "is missing: helixrt lab net run [OPTIONS] -- COMMAND")
    cores = sorted(os.sched_getaffinity(0))
    with network:
        running: dict[int, subprocess.Popen[str]] = {}
        readers = []
        for host in range(network.hosts):
            told = {"RANK": str(host), "WORLD_SIZE": str(network.hosts), "PYTHONUNBUFFERED": "1"}
            process = running[host] = network.run(
                host,
                argv,
                told,
                cpus={cores[host % len(cores)]} if pin else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert source is not None
                reader = threading.Thread(target=_prefix, args=(host, source, sink), name=f"output-of-host{host}", daemon=True)
                reader.start()
                readers.append(reader)
        status = 0
        while running:
            for host, process in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                del running[host]
                if code:
                    print(f"helixrt: host {host} ended with {_told(code)}", file=sys.stderr)
                    status = status or (code if code > 0 else 128 - code)
            time.sleep(LOOK_S)
    for reader in readers:  # what a host left behind is gone with the network, so every pipe has ended
        reader.join(5.0)
    return status


def _told(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _prefix(host: int, source: IO[str], sink: IO[str]) -> None:
    for line in source:
        sink.write(f"host{host} | {line if line.endswith(chr(10)) else line + chr(10)}")
        sink.flush()
