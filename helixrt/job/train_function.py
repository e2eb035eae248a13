"""The user's train function by name: checked where it is given, imported again in each rank.

In: a function at the top level of a module or of the script that is run. Out: `TrainFunction`, plain data that travels to the
ranks, and the function again. A rank runs the script as a process does that multiprocessing spawns: `__name__` is not
`__main__`, so `if __name__ == "__main__":` keeps it from starting another run there, and then the script is `__main__`.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from helixrt.errors import ConfigError, MisuseError

MAIN, SPAWNED = "__main__", "__mp_main__"  # multiprocessing and pickle know both as names of the script
_FUNCTIONS = (FunctionType, type(functools.cache(len)))
RANK_VARIABLE = "HELIXRT_RANK"  # set in the process of a rank: which one it is
CODE_VARIABLE = "HELIXRT_CODE"  # the folder of the driver's machine that travelled to this node, as its working directory


@dataclass(frozen=True)
class TrainFunction:
    """`module` is its name, or "" for the script at `script`. `path`, if not "", is put first into sys.path. `argv` are the
    arguments of the program that started the run, which its ranks see as theirs. `as_main`: `python -m` runs the module."""

    module: str
    qualname: str
    script: str
    path: str
    argv: tuple[str, ...] = ()
    as_main: bool = False

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
        is_main = bool(script) or self.as_main
        module = _run_as_main(script or self.module) if is_main else importlib.import_module(self.module)
        found = _found(vars(module), self.qualname)
        if not callable(found):
            where = script or self.module
            raise ConfigError("train", self.qualname, f"is not there when a rank imports {where}; define it at the top level")
        return found


def name_of(train: Any) -> TrainFunction:
    """Raises ConfigError (train) for what a rank cannot import by name: a lambda, a nested function, a method, a partial."""
    qualname, module = getattr(train, "__qualname__", ""), getattr(train, "__module__", "")
    if nameless := _nameless(train, qualname if module else ""):
        what, way = nameless
        raise ConfigError("train", qualname or repr(train), f"is {what}; ranks import it by its name, so {way}")
    names = vars(sys.modules[module]) if module in sys.modules else {}
    script, as_main = "", False
    if module == MAIN:
        names = _script_of(train)
        spec, file = names.get("__spec__"), names.get("__file__")
        if spec is not None and spec.name != MAIN:  # python -m package.module
            module, as_main = spec.name, True
        elif file is None or not Path(file).is_file():
            rule = "was defined in an interactive session; put it into a file, which ranks can import"
            raise ConfigError("train", qualname, rule)
        else:
            module, script = "", str(Path(file).resolve())
    if names and _found(names, qualname) is not train:
        rule = f"leads to another object in {script or module} than the one given; give what has this name there"
        raise ConfigError("train", qualname, rule)
    path = str(Path(script).parent) if script else root_of(module)
    if module.partition(".")[0] == "helixrt":  # which a rank has imported; other folders beside it are not for `import`
        path = ""
    return TrainFunction(module, qualname, script, path, tuple(sys.argv[1:]), as_main)


def _nameless(train: Any, qualname: str) -> tuple[str, str] | None:
    """What it is, and the way on, if no rank could import it."""
    if isinstance(train, functools.partial):
        return "a partial", "give its function, and its values by arguments="
    if inspect.ismethod(train):
        return "a method", "give a function at the top level of a module, which makes the object and calls its method"
    if "<lambda>" in qualname:
        return "a lambda", "define a function at the top level of a module"
    if "<" in qualname:
        return "a nested function", "define it at the top level of a module; if a decorator made it, use functools.wraps there"
    if not callable(train) or not qualname:
        return "no function", "give one at the top level of a module, which may make an object and call it"
    return None


def _script_of(train: Any) -> dict[str, Any]:
    """The names of the script. Under a program that runs it, such as cProfile, `sys.modules` may have that program."""
    names: dict[str, Any] = getattr(inspect.unwrap(train), "__globals__", {})
    return names if names.get("__name__") == MAIN else vars(sys.modules[MAIN])


def _found(names: dict[str, Any], qualname: str) -> Any:
    first, *others = qualname.split(".")
    return functools.reduce(lambda found, part: getattr(found, part, None), others, names.get(first))


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


def _run_as_main(program: str) -> ModuleType:
    """Run the script at a path, or the module that `python -m` runs, with the name that multiprocessing gives it. Both names
    lead to it in sys.modules, and `__main__` is its own afterwards, also that of its functions and classes in pickles."""
    spec = None if os.path.isabs(program) else importlib.util.find_spec(program)
    file = program if spec is None else spec.origin
    if file is None or (spec is None and not Path(file).is_file()):
        rule = "is not on this machine; submit it within the working directory of a Ray job, or put it on shared storage"
        raise ConfigError("train", program, rule)
    loader: Any = SourceFileLoader(MAIN, file) if spec is None else spec.loader
    module = ModuleType(SPAWNED)
    module.__file__, module.__loader__, module.__spec__ = file, loader, spec
    module.__package__ = None if spec is None else spec.parent
    sys.modules[MAIN] = sys.modules[SPAWNED] = module
    exec(loader.get_code(MAIN if spec is None else spec.name), vars(module))
    module.__name__ = MAIN
    for made in gc.get_objects():
        if issubclass(type(made), type) and vars(made).get("__module__") == SPAWNED:
            type.__setattr__(made, "__module__", MAIN)
        elif issubclass(type(made), _FUNCTIONS) and made.__module__ == SPAWNED:
            made.__module__ = MAIN
    return module


def root_of(module: str) -> str:
    """The folder that holds the module's top package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return os.getcwd()
    above = module.count(".") + (1 if Path(file).name == "__init__.py" else 0)
    return str(Path(file).resolve().parents[above])
