"""`helixrt lab`: networks on this machine: namespaces (`net`, `ray`), a VM with RDMA (`setup`, `run`, `shell`, `stop`).

In: the command's arguments. Out: an exit code.
"""

from __future__ import annotations

import argparse

from helixrt.commands import lab_net, lab_ray, lab_vm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="lab", metavar="KIND", required=True)
    lab_net.add_arguments(kinds.add_parser("net", help="hosts as network namespaces, joined by links with a rate (root)"))
    ray = kinds.add_parser("ray", help="the same hosts as nodes of a Ray cluster (root)")
    lab_ray.add_arguments(ray)
    lab_vm.add_commands(kinds)


def run(args: argparse.Namespace) -> int:
    """Run one of the commands; returns its exit code. ConfigError for a wrong setting."""
    if args.lab == "ray":
        return lab_ray.run(args)
    return lab_net.run(args) if args.lab == "net" else lab_vm.run(args)
