"""Commands of setuptools, named in pyproject.toml: a wheel gets the data plane's library, and the tag of its platform."""

from __future__ import annotations

from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from helixrt.native import build

MANYLINUX = build.GLIBC.replace(".", "_")


class PlatformWheel(bdist_wheel):
    """`py3-none-PLATFORM`: a library of this platform that any Python loads."""

    def finalize_options(self) -> None:
        self.distribution.has_ext_modules = lambda: True  # a wheel of compiled code, for all that asks
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class BuildWithLibrary(build_py):
    """Python files, and the library beside them; an editable install compiles it when it is first used."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            build.compile_library(Path(self.build_lib, "helixrt", "native", build.LIBRARY), self._compiler())

    def _compiler(self) -> build.Compiler:
        wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
        if not str(getattr(wheel, "plat_name", "") or "").startswith("manylinux"):
            return build.find_compiler()
        zig = build.zig()
        if zig is None:
            raise build.no_compiler()
        return zig
