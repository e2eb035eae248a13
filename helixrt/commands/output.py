"""Output of commands: the choice of the format, files, tables, the terminal's width and colours."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from helixrt.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    """Add the options for the format and the output file."""
    parser.add_argument(
        "--format", metavar="FORMAT", help=f"{', '.join(formats)} (default: from the output file's name, else text)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to this file instead of the terminal")


def chosen_format(args: argparse.Namespace, allowed: Sequence[str]) -> str:
    """The format asked for, else the one the output file's name ends in, else text. Raises ConfigError for others."""
    form = args.format
    if form is None:
        suffix = Path(args.output).suffix[1:] if args.output is not None else ""
        form = suffix if suffix in allowed else "text"
    if form not in allowed:
        raise ConfigError("--format", form, f"must be one of {', '.join(allowed)}")
    return str(form)


def put(args: argparse.Namespace, written: str) -> None:
    """Write to stdout or to the output file. Raises ConfigError when that can not be written."""
    if args.output is None:
        sys.stdout.write(written)
        sys.stdout.flush()
        return
    try:
        Path(args.output).write_text(written, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", args.output, f"cannot be written: {error.strerror}") from None


def width() -> int:
    """Columns of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def colored(args: argparse.Namespace) -> bool:
    """Whether colours reach a person: a terminal, unless NO_COLOR is set (no-color.org)."""
    return args.output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
