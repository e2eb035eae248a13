"""The train function by its name: what ranks can import, and what they cannot."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

from helixrt.errors import ConfigError, MisuseError
from helixrt.job.train_function import MAIN, RANK_VARIABLE, SPAWNED, TrainFunction, check_not_in_rank, name_of
from tests import programs

SCRIPT = """
import functools, json, sys
from helixrt.job.train_function import name_of
class Holder:
    @staticmethod
    def train(session): return ("held", session)
def train(session): return (__name__, BEGAN, {each.__module__ for each in (train, Holder, half)}, session, sys.argv[1:])
@functools.cache
def half(number): return number / 2
BEGAN = __name__
if __name__ == "__main__":
    print(json.dumps([name_of(train).to_plain(), name_of(Holder.train).to_plain()]))
"""


def top_level(session: object) -> object:
    return session


class Trainer:
    def train(self, session: object) -> None: ...

    def __call__(self, session: object) -> None: ...


@pytest.mark.system
def test_a_script_is_named_by_its_file_and_imported_without_its_main_part(tmp_path: Path) -> None:
    script = tmp_path / "my script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "--lr", "3"]
    said = programs.run(command, capture_output=True, text=True, check=True, cwd=tmp_path.parent)
    load = f"""
import json
from helixrt.job.train_function import TrainFunction
for raw in json.loads({said.stdout!r}):
    print(TrainFunction.from_plain(raw).load()(7))
"""
    found = programs.run([sys.executable, "-c", load], capture_output=True, text=True, check=True, cwd="/")
    assert found.stdout.splitlines() == [
        "('__main__', '__mp_main__', {'__main__'}, 7, ['--lr', '3'])",
        "('held', 7)",
    ]


def test_a_function_of_a_module_is_named_by_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    named = name_of(functools.lru_cache)
    assert (named.module, named.qualname, named.script) == ("functools", "lru_cache", "")
    monkeypatch.setattr(sys, "argv", list(sys.argv))  # `load` sets it
    assert TrainFunction.from_plain(named.to_plain()).load() is functools.lru_cache


@pytest.mark.parametrize(
    ("train", "rule"),
    [
        (lambda session: None, "is a lambda; ranks import it by its name, so define a function at the top level of a module"),
        (Trainer().train, "is a method; .* so give a function at the top level of a module, which makes the object and calls"),
        (functools.partial(top_level), "is a partial; .* so give its function, and its values by arguments="),
        (Trainer(), "is no function; .* so give one at the top level of a module, which may make an object and call it"),
        (7, "is no function"),
        (torch.no_grad()(top_level), "=top_level: leads to another object in .* than the one given; give what has this name"),
    ],
)
def test_what_a_rank_cannot_import_is_refused(train: object, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        name_of(train)


def test_a_nested_function_is_refused() -> None:
    def train(session: object) -> None: ...

    with pytest.raises(ConfigError, match="is a nested function"):
        name_of(train)


def test_a_name_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in (MAIN, SPAWNED):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    script = tmp_path / "later.py"
    script.write_text("if __name__ == '__main__':\n    def train(session): ...\n")
    with pytest.raises(ConfigError, match="train=train: is not there when a rank imports .*later.py; define it at the top"):
        TrainFunction("", "train", str(script), str(tmp_path)).load()


def test_a_script_is_found_in_the_working_directory_of_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Ray job: both copies have the name that its content has."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in (MAIN, SPAWNED):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    (copy := tmp_path / "_ray_pkg_1" / "programs").mkdir(parents=True)
    (copy / "train.py").write_text("import beside\ndef train(session): return (__file__, beside.VALUE)\n")
    (copy / "beside.py").write_text("VALUE = 5\n")
    there = "/node0/_ray_pkg_1/programs"
    function = TrainFunction("", "train", f"{there}/train.py", there)
    with pytest.raises(ConfigError, match=f"train={there}/train.py: is not on this machine; submit it within the working dir"):
        function.load()
    monkeypatch.chdir(tmp_path / "_ray_pkg_1")
    assert function.load()(None) == (str(copy / "train.py"), 5)


MAIN_SCRIPT = Path(__file__).with_name("main_script.py")


@pytest.mark.system
@pytest.mark.parametrize(
    ("program", "start", "package"),
    [
        (("SCRIPT",), "cold", None),
        (("-m", "tests.job.main_script"), "warm", "tests.job"),
        (("-m", "cProfile", "-o", "PROFILE", "SCRIPT"), "warm", None),
    ],
)
def test_a_rank_has_the_script_as_plain_python_has_it(
    program: tuple[str, ...], start: str, package: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    programs.succeeded(MAIN_SCRIPT, "write", tmp_path)
    words = [{"SCRIPT": str(MAIN_SCRIPT), "PROFILE": str(tmp_path / "profile")}.get(word, word) for word in program]
    programs.succeeded(*words, "run", tmp_path, start)
    check_main_script(tmp_path, package)


def check_main_script(folder: Path, package: str | None) -> None:
    found = json.loads((folder / "found.json").read_text())
    points = [[0, 2, 4, 6, 8, 10, 12, 14]] * 3
    want = {"name": MAIN, "one module": True, "loaded": [True] * 3, "by value": 8, "loaders": points, "package": package}
    assert found == want
    read = programs.succeeded(MAIN_SCRIPT, "read", folder)
    assert read.stdout == "Net(in_features=2, out_features=1, bias=True) Point(x=3) Kind.WIDE True True\n"


def test_a_run_inside_a_rank_names_the_missing_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    check_not_in_rank()
    monkeypatch.setenv(RANK_VARIABLE, "r1")
    with pytest.raises(MisuseError, match="in rank r1, which imports the script; put the call under `if __name__ == "):
        check_not_in_rank()
