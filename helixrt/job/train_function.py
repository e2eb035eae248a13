"""The user's train function by name: checked where it is given, imported again in each rank.

In: a function at the top level of a module or of the script that is run. Out: `TrainFunction`, plain data that travels to the
ranks, and the function again. A script is run in each rank as a module named `SCRIPT_MODULE`, so `if __name__ == "__main__":`
keeps it from starting another run there.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from helixrt.errors import ConfigError, MisuseError

SCRIPT_MODULE = "__helixrt_script__"  # what __name__ is when a rank imports the script
RANK_VARIABLE = "HELIXRT_RANK"  # set in the process of a rank: which one it is
CODE_VARIABLE = "HELIXRT_CODE"  # the folder of the driver's machine that travelled to this node, as its working directory


@dataclass(frozen=True)
class TrainFunction:
    """`module` is its name, or "" for the script at `script`. `path`, if not "", is put first into sys.path. `argv` are the
    arguments of the program that started the run, which its ranks see as theirs."""

    module: str
    qualname: str
    script: str
    path: str
    argv: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> TrainFunction:
        return TrainFunction(**{**raw, "argv": tuple(raw["argv"])})

    def load(self) -> Callable[..., Any]:
        """Import it. What the user's module raises is raised as it is; ConfigError (train) if the function is not there."""
        script, path = on_this_node(self.script), on_this_node(self.path)
        sys.argv = [script or self.module, *self.argv]
        if path and path not in sys.path:
            sys.path.insert(0, path)
        if script and not Path(script).is_file():
            rule = "is not on this machine; submit it within the working directory of a Ray job, or put it on shared storage"
            raise ConfigError("train", script, rule)
        module = _import_script(script) if script else importlib.import_module(self.module)
        found: Any = module
        for part in self.qualname.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            where = script or self.module
            raise ConfigError("train", self.qualname, f"is not there when a rank imports {where}; define it at the top level")
        return found


def name_of(train: Any) -> TrainFunction:
    """Raises ConfigError (train) for what a rank cannot import by name: a lambda, a nested function, a method, a partial."""
    qualname, module = getattr(train, "__qualname__", ""), getattr(train, "__module__", "")
    if not callable(train) or not qualname or not module:
        raise ConfigError("train", repr(train), "must be a function at the top level of a module; ranks import it by its name")
    if "<" in qualname or inspect.ismethod(train):
        what = "is a lambda" if "<lambda>" in qualname else "is a method" if inspect.ismethod(train) else "is a nested function"
        raise ConfigError("train", qualname, f"{what}; ranks import it by its name, so define it at the top level of a module")
    script = ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:  # python -m package.module
            module = spec.name
        elif file is None or not Path(file).is_file():
            rule = "was defined in an interactive session; put it into a file, which ranks can import"
            raise ConfigError("train", qualname, rule)
        else:
            module, script = "", str(Path(file).resolve())
    path = str(Path(script).parent) if script else root_of(module)
    if module.partition(".")[0] == "helixrt":  # which a rank has imported; other folders beside it are not for `import`
        path = ""
    return TrainFunction(module, qualname, script, path, tuple(sys.argv[1:]))


def on_this_node(path: str) -> str:
    """Where a file or folder of the driver's machine is here. Ray names the copies of a job's working directory by their
    content, alike on all nodes, and a rank begins in its node's copy."""
    here, parts = Path.cwd(), Path(path).parts
    code = os.environ.get(CODE_VARIABLE, "")
    if path and code and Path(path).is_relative_to(code):
        return str(here / Path(path).relative_to(code))
    if not path or Path(path).exists() or here.name not in parts:
        return path
    return str(here.joinpath(*parts[parts.index(here.name) + 1 :]))


def check_not_in_rank() -> None:
    """Raises MisuseError in the process of a rank: it imports the user's script, which has no `__main__` guard."""
    if RANK_VARIABLE in os.environ:
        raise MisuseError(
            f"helixrt.run was called in rank {os.environ[RANK_VARIABLE]}, which imports the script; put the call under "
            '`if __name__ == "__main__":`'
        )


def _import_script(script: str) -> ModuleType:
    """As a module of its own name, under which its functions and classes are found again."""
    if SCRIPT_MODULE in sys.modules:
        return sys.modules[SCRIPT_MODULE]
    spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, loader=SourceFileLoader(SCRIPT_MODULE, script))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[SCRIPT_MODULE]
        raise
    return module


def root_of(module: str) -> str:
    """The folder that holds the module's top package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return os.getcwd()
    above = module.count(".") + (1 if Path(file).name == "__init__.py" else 0)
    return str(Path(file).resolve().parents[above])
