"""Templates of `report.html`: the page, and the pieces that its sections are made of.

In: data and drawings. Out: markup. Everything that is not `Markup` is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

Tile = tuple[str, str, str, str]  # name, value, what it is, and "ok", "bad" or ""
Section = tuple[str, str, Markup]  # title, lead and body


def page(title: str, subtitle: str, tiles: Sequence[Tile], sections: Sequence[Section]) -> str:
    """The whole page, which needs no other file."""
    return _templates().get_template("report.html.j2").render(title=title, subtitle=subtitle, tiles=tiles, sections=sections)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    return _piece("table", head, rows)


def pairs(rows: Iterable[tuple[str, str]]) -> Markup:
    """A table of names and values."""
    return _piece("pairs", rows)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """`entries`: colour and name."""
    return _piece("legend", entries)


def folded(summary: str, text: str) -> Markup:
    """Text that is shown on demand."""
    return _piece("folded", summary, text)


def paragraph(text: str, kind: str = "") -> Markup:
    return _piece("paragraph", text, kind)


def code(text: str) -> Markup:
    return _piece("code", text)


def _piece(name: str, *values: Any) -> Markup:
    made: Markup = getattr(_templates().get_template("pieces.j2").module, name)(*values)
    return made


@cache
def _templates() -> Environment:
    folder = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=folder, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
