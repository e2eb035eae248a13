"""The build backend of pyproject.toml (PEP 517): setuptools, and the data plane's library in wheels.

A wheel holds the compiled library and is of this platform (`commands`). An editable install compiles nothing: the library is
compiled when it is first used. Where no compiler for C++20 is found, the package `ziglang` is a build requirement.

`-C manylinux=2_17` (of `pip wheel`, `python -m build`) compiles with ziglang, whatever else there is, and tags the wheel
manylinux_2_17: it then runs where glibc is that old.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)  # of `build_tools.commands` and of `helixrt.native.build`, which need nothing that is installed

from setuptools import build_meta  # noqa: E402
from setuptools.build_meta import (  # noqa: E402, F401
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
)

from build_tools.commands import MANYLINUX  # noqa: E402
from helixrt.errors import ConfigError  # noqa: E402
from helixrt.native import build  # noqa: E402

ZIG = "ziglang>=0.13"
Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    found = build_meta.get_requires_for_build_wheel(_settings(config_settings))
    return [*found, ZIG] if _needs_zig(config_settings) else found


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, _settings(config_settings))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return build_meta.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def _needs_zig(settings: Settings) -> bool:
    if (settings or {}).get("manylinux"):
        return True
    try:
        return build.find_compiler().command == getattr(build.zig(), "command", None)
    except ConfigError:
        return True


def _settings(settings: Settings) -> Settings:
    """As setuptools knows them: the tag is an option of its command bdist_wheel."""
    given = dict(settings or {})
    version = given.pop("manylinux", None)
    if not version:
        return settings
    if version != MANYLINUX:
        raise ConfigError("manylinux", version, f"the library is compiled for {MANYLINUX} alone")
    options = given.get("--build-option", [])
    options = [options] if isinstance(options, str) else list(options)
    return {**given, "--build-option": [*options, f"--plat-name=manylinux_{version}_{platform.machine()}"]}
