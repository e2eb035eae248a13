"""`import helixrt` costs the standard library only, and the pure rooms bring no torch, sockets or threads."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import helixrt

HEAVY = {"torch", "ray", "deepspeed", "torchft", "torchdata", "hydra", "omegaconf", "triton"}
HEAVY |= {"matplotlib", "numpy", "tensorboard"}


def modules_after(code: str) -> set[str]:
    """Names of the modules that `code` brings into a fresh interpreter, those of its own start left out."""
    program = f"import json, sys\nbefore = set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def room(name: str) -> list[str]:
    """Every module of a package of ours, by its files."""
    package = __import__(f"helixrt.{name}", fromlist=["_"])
    return [package.__name__, *(info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."))]


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = modules_after("import helixrt; helixrt.__version__; dir(helixrt)")
    assert not HEAVY & loaded
    outside = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert outside == {"helixrt"}
    assert {name for name in loaded if name.startswith("helixrt.")} == set(), "no part of it is loaded before its use"


@pytest.mark.parametrize(("name", "allowed"), [("protocol", ""), ("schedule", "numpy")])
def test_pure_rooms_bring_no_torch_no_sockets_no_threads(name: str, allowed: str) -> None:
    modules = room(name)
    assert len(modules) > 2, "the room's modules were found"
    before = f"import {allowed}; before |= set(sys.modules); " if allowed else ""
    loaded = modules_after(before + "import " + ", ".join(modules))
    assert set(modules) <= loaded
    assert not (HEAVY | {"socket", "ssl", "asyncio", "multiprocessing", "selectors"}) & loaded
    assert "threading" not in loaded, "whoever needs a thread is a driver, not a protocol"


def test_the_flight_record_brings_the_standard_library_only() -> None:
    loaded = modules_after("import helixrt.record")
    assert {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) == {"helixrt"}
    assert "socket" not in loaded


def test_the_command_starts_without_heavy_modules() -> None:
    loaded = modules_after(
        "from helixrt import cli\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): cli.main(['bench', '--help'])"
    )
    assert "helixrt.cli" in loaded and not HEAVY & loaded


def test_ranks_imports_begin_before_those_of_their_driver() -> None:
    loaded = modules_after("import helixrt; helixrt.warm_up; import helixrt.train.config")
    assert "helixrt.job.forerunner" in loaded and not HEAVY & loaded


def test_exported_names_and_subpackages_load_at_their_first_use() -> None:
    from helixrt.errors import ConfigError

    assert helixrt.ConfigError is ConfigError
    assert helixrt.schedule.__name__ == "helixrt.schedule"
    assert set(helixrt.__all__) <= set(dir(helixrt))
    for name in helixrt.__all__:
        assert getattr(helixrt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'not_there'"):
        helixrt.not_there  # noqa: B018
