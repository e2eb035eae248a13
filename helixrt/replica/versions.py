"""The versions that the processes of a run must have alike: of helixrt, and of torch without its build (+cpu, +cu128).

In: the versions of another process, as plain data. Out: nothing, or ConfigError. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

import helixrt
from helixrt.errors import ConfigError

VARIABLE = "HELIXRT_VERSIONS"  # of a Ray actor: the versions of the process that started it, as JSON


def versions() -> dict[str, str]:
    """Of this process, by package."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:  # a folder on the import path
        from torch import __version__

        torch = str(__version__)
    return {"helixrt": helixrt.__version__, "torch": torch}


def check_versions(there: Mapping[str, str], where: str) -> None:
    """Raises ConfigError for the first package whose version here is not the one `there`, at `where`. An earlier helixrt tells
    none: {}."""
    for package, version in versions().items():
        other = there.get(package, "a version that it does not tell")
        if _compared(package, version) != _compared(package, other):
            raise ConfigError(package, version, f"{where} has {other}; install the same version on all machines")


def _compared(package: str, version: str) -> str:
    return version.partition("+")[0] if package == "torch" else version
