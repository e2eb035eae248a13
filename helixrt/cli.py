"""The `helixrt` command: `train` runs the built-in job, `doctor` shows what works here, `bench NAME` measures, and so on.

In: command-line arguments. Out: an exit code; for an invalid setting 2, and one line on stderr; for another failure that
helixrt knows 1, with its notes.
It starts fast: the modules of a command are imported only when that command is given, and the list of
benchmarks is read from the package's files without importing them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import helixrt
from helixrt.errors import ConfigError, HelixError, interrupted

USAGE_ERROR = 2
COMMANDS = {  # each a module of helixrt.commands
    "schedule": "make, check, time, draw and compare pipeline schedules",
    "replay": "replay a trace of slow links under several policies",
    "observe": "show the times of operations and links of a run, and the stragglers",
    "strands": "show two interwoven strands of a model: operators, pairs, times, pictures, graphs",
    "profile": "measure how well operators overlap on this machine",
    "serve": "host a run whose replicas are started by torchrun, by Slurm or by hand",
    "accept-loss": "let a run continue that waits for newer state which is lost",
    "export": "write a checkpoint's model as Hugging Face safetensors",
    "attach": "start a new driver for a run that lost its driver, or follow a submitted job again",
    "drain": "make a replica leave a run at a step boundary, or start it again",
    "lab": "make networks on this machine: namespaces with rated links, a VM with RDMA NICs",
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
    """Reports wrong usage in one line, with the command that prints the usage."""

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
    doctor = commands.add_parser("doctor", help="show what works on this machine, what does not, and how to fix it")
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
    """`--option -1,2` as `--option=-1,2`: argparse would treat such a value as an unknown option.

    Words after `--` belong to another program and are not changed.
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
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without UTF-8
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
    except HelixError as error:
        print(f"helixrt: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `helixrt ... | head`: the reader has closed the pipe
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return interrupted()


if __name__ == "__main__":
    sys.exit(main())
