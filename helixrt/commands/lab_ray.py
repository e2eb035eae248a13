"""`helixrt lab ray`: a Ray cluster whose nodes are network namespaces of this machine.

In: the command's arguments. Out: an exit code: 0 after Ctrl-C, or that of a command, which runs on a host outside of the
cluster with RAY_ADDRESS set, as a user's machine submits jobs.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys

from helixrt.errors import ConfigError, MissingExtra
from helixrt.lab.namespaces import NetworkError
from helixrt.lab.net import Network
from helixrt.lab.ray_nodes import RayNodes
from helixrt.lab.shaping import parse_rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=int, default=3, help="nodes of the cluster; the first is its head (default 3)")
    add("--cpus", type=int, default=1, help="CPUs that Ray counts on each node (default 1)")
    add("--rate", default="none", help="rate of each node's link, each way: 500mbit, 1.5gbit; none (default)")
    add(
        "argv",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="run this outside of the cluster; default: keep the cluster until Ctrl-C",
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit code. ConfigError for a wrong setting."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtra("ray", "ray", "`helixrt lab ray`")
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not 1 <= args.nodes <= 16:
        raise ConfigError("nodes", args.nodes, "is between 1 and 16")
    hosts = Network(args.nodes + 1, rate_mbit=parse_rate(args.rate))
    cluster = RayNodes(hosts, args.nodes, args.cpus)
    try:
        with hosts as network, cluster as ray:
            if argv:
                process = network.run(args.nodes, argv, {**ray.environment, "RAY_ADDRESS": ray.dashboard})
                return process.wait()
            for host in range(args.nodes):
                print(f"node {host}{' (head)' if host == 0 else ''}: {network.address(host)}")
                print(f"  ip netns exec {network.namespace(host)} bash")
            print(f"outside: ip netns exec {network.namespace(args.nodes)} env RAY_ADDRESS={ray.dashboard} bash")
            print("up until Ctrl-C", flush=True)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0
    except NetworkError as error:
        print(f"helixrt: {error}", file=sys.stderr)
        return 1
