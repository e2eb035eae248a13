from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.train.jobs import Job


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a `Job` of some overrides; whatever it left is ended with the test."""
    made: list[Job] = []

    def make(*overrides: str, patient: bool = False) -> Job:
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        made.append(Job(folder, *overrides, patient=patient))
        return made[-1]

    yield make
    for one in made:
        one.end()
