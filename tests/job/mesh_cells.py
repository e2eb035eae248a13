"""Tests whose ranks are asked once for each mesh: all ranks of a mesh work through all names, and each test looks at one.

A name ends in its mesh, as in "llama zb pp2 tp2". Ranks are asked only for what this run has drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.ranks_context import names_drawn


def cells(names: Mapping[str, Sequence[str]], default: str) -> Any:
    """What parametrizes a test with `("mesh", "name")`, by mesh; all but those of the mesh `default` are slow, and a grid."""
    slow = (pytest.mark.slow, pytest.mark.grid)
    return [
        pytest.param(mesh, name, id=name.replace(" ", "-"), marks=() if mesh == default else slow)
        for mesh, of_mesh in names.items()
        for name in of_mesh
    ]


def answers_by_mesh(
    ask_ranks: Any, check: Callable[[str], None], request: pytest.FixtureRequest, test: Callable[..., None]
) -> Callable[[str], Any]:
    """For a fixture of a module, and the test that `cells` parametrizes: the answers of the ranks of a mesh, which start when
    they are first needed."""
    known: dict[str, Any] = {}

    def of(mesh: str) -> Any:
        if mesh not in known:
            names = names_drawn(request, test, mesh=mesh)
            ranks = math.prod(int(axis[2:]) for axis in names[0].split() if re.fullmatch(r"(pp|cp|tp)\d+", axis))
            known[mesh] = ask_ranks(check, names, ranks)
        return known[mesh]

    return of
