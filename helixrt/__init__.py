"""helixrt: hybrid-parallel training that stays fast on slow links and running when parts fail.

Importing this package loads nothing but the standard library: subpackages (`helixrt.schedule`,
`helixrt.protocol`, ...) and the names of `_EXPORTS` are loaded at their first use, so tools and
protocol code start at once, also where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for tools that check types; at run time `__getattr__` loads them
    from helixrt.engines.example_batch import ExampleBatch as ExampleBatch
    from helixrt.engines.portions import Cut as Cut
    from helixrt.engines.stage_ranks import ParameterLayout as ParameterLayout
    from helixrt.engines.staged import Stages as Stages
    from helixrt.engines.update import Policy as Policy
    from helixrt.engines.update import UpdateRecord as UpdateRecord
    from helixrt.errors import ConfigError as ConfigError
    from helixrt.errors import Fatal as Fatal
    from helixrt.errors import HelixError as HelixError
    from helixrt.errors import MissingExtra as MissingExtra
    from helixrt.errors import MisuseError as MisuseError
    from helixrt.errors import Retryable as Retryable
    from helixrt.job.description import Corpus as Corpus
    from helixrt.job.description import Description as Description
    from helixrt.job.description import TextFigures as TextFigures
    from helixrt.job.evaluation import Part as Part
    from helixrt.job.evaluation import PartSums as PartSums
    from helixrt.job.init import init as init
    from helixrt.job.launch import RunOptions as RunOptions
    from helixrt.job.launch import RunResult as RunResult
    from helixrt.job.launch import run as run
    from helixrt.job.loggers import CsvLogger as CsvLogger
    from helixrt.job.loggers import MetricsLogger as MetricsLogger
    from helixrt.job.loggers import MetricsPoint as MetricsPoint
    from helixrt.job.mesh import Mesh as Mesh
    from helixrt.job.resume import SavedRun as SavedRun
    from helixrt.job.resume import saved_run as saved_run
    from helixrt.job.session import Session as Session
    from helixrt.job.step import Step as Step
    from helixrt.job.warm_up import warm_up as warm_up
    from helixrt.schedule.adaptation.policy import Adaptation as Adaptation

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {  # public name -> the module that defines it
    "Adaptation": "helixrt.schedule.adaptation.policy",
    "ConfigError": "helixrt.errors",
    "Corpus": "helixrt.job.description",
    "CsvLogger": "helixrt.job.loggers",
    "Cut": "helixrt.engines.portions",
    "Description": "helixrt.job.description",
    "ExampleBatch": "helixrt.engines.example_batch",
    "Fatal": "helixrt.errors",
    "HelixError": "helixrt.errors",
    "Mesh": "helixrt.job.mesh",
    "MetricsLogger": "helixrt.job.loggers",
    "MetricsPoint": "helixrt.job.loggers",
    "MissingExtra": "helixrt.errors",
    "MisuseError": "helixrt.errors",
    "ParameterLayout": "helixrt.engines.stage_ranks",
    "Part": "helixrt.job.evaluation",
    "PartSums": "helixrt.job.evaluation",
    "Policy": "helixrt.engines.update",
    "Retryable": "helixrt.errors",
    "RunOptions": "helixrt.job.launch",
    "RunResult": "helixrt.job.launch",
    "SavedRun": "helixrt.job.resume",
    "Session": "helixrt.job.session",
    "Stages": "helixrt.engines.staged",
    "Step": "helixrt.job.step",
    "TextFigures": "helixrt.job.description",
    "UpdateRecord": "helixrt.engines.update",
    "compile": "helixrt.compile",
    "init": "helixrt.job.init",
    "run": "helixrt.job.launch",
    "saved_run": "helixrt.job.resume",
    "warm_up": "helixrt.job.warm_up",
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
