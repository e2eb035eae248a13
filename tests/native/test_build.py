"""The library is compiled once for each set of sources and compiler, and a machine that cannot compile says so in one line."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helixrt.errors import ConfigError
from helixrt.native import build

ROOT = Path(__file__).resolve().parents[2]
ONE = """\
extern "C" int hx_one() { return 1; }
extern "C" int hx_sum(int a, int b) { return a + b; }
int hidden() { return 2; }
"""
pytestmark = pytest.mark.system


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one small source, and an empty home."""
    folder = tmp_path / "package"
    (folder / "src" / "host").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "src" / "one.cpp").write_text(ONE)
    (folder / "src" / "host" / "two.cpp").write_text('extern "C" int hx_two() { return 2; }\n')
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for name in ("CXX", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Puts a compiler into `CXX` that counts how often a whole library is linked."""
    real, log = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"), tmp_path / "calls"
    if real is None:
        pytest.skip("needs c++, g++ or clang++")
    script = tmp_path / "counting"
    script.write_text(f'#!/bin/sh\ncase "$*" in *--version-script*) echo >> "{log}";; esac\nexec "{real}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return lambda: len(log.read_text()) if log.exists() else 0


def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(build, "zig", lambda: None)


def test_compiled_once_and_again_for_other_sources(
    package: Path, calls: Callable[[], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "helixrt.native"):
        first = build.library_path()
    assert first.is_relative_to(tmp_path / "home" / ".cache" / "helixrt" / "native") and calls() == 1
    assert [record.levelname for record in caplog.records] == ["INFO"] and " s: " in caplog.text
    assert build.library_path() == first and calls() == 1
    library = ctypes.CDLL(str(first))
    assert (library.hx_one(), library.hx_two()) == (1, 2)
    assert not hasattr(library, "_Z6hiddenv")

    (package / "src" / "host" / "two.hpp").write_text("// another header\n")
    second = build.library_path()
    assert second != first and first.exists() and calls() == 2


def test_another_version_of_the_compiler_compiles_again(package: Path, calls: Callable[[], int]) -> None:
    first = build.library_path()
    script = Path(os.environ["CXX"])
    script.write_text(script.read_text() + "# another version\n")
    assert build.library_path() != first and calls() == 2


def test_of_two_processes_one_compiles(package: Path, calls: Callable[[], int]) -> None:
    lines = ("import sys, pathlib", "from helixrt.native import build", "build.FOLDER = pathlib.Path(sys.argv[1])")
    command = [sys.executable, "-c", "\n".join((*lines, "print(build.library_path())")), str(package)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(paths) == 1 and Path(paths.pop().strip()).is_file()
    assert calls() == 1


def test_no_compiler_is_one_line_that_says_what_to_install(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_programs(monkeypatch, tmp_path)
    with pytest.raises(ConfigError) as raised:
        build.library_path()
    text = str(raised.value)
    assert "\n" not in text and "install g++" in text and "pip install ziglang" in text
    assert build.main([]) == 2 and capsys.readouterr().err == f"{text}\n"


def test_a_compiler_without_cxx20_is_passed_over(
    package: Path, calls: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho unknown option -std=c++20 >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert Path(build.find_compiler().command[0]).name in ("c++", "g++", "clang++")
    assert build.library_path().is_file()


def test_sources_that_do_not_compile_are_one_line(package: Path, calls: Callable[[], int]) -> None:
    (package / "src" / "one.cpp").write_text("int x = nothing;\n")
    with pytest.raises(ConfigError, match=r"does not compile: .*one\.cpp:1:.*error.*nothing") as raised:
        build.library_path()
    assert "\n" not in str(raised.value)
    folder = next(build.cache_folders())
    assert not list(folder.glob("*.so")) and not list(folder.glob(".lib*")), "nothing half written is left"


@pytest.mark.parametrize("case", ["read-only home", "no home"])
def test_without_a_home_it_lies_in_a_private_temporary_folder(
    package: Path, calls: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "no home":
        monkeypatch.delenv("HOME")
    else:
        (tmp_path / "home").write_text("no folder can be made here, as root can do on read-only ones\n")
    found = build.library_path()
    assert found.parent.parent == tmp_path / "tmp"
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    assert build.library_path() == found and calls() == 1


def test_a_temporary_folder_that_others_can_write_is_not_used(
    package: Path, calls: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    (folder,) = build.cache_folders()
    folder.mkdir()
    folder.chmod(0o777)
    assert build.library_path().parent != folder


def test_an_absolute_xdg_cache_home_counts(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert next(build.cache_folders()) == tmp_path / "home" / ".cache" / "helixrt" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert next(build.cache_folders()) == tmp_path / "cache" / "helixrt" / "native"


def test_a_shipped_library_is_used_unless_the_sources_are_others(
    package: Path, calls: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = package / build.LIBRARY
    build.compile_library(shipped, build.find_compiler())
    with monkeypatch.context() as context:
        no_programs(context, tmp_path)
        assert build.library_path() == shipped, "no compiler is needed"
    (package / "src" / "one.cpp").write_text(ONE.replace("return 1", "return 3"))
    other = build.library_path()
    assert other != shipped and ctypes.CDLL(str(other)).hx_one() == 3
    shutil.rmtree(package / "src")
    assert build.library_path() == shipped


def test_neither_library_nor_sources(package: Path) -> None:
    shutil.rmtree(package / "src")
    with pytest.raises(ConfigError, match="install helixrt again"):
        build.library_path()


def test_the_command_compiles_with_a_sanitizer(
    package: Path, calls: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "sanitized.so"
    assert build.main(["--sanitize", "undefined", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert b"__ubsan_handle_add_overflow" in out.read_bytes()


@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the package ziglang is not installed")
def test_zig_compiles_it_as_well(package: Path) -> None:
    compiler = build.zig()
    assert compiler is not None and build.works(compiler)
    out = package / build.LIBRARY
    build.compile_library(out, compiler)
    assert ctypes.CDLL(str(out)).hx_two() == 2
