"""Code blocks of the README and of docs/, and how CI runs each of them.

In: Markdown pages. Out: `Block`s. A block of `python` or `sh` runs as it is: a program that must end with exit code 0 and,
where "It prints:" and a `text` block follow, must print exactly that; or commands, one per line. A comment in the line
before it says otherwise:

- `<!-- in: NAME -->`: the block stands in place of the line `# BLOCK` of `tests/docs/NAME.py`, which runs; its lines
  `# REPLACE A => B` make constants smaller first; with a line `# SLOW` its test is a slow one.
- `<!-- fragment of: FILE -->`: the lines are part of an example, which has a test of its own.
- `<!-- covered by: FILE[::TEST] -->`: it needs minutes, or several machines, and this test (or `.ci/run`) runs the same.
- `<!-- needs: PROGRAM -->`: commands of a program that CI does not have; their syntax is checked.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ("python", "sh")
SHOWN = ("text", "mermaid")
RULES = ("in", "fragment of", "covered by", "needs")
_BLOCK = re.compile(
    r"(?:^<!-- (?P<rule>[a-z ]+): (?P<about>[^\n]+?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$"
    r"(?:\n+It prints:\n\n```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """`rule` and `about` are those of its comment, "" without one; `printed` is what the page says it prints, if it does."""

    page: str
    line: int
    language: str
    code: str
    rule: str
    about: str
    printed: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Of a `sh` block: without comments, with continued lines joined."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]

    def slow(self) -> bool:
        return "\n# SLOW\n" in self._context()

    def in_its_context(self) -> str:
        """The program of `<!-- in: NAME -->`."""
        context, code = self._context(), self.code
        for old, new in re.findall(r"^# REPLACE (.+?) => (.+)$", context, re.MULTILINE):
            assert old in code, f"{self}: tests/docs/{self.about}.py replaces {old!r}, which the block does not have"
            code = code.replace(old, new)
        (place,) = re.finditer(r"^( *)# BLOCK$", context, re.MULTILINE)
        return context[: place.start()] + textwrap.indent(code, place[1]) + context[place.end() :]

    def _context(self) -> str:
        return (ROOT / "tests" / "docs" / f"{self.about}.py").read_text(encoding="utf-8")


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    return [
        Block(
            name,
            text.count("\n", 0, found.start("code")),
            found["language"],
            found["code"],
            found["rule"] or "",
            found["about"] or "",
            found["printed"],
        )
        for found in _BLOCK.finditer(text)
    ]


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]
