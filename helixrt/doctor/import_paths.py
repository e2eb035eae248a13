"""Which copies of the package Python can import here, and under which names.

In: the import path. Out: two findings: copies of the package besides the one in use, and top folders that can be imported
under their bare names.
"""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import util
from pathlib import Path

import helixrt
from helixrt.doctor.findings import Finding, Need, State

TOP_FOLDERS = ("passes", "triton_kernels", "ray_cluster", "conf")


def copies_finding(used: Path, others: Sequence[Path], same: Callable[[Path, Path], bool]) -> Finding:
    """Copies of the package besides the one in use: harmless if equal, else ranks may run different code."""
    others = [other for other in others if other != used]
    if not others:
        return Finding("package", State.ON, f"helixrt {helixrt.__version__} at {used}, the only copy", needed_for=Need.JOB)
    listed = ", ".join(map(str, others))
    fix = "keep one: pip uninstall helixrt, or leave the other folder out of PYTHONPATH and the working directory"
    if all(same(used, other) for other in others):
        return Finding("package", State.WARN, f"used from {used}; equal copies at {listed}", fix, Need.JOB)
    return Finding("package", State.BAD, f"used from {used}; different copies at {listed}", fix, Need.JOB)


def bare_finding(imported: Sequence[str], importable: Sequence[str]) -> Finding:
    """Whether our top folders were, or could be, imported under their bare names."""
    if imported:
        why = f"imported a second time under bare names: {', '.join(imported)}"
        return Finding("bare imports", State.BAD, why, "import helixrt.NAME instead", Need.JOB)
    if importable:
        why = f"importable under bare names: {', '.join(importable)}; other software may take them for its own"
        fix = "run outside the checkout, use the `helixrt` command, or set PYTHONSAFEPATH=1"
        return Finding("bare imports", State.WARN, why, fix)
    return Finding("bare imports", State.ON, "none of " + ", ".join(TOP_FOLDERS) + " is importable without helixrt.")


def find_copies(search: Iterable[str], used: Path) -> list[Path]:
    """Every folder of a `helixrt` package that `search` or an installed distribution offers, besides symlinks to one."""
    found = [Path(entry or os.curdir, "helixrt") for entry in search]
    for distribution in metadata.distributions(name="helixrt"):
        found.append(Path(str(distribution.locate_file("helixrt"))))
        direct = json.loads(distribution.read_text("direct_url.json") or "{}")
        if direct.get("dir_info", {}).get("editable"):
            found.append(Path(direct["url"].removeprefix("file://"), "helixrt"))
    real = {folder.resolve() for folder in found if (folder / "__init__.py").is_file()}
    return sorted(real | {used.resolve()})


def digest(package: Path) -> str:
    """SHA-256 over the package's Python files, symlinked folders included."""
    total = hashlib.sha256()
    for folder, subfolders, names in os.walk(package, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                file = Path(folder, name)
                total.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def _is_ours(locations: Iterable[str], package: Path) -> bool:
    ours = {(package / name).resolve() for name in TOP_FOLDERS}
    return any(Path(location).resolve() in ours for location in locations)


def look_at_import_paths() -> tuple[Finding, Finding]:
    package = Path(helixrt.__path__[0])
    copies = copies_finding(
        package.resolve(), find_copies(sys.path, package), lambda first, second: digest(first) == digest(second)
    )
    imported, importable = [], []
    for name in TOP_FOLDERS:
        if name in sys.modules:
            if _is_ours(getattr(sys.modules[name], "__path__", ()), package):
                imported.append(name)
        elif (spec := util.find_spec(name)) is not None and _is_ours(spec.submodule_search_locations or (), package):
            importable.append(name)
    return copies, bare_finding(imported, importable)
