"""What tests/conftest.py adds to pytest: the seed of a run, cells drawn of grids, and skips where a machine lacks something."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
from hypothesis import given, strategies as st

drawn = []

@pytest.mark.parametrize("number", range(2))
def test_one(seed, number):
    print(f"one-{number} drew {seed}")
    assert number == 0

@given(st.integers(0, 2**60))
def test_property(number):
    drawn.append(number)

def test_it():
    print(f"property drew {hash(tuple(drawn))}")
    assert False
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\n")
    return tmp_path


def run(project: Path, *arguments: str, **environment: str) -> tuple[str, dict[str, int]]:
    """All that pytest says, and what each test drew."""
    command = [sys.executable, "-m", "pytest", "-rP", *arguments]
    env = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer to import than the tests to run
        "PYTHONPATH": str(Path(__file__).parents[1]),  # conftest.py imports from the package of the tests
        **environment,
    }
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, {name: int(number) for name, number in re.findall(r"^(\S+) drew (-?\d+)$", done.stdout, re.MULTILINE)}


@pytest.mark.system
def test_each_run_draws_a_new_seed_and_replays_with_one_flag(project: Path) -> None:
    said, drawn = run(project)
    (told,) = re.findall(r"^seed of this run: (\d+) \(.*--seed \1\)", said, re.MULTILINE)
    assert len(drawn) == len({*drawn.values()}) == 3, "each test has a seed of its own"
    replays = re.findall("replay: (.*)", said)
    assert replays == [f"pytest 'test_it.py::test_one[1]' --seed {told}", f"pytest test_it.py::test_it --seed {told}"]

    _, again = run(project, *shlex.split(replays[0])[1:], "test_it.py::test_property", "test_it.py::test_it")
    assert again == {name: number for name, number in drawn.items() if name != "one-0"}, "alone as among others"
    _, other = run(project)
    assert not {*other.values()} & {*drawn.values()}


GRID = """
import pytest

@pytest.mark.grid
@pytest.mark.parametrize("cell", range(90))
def test_cell(cell):
    print(f"cell-{cell} drew {cell}")

@pytest.mark.grid
@pytest.mark.parametrize("cell", range(2))
def test_small(cell):
    print(f"small-{cell} drew {cell}")

def test_that_fails():
    assert False
"""


@pytest.mark.system
def test_of_a_grid_each_run_draws_other_cells_and_all_of_them_when_asked(project: Path) -> None:
    (project / "test_it.py").write_text(GRID)
    said, some = run(project, "--seed", "1")
    assert "of grids one cell of 3 is drawn (all: --whole)" in said
    assert len(some) == 31 and sum("small" in name for name in some) == 1, "a third of each grid, and at least one cell"
    _, again = run(project, "--seed", "1")
    _, other = run(project, "--seed", "2")
    assert again == some and other.keys() != some.keys()
    _, whole = run(project, "--whole")
    assert len(whole) == 92
    _, named = run(project, "test_it.py::test_cell", "test_it.py::test_that_fails")
    assert len(named) == 90, "what is named is run"


LABELLED = """
import pytest

@pytest.fixture(scope="session")
def machine():
    raise AssertionError("a fixture of a test that cannot run here")

@pytest.mark.vm
def test_program(machine):
    pass

@pytest.mark.rdma
def test_device(machine):
    pass

@pytest.mark.rdma
@pytest.mark.skipif(True, reason="another reason")
def test_marked(machine):
    pass

def test_that_fails():
    assert False
"""


def test_what_the_machine_lacks_is_skipped_before_any_fixture_and_fails_in_ci(project: Path) -> None:
    (project / "test_it.py").write_text(LABELLED)
    markers = "[pytest]\nmarkers =\n    vm: a\n    rdma: b\naddopts = --import-mode=importlib -p no:cacheprovider\n"
    (project / "pytest.ini").write_text(markers)
    said, _ = run(project, "-rs", PATH="/nowhere", CI="")
    assert "1 failed, 3 skipped" in said and "another reason" in said and said.count("not installed: ") == 2, said
    said, _ = run(project, PATH="/nowhere", CI="true")
    assert "2 failed, 1 skipped" in said and "1 error" in said, said
    assert "CI must run tests marked rdma" in said and "CI must run tests marked vm" in said
