"""The linters do refuse what DESIGN.md's layers forbid: each case breaks one rule in a copy of the sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
FOLDERS = ("helixrt", "passes", "triton_kernels", "ray_cluster", "conf")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def lint(checkout: Path, *command: str) -> tuple[int, str]:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=checkout, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.grid
@pytest.mark.system
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("helixrt/protocol/step/lineage.py", "import torch", "pure"),
        ("helixrt/schedule/ir.py", "from time import monotonic", "pure"),
        ("helixrt/schedule/ir.py", "import helixrt.protocol.step.lineage", "layers"),
        ("helixrt/errors.py", "import helixrt.protocol", "layers"),
        ("helixrt/native/engine.py", "import torch", "native"),
        ("helixrt/native/flat.py", "import helixrt.protocol.calls", "native"),
        ("helixrt/native/flat.py", "import helixrt.transport", "layers"),
        ("helixrt/replica/contracts.py", "import helixrt.pipeline", "engines-by-contract"),
        ("helixrt/train/config.py", "import helixrt.lab", "emulate-and-lab"),
        ("helixrt/train/driver.py", "import helixrt.job.driver", "train-by-the-api"),
        ("helixrt/train/models/moe.py", "import helixrt.collectives", "train-by-the-api"),
        ("helixrt/job/policies.py", "import helixrt.train.config", "layers"),
        ("helixrt/job/controller.py", "import ray", "job-without-ray"),
        ("helixrt/engines/__init__.py", "import helixrt.ray_cluster", "layers"),
        ("helixrt/replica/rank.py", "import helixrt.engines", "layers"),
        ("helixrt/pipeline/__init__.py", "import helixrt.collectives", "layers"),
        ("helixrt/new_room.py", "", "layers"),
    ],
)
def test_import_linter_refuses(checkout: Path, file: str, line: str, contract: str) -> None:
    path = checkout / file
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        status, output = lint(checkout, "lint-imports", "--no-logo", "--no-cache", "--contract", contract)
    finally:
        path.write_text(before) if before is not None else path.unlink()
    assert status == 1, output
    assert "BROKEN" in output or "new_room" in output, output


def test_import_linter_accepts_the_sources_as_they_are(checkout: Path) -> None:
    status, output = lint(checkout, "lint-imports", "--no-logo", "--no-cache")
    assert status == 0, output


@pytest.mark.parametrize("name", ["passes", "triton_kernels", "ray_cluster", "conf"])
@pytest.mark.parametrize("form", ["import {0}", "from {0} import x", "import {0}.x"])
def test_ruff_refuses_bare_imports_of_top_folders(checkout: Path, name: str, form: str) -> None:
    file = checkout / "bare.py"
    file.write_text(form.format(name) + "\n")
    status, output = lint(checkout, "ruff", "check", "--no-cache", "--select", "TID251", "bare.py")
    assert status == 1 and f"`{name}" in output, output
