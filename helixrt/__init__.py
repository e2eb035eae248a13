"""helixrt: hybrid-parallel training that stays fast on slow links and running when parts fail.

Importing this package loads nothing but the standard library: subpackages (`helixrt.schedule`,
`helixrt.protocol`, ...) and the names of `_EXPORTS` are loaded at their first use, so tools and
protocol code start at once, also where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import Any

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {  # public name -> the module that defines it
    "ConfigError": "helixrt.errors",
    "Fatal": "helixrt.errors",
    "HelixError": "helixrt.errors",
    "Mesh": "helixrt.job.mesh",
    "MissingExtra": "helixrt.errors",
    "MisuseError": "helixrt.errors",
    "Policy": "helixrt.engines.update",
    "Retryable": "helixrt.errors",
    "RunOptions": "helixrt.job.launch",
    "RunResult": "helixrt.job.launch",
    "Session": "helixrt.job.session",
    "Stages": "helixrt.engines.staged",
    "Step": "helixrt.job.step",
    "compile": "helixrt.compile",
    "init": "helixrt.job.init",
    "run": "helixrt.job.launch",
}

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """PEP 562: an exported name or a subpackage, loaded now and kept."""
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and util.find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
