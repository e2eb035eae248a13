"""With helixrt installed torch knows the backend "helix" by its name alone, and no part of helixrt is loaded before its use."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch, torch.distributed as dist
assert [n for n in sys.modules if n.startswith("helixrt.")] == ["helixrt.autoload"], "it costs an import of torch nothing"
dist.init_process_group("helix", store=dist.HashStore(), rank=0, world_size=1)
ones = torch.ones(3)
dist.all_reduce(ones)
assert ones.tolist() == [1.0, 1.0, 1.0] and type(dist.group.WORLD).__name__ == "HelixGroup"
import helixrt.collectives
"""


@pytest.mark.system
def test_a_process_group_is_made_by_name(tmp_path: Path) -> None:
    """As an installed wheel has it: the entry point in its metadata is that of pyproject.toml."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    metadata = tmp_path / "helixrt-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: helixrt\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in declared.items())
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{lines}")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
