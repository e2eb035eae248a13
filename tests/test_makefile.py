"""`make train` and `make test` set up what is missing, once, and again only when the pinned set changes."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests/data-libraries.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def plan(project: Path, *arguments: str) -> str:
    """What make would run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    for key in ("ARGS", "EXPERIMENT", "MFLAGS"):
        environment.pop(key, None)
    done = subprocess.run(["make", "-n", *arguments], cwd=project, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def set_up(project: Path) -> None:
    """As the set-up leaves it, younger than what it depends on."""
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "data-libraries").mkdir()
    stamps = (".venv/.installed", ".venv/data-libraries/.installed", ".venv/.system-packages", ".venv/.slurm-packages")
    for name in (".venv/bin/python", *stamps):
        (project / name).touch()
    for name in ("pyproject.toml", "constraints.txt", "tests/data-libraries.txt"):
        os.utime(project / name, (1, 1))


TARGETS = pytest.mark.parametrize("target", ["train", "test", "test-system", "test-slow", "lint"])


@pytest.mark.system
@TARGETS
def test_a_fresh_clone_is_set_up_with_pinned_versions(project: Path, target: str) -> None:
    commands = plan(project, target)
    assert "-m venv .venv" in commands
    assert '-c constraints.txt -e ".[dev]"' in commands
    assert ("iproute2" in commands) == target.startswith("test-"), "the short tests need no system packages"
    assert ("helixrt lab setup" in commands) == target.startswith("test-"), "nor the lab"
    assert ("slurmctld" in commands) == (target == "test-slow"), "only slow tests need Slurm"


@TARGETS
def test_a_second_call_sets_nothing_up(project: Path, target: str) -> None:
    set_up(project)
    commands = plan(project, target)
    assert commands
    for word in ("pip", "venv .venv", "apt-get", "touch"):
        assert word not in commands, commands


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_pin_installs_again_into_the_same_environment(project: Path, changed: str) -> None:
    set_up(project)
    os.utime(project / changed, (4e9, 4e9))
    commands = plan(project, "test")
    assert "pip install" in commands and "-m venv" not in commands


TORCH = ".venv-torch-2.14.1"


@pytest.mark.parametrize(("target", "extras"), [("test-smoke", "ft"), ("test-torch", "dev")])
def test_another_torch_has_an_environment_of_its_own(project: Path, target: str, extras: str) -> None:
    commands = plan(project, target, "VERSION=2.14.1")
    assert f"-m venv {TORCH}\n" in commands and 'echo "torch==2.14.1"' in commands
    assert "grep -vE '^(torch|triton|setuptools)==' constraints.txt" in commands
    assert f'-c {TORCH}/constraints.txt -e ".[{extras}]"' in commands
    assert '-m "smoke and not gpu" tests/smoke' in commands
    assert ("tests/passes" in commands) == (target == "test-torch")
    assert all((ROOT / word).exists() for word in commands.split() if word.startswith("tests/") and "*" not in word)


@pytest.mark.parametrize(("target", "stamp"), [("test-smoke", ".smoke"), ("test-torch", ".dev")])
def test_the_environment_of_another_torch_is_made_once(project: Path, target: str, stamp: str) -> None:
    (project / TORCH / "bin").mkdir(parents=True)
    for name in ("bin/python", stamp):
        (project / TORCH / name).touch()
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(project / name, (1, 1))
    commands = plan(project, target, "VERSION=2.14.1")
    assert "pytest" in commands
    assert not [word for word in ("-m pip", "venv .venv", "touch") if word in commands], commands


def test_other_packages_and_another_python_have_environments_of_their_own(project: Path) -> None:
    commands = plan(project, "test-smoke", "VERSION=2.14.1", "PACKAGES=ray[default]==2.59.0 torchft==0.2.0")
    assert f"-m venv {TORCH}-ray-default-2.59.0-torchft-0.2.0" in commands
    assert "^(torch|triton|setuptools|ray|torchft)==" in commands and '"ray[default]==2.59.0" "torchft==0.2.0"' in commands
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"-m venv {TORCH}-py{version}\n" in plan(project, "test-smoke", "VERSION=2.14.1", f"PYTHON={sys.executable}")


def test_train_writes_into_this_checkout_and_takes_arguments(project: Path) -> None:
    set_up(project)
    assert f'+experiment=tiny "output.root={project}/outputs" steps=60' in " ".join(
        plan(project, "train", "ARGS=steps=60").replace("\\\n", " ").split()
    )
    chosen = plan(project, "train", "ARGS=+experiment=other")
    assert "+experiment=other" in chosen and "+experiment=tiny" not in chosen
    assert "+experiment=ci" in plan(project, "train", "EXPERIMENT=ci")


def test_each_test_is_run_by_one_target(project: Path) -> None:
    set_up(project)
    chosen = [re.findall(r'-m "(.*?)"', plan(project, target))[0] for target in ("test", "test-system", "test-slow")]
    markers = ("system", "smoke", "netns", "rdma", "vm", "ray", "notebook", "slow", "gpu")
    for some in itertools.chain.from_iterable(itertools.combinations(markers, size) for size in range(len(markers) + 1)):
        has = {marker: marker in some for marker in markers}
        ran = [target for target, expression in zip(("short", "system", "slow"), chosen, strict=True) if eval(expression, has)]
        assert ran == ([] if "gpu" in some else ["slow"] if "slow" in some else ["system"] if some else ["short"]), some


@pytest.mark.parametrize("target", ["test", "test-system", "test-slow"])
def test_tests_list_the_slowest_and_take_arguments(project: Path, target: str) -> None:
    set_up(project)
    assert "--durations=30" in (said := plan(project, target, "ARGS=--seed 7")) and said.rstrip().endswith("--seed 7")
