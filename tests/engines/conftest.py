"""What the engine's tests share: `loops`, the module plain_loops.py, and `case`, each of its cases in turn."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def _load() -> Any:
    """Tests are not a package, so they cannot import it; dataclasses must find their module by name."""
    name = "helixrt_test_plain_loops"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("plain_loops.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = _load().CASES
        metafunc.parametrize("case", list(cases.values()), ids=list(cases))


@pytest.fixture(scope="session")
def loops() -> Any:
    torch.set_num_threads(1)
    return _load()
