"""Command-line arguments that several benchmarks have."""

from __future__ import annotations

import argparse
from pathlib import Path

from helixrt.errors import ConfigError


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`."""
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")


def add_model(parser: argparse.ArgumentParser, batch: int, of: str) -> None:
    """The size of a language model and of its batches: `batch` sequences per `of` by default."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=batch, help=f"sequences per {of}")
    parser.add_argument("--seq-len", type=int, default=128)


def check_least(given: object, **least: float) -> None:
    """Raises ConfigError for an argument that is smaller, or one of whose values is."""
    for name, limit in least.items():
        value = getattr(given, name)
        value = min(value, default=limit) if isinstance(value, list | tuple) else value
        if not value >= limit:
            raise ConfigError(f"--{name.replace('_', '-')}", value, f"must be at least {limit}")


def add_blocks(parser: argparse.ArgumentParser, block: int, note: str = "; the first is not counted") -> None:
    """How many blocks of steps each side runs in turn, and how long a block is."""
    parser.add_argument("--rounds", type=int, default=20, help="pairs of blocks that are measured")
    parser.add_argument("--block", type=int, default=block, help=f"steps in a block{note}")
