"""The README tells the truth: its example prints what it says, its commands run, its folders, links and versions exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MADE_BY_RUNS = {"outputs", "build", "dist"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines()]


def folders(under: Path) -> set[str]:
    """What a checkout holds: real folders with a file in them that no run has made."""
    return {
        one.name
        for one in under.iterdir()
        if one.is_dir() and not one.is_symlink() and not re.match(r"[._]", one.name) and one.suffix != ".egg-info"
        if one.name not in MADE_BY_RUNS and any(f.is_file() and "__pycache__" not in f.parts for f in one.rglob("*"))
    }


def examples() -> list[tuple[str, str]]:
    """Each program, and what the README says it prints."""
    found = re.findall(r"^```python\n(.*?)^```\n+It prints:\n\n```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(found) == len(blocks("python")) == 3
    return found


@pytest.mark.parametrize(("code", "printed"), examples(), ids=["strands", "collectives", "library"])
def test_an_example_prints_what_the_readme_says(code: str, printed: str, tmp_path: Path) -> None:
    assert len(code.strip().splitlines()) <= 11, "about ten lines"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("make ")])
def test_a_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    assert program.startswith(".venv/bin/"), command
    if "helixrt.train" in arguments and "--help" not in arguments:
        arguments.insert(arguments.index("helixrt.train") + 1, f"output.root={tmp_path}")
    run = [str(Path(sys.executable).parent / Path(program).name), *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_make_target_is_one_that_ci_runs() -> None:
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"train", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
        assert re.search(rf"\bmake {target}\b", ci), f"make {target} is not run by CI"


def test_every_folder_has_its_line_and_every_line_its_folder() -> None:
    top, inside = section("Folders").split("| in `helixrt/` |")
    for text, where in ((top, ROOT), (inside, ROOT / "helixrt")):
        assert set(re.findall(r"^\| `([\w.]+)/` \|", text, re.MULTILINE)) == folders(where)


def test_every_link_and_picture_is_there() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert "benchmarks/results/report.png" in links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link
    for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", README):
        assert (ROOT / picture).stat().st_size < 300_000, picture


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = [*project["dependencies"], *(w for extra in project["optional-dependencies"].values() for w in extra)]
    least = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=(\S+)$", "\n".join(wanted), re.MULTILINE))
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \|$", section("Supported versions"), re.MULTILINE)
    assert rows[0][:2] == ("Python", project["requires-python"].removeprefix(">="))
    assert len(rows) > 3
    for name, at_least, tested in rows[1:]:
        assert (at_least, tested) == (least[name], pinned[name]), name


def test_every_setting_in_the_table_exists() -> None:
    from helixrt.train.config import TrainConfig

    plain = TrainConfig().to_plain()
    rows = re.findall(r"^\| (`.+?`) \|", section("Settings"), re.MULTILINE)
    keys = [key for row in rows for key in re.findall(r"`([\w.]+)", row)]
    assert len(keys) > 7
    for key in keys:
        value: object = plain
        for part in key.split("."):
            assert isinstance(value, dict) and part in value, key
            value = value[part]


def test_settings_of_the_run_in_the_lab_exist() -> None:
    from helixrt.train.schema import load_config

    lines = [line for block in blocks("bash") for line in block.replace("\\\n", "").splitlines()]
    (command,) = [shlex.split(line) for line in lines if "helixrt.train" in line]
    config = load_config(command[command.index("helixrt.train") + 1 :])
    assert config.transport.rails_of(1) == ("rxe_b1", "rxe_b2")
    assert [one.command.split()[0] for one in config.chaos.run] == ["ip", "python", "sleep"]
