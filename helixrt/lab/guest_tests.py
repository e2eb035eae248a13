"""pytest inside the lab's VM, for tests that were collected outside: runs them and prints each phase as a line of JSON.

In: node ids, as arguments. Out: `Phase`s on standard output as the tests go on; what the tests print is captured. It brings
the fixture `nic_pairs`: the guest's NIC pairs, whole at the beginning of every test.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from helixrt.lab import nics
from helixrt.lab.nics import NicPair

OPTIONS = (  # the caller lets pytest load no plugins by itself: some take seconds under emulation
    *("-o", "addopts=--strict-markers --import-mode=importlib"),
    *("-p", "pytest_timeout", "-p", "no:cacheprovider", "-p", "no:terminal"),
)


@dataclass(frozen=True)
class Phase:
    """Of one test: its set-up, its call or its teardown. `text`: why it failed or was skipped."""

    node: str
    when: str
    outcome: str
    seconds: float
    text: str
    sections: tuple[tuple[str, str], ...]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(line: str) -> Phase:
        said: dict[str, Any] = json.loads(line)
        return Phase(**said | {"sections": tuple((title, text) for title, text in said["sections"])})


class Teller:
    """The plugin in the guest's pytest."""

    def __init__(self) -> None:
        self._sink = os.fdopen(os.dup(1), "w", encoding="utf-8")  # pytest captures the descriptor itself

    def _tell(self, phase: Phase) -> None:
        print(phase.encode(), file=self._sink, flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        sections = tuple(report.sections) if report.failed or report.when == "teardown" else ()
        self._tell(Phase(report.nodeid, report.when or "", report.outcome, report.duration, text, sections))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(Phase(report.nodeid, "collect", "failed", 0.0, report.longreprtext, ()))

    @pytest.fixture
    def nic_pairs(self) -> Iterator[list[NicPair]]:
        """The guest's NIC pairs, whole; whatever the test does to them is undone."""
        pairs = nics.existing()
        for pair in pairs:
            pair.heal()
        yield pairs
        for pair in pairs:
            pair.heal()


def main(nodes: Sequence[str]) -> int:
    return int(pytest.main([*OPTIONS, *nodes], plugins=[Teller()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
