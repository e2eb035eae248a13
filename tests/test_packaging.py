"""A wheel holds real files under `helixrt` only, and works in an empty environment."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTIONS = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "build_tools/backend.py", "build_tools/commands.py")
LIBRARY = "helixrt/native/libhelixrt_native.so"
SUFFIXES = (".py", ".yaml", ".json", ".j2", ".css", ".js", ".h", ".hpp", ".cpp")
NUMPY = ("numpy", "numpy.libs")


def sources() -> set[str]:
    """What a wheel must hold but the compiled library: Python and C++ files, the typing mark, data and templates, seen through
    the symlinked folders."""
    found = set()
    for folder, subfolders, names in os.walk(ROOT / "helixrt", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        for name in names:
            if name.endswith(SUFFIXES) or name == "py.typed":
                found.add(Path(folder, name).relative_to(ROOT).as_posix())
    return found


def digest() -> str:
    """Of all that goes into a wheel and says how it is made."""
    found = hashlib.sha256()
    for name in sorted({*sources(), *INSTRUCTIONS}):
        content = (ROOT / name).read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


@pytest.fixture(scope="module")
def built(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source archive and the wheel that was made from it; made by an earlier run if nothing has changed."""
    cache = getattr(pytestconfig, "cache", None)  # None with -p no:cacheprovider
    if cache is None:
        return build(tmp_path_factory, tmp_path_factory.mktemp("dist"))
    folder = Path(cache.mkdir("wheel"))
    kept, new = folder / digest(), folder / f"new-{os.getpid()}"
    if not kept.exists():
        build(tmp_path_factory, new)
        for other in folder.iterdir():
            if other != new:
                shutil.rmtree(other)
        new.rename(kept)
    return kept


def build(tmp_path_factory: pytest.TempPathFactory, out: Path) -> Path:
    copy = tmp_path_factory.mktemp("copy")
    for name in ("helixrt", "passes", "triton_kernels", "ray_cluster", "conf"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in INSTRUCTIONS:
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.system
def test_wheel_holds_real_files_under_helixrt_only(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    assert not [entry.filename for entry in entries if (entry.external_attr >> 16) & 0o170000 == 0o120000], "symlinks"
    names = {entry.filename for entry in entries if ".dist-info/" not in entry.filename}
    assert {name.partition("/")[0] for name in names} == {"helixrt"}
    assert names == {*sources(), LIBRARY}
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert {"helixrt/py.typed", "helixrt/ray_cluster/__init__.py", "helixrt/passes/__init__.py"} <= names
    assert any(name.startswith("helixrt/conf/") and name.endswith(".yaml") for name in names)


@pytest.mark.system
def test_wheel_works_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)

    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    installed = run(*pip)
    assert installed.returncode == 0, installed.stderr
    code = """
import importlib, pathlib, pkgutil, sys
import helixrt
from importlib import resources
assert pathlib.Path(helixrt.__file__).is_relative_to(sys.prefix), helixrt.__file__
for room in ("protocol", "schedule", "ray_cluster", "passes"):
    package = importlib.import_module("helixrt." + room)
    if room == "protocol":
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(info.name)
assert any(f.name.endswith(".yaml") for f in (resources.files("helixrt.conf") / "experiment").iterdir())
for bare in ("passes", "triton_kernels", "ray_cluster", "conf", "build_tools"):
    assert importlib.util.find_spec(bare) is None, bare
from helixrt.native import build, library
assert build.library_path().parent == pathlib.Path(helixrt.__file__).parent / "native", "it is compiled again"
assert library.library().hx_abi() == library.ABI
"""
    done = run(str(python), "-I", "-c", code)
    assert done.returncode == 0, done.stderr
    version = run(str(python.with_name("helixrt")), "--version")
    assert (version.returncode, version.stdout) == (0, f"helixrt {__import__('helixrt').__version__}\n"), version.stderr
    doctor = run(str(python.with_name("helixrt")), "doctor")
    assert doctor.returncode == 1, "without torch the main job cannot run"
    assert "bad   torch" in doctor.stdout and "cannot run: torch" in doctor.stdout, doctor.stdout + doctor.stderr

    (there,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    for name in NUMPY:  # the one package that schedules need
        installed_numpy = Path(np.__file__).parent.parent / name
        if installed_numpy.exists():
            (there / name).symlink_to(installed_numpy)
    code = """
import importlib, pkgutil, sys
import helixrt.schedule
for info in pkgutil.walk_packages(helixrt.schedule.__path__, "helixrt.schedule."):
    importlib.import_module(info.name)
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.planner.plan import plan
print(plan(with_delays(uniform(4), {(0, 1): 2.0, (1, 0): 2.0}), 12).makespan_ms)
assert "torch" not in sys.modules
"""
    done = run(str(python), "-I", "-c", code)
    assert (done.returncode, done.stdout) == (0, "41.0\n"), done.stderr
    order = run(str(python.with_name("helixrt")), "schedule", "--policy", "zb", "--stages", "2", "--microbatches", "4")
    assert order.returncode == 0 and "ms" in order.stdout, order.stderr
    trained = run(str(python.with_name("helixrt")), "train", "steps=1")
    assert trained.returncode != 0 and "helixrt[train]" in trained.stderr, trained.stderr
