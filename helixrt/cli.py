"""The `helixrt` command: `train` runs the built-in job, `doctor` says what works here, `bench NAME` measures, and so on.

In: command-line arguments. Out: an exit code; 2 and one line on stderr for a wrong setting.
It starts fast: what a command needs is imported only when that command is given, and the list of
benchmarks is read from the package's files without importing them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import helixrt
from helixrt.errors import ConfigError

USAGE_ERROR = 2
COMMANDS = {  # each a module of helixrt.commands
    "schedule": "make, check, time, draw and compare pipeline schedules",
    "replay": "replay a trace of slow links under several policies",
    "observe": "what the operations and links of a run cost, and which are stragglers",
    "strands": "two interwoven strands of a model: operators, pairs, times, pictures, graphs",
    "profile": "which operators hide behind which on this machine",
    "serve": "serve a run whose replicas are started by torchrun, Slurm or by hand",
    "accept-loss": "end the wait of a run for newer state that is lost",
    "export": "write a checkpoint's model as Hugging Face safetensors",
    "attach": "drive a run whose driver has gone, or follow a submitted job again",
    "drain": "have a replica leave a run at a step boundary, or start it again",
    "lab": "networks on this machine: namespaces with rated links, a VM with RDMA NICs",
}


TRAIN = "train the built-in job; its arguments are settings, key=value (as python -m helixrt.train)"


def benchmarks() -> dict[str, str]:
    """Name of each benchmark -> the first line of its docstring. Imports none of them."""
    package = importlib.import_module("helixrt.bench")
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_") and not info.ispkg:
            source = Path(package.__path__[0], f"{info.name}.py").read_text(encoding="utf-8")
            found[info.name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return dict(sorted(found.items()))


class _Parser(argparse.ArgumentParser):
    """Reports a wrong usage in one line, with the command that prints the right one."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"helixrt: {message}; usage: {self.prog} --help\n")


def _load_benchmark(name: str) -> ModuleType:
    return importlib.import_module(f"helixrt.bench.{name}")


def _load_command(name: str) -> ModuleType:
    return importlib.import_module(f"helixrt.commands.{name.replace('-', '_')}")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `argv`: only the benchmark or command that `argv` names adds its own arguments."""
    parser = _Parser(prog="helixrt", description=(helixrt.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"helixrt {helixrt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    commands.add_parser("train", help=TRAIN)
    doctor = commands.add_parser("doctor", help="what is on and off on this machine, why, and how to fix it")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")

    bench = commands.add_parser("bench", help="compare helixrt with its alternatives on this machine")
    names = bench.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    chosen = argv[1] if len(argv) > 1 and argv[0] == "bench" else ""
    if argv and argv[0] == "bench":
        for name, summary in benchmarks().items():
            one = names.add_parser(name, help=summary, description=summary)
            if name == chosen:
                _load_benchmark(name).add_arguments(one)

    for name, summary in COMMANDS.items():
        one = commands.add_parser(name, help=summary, description=summary)
        if argv and argv[0] == name:
            _load_command(name).add_arguments(one)
    return parser


def _joined(argv: Sequence[str]) -> list[str]:
    """`--option -1,2` as `--option=-1,2`: argparse takes such a value for an unknown option, whatever it is meant to be.

    What follows `--` is another program's and stays as it is.
    """
    merged: list[str] = []
    for word in argv:
        if merged and "--" not in merged and re.fullmatch(r"--[a-z-]+", merged[-1]) and re.match(r"-[0-9.]", word):
            merged[-1] += f"={word}"
        else:
            merged.append(word)
    return merged


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; argparse exits by itself with 2 on a wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["train"]:  # whose arguments are hydra's, --help included
        from helixrt.train.__main__ import main as train

        return train(argv[1:])
    argv = _joined(argv)
    try:
        args = _parser(argv).parse_args(argv)
        if args.command == "doctor":
            from helixrt import doctor

            return doctor.main(as_json=args.json)
        if args.command in COMMANDS:
            return int(_load_command(args.command).run(args))
        return int(_load_benchmark(args.benchmark).run(args))
    except ConfigError as error:
        print(f"helixrt: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # `helixrt ... | head`: the reader has seen enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
