"""README and docs: every code block runs, every link and setting exists, and the documentation is built without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import programs
from tests.docs.blocks import ROOT, RULES, RUN, SHOWN, Block, all_blocks, pages

README = (ROOT / "README.md").read_text(encoding="utf-8")
MADE_BY_RUNS = {"outputs", "build", "dist"}
BLOCKS = all_blocks()


def of_rule(rule: str, language: str = "") -> list[Block]:
    return [b for b in BLOCKS if b.rule == rule and b.language in RUN and (not language or b.language == language)]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return programs.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=230)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_is_known_how_a_block_is_run(block: Block) -> None:
    assert block.language in (*RUN, *SHOWN), "name the language: python or sh, or text for what is shown only"
    assert block.rule in ("", *RULES), block.rule
    if block.rule == "covered by":
        file, _, test = block.about.partition("::")
        assert (ROOT / file).is_file(), block.about
        assert not test or re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), block.about


@pytest.mark.system
@pytest.mark.parametrize("block", of_rule("", "python"), ids=str)
def test_a_program_runs_and_prints_what_the_page_says(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block.code)
    done = run([sys.executable, str(program)], tmp_path)
    assert done.returncode == 0, done.stderr
    if block.printed is not None:
        assert done.stdout == block.printed


FRAGMENTS = [pytest.param(b, id=str(b), marks=[pytest.mark.slow] if b.slow() else []) for b in of_rule("in")]


@pytest.mark.system
@pytest.mark.parametrize("block", FRAGMENTS)
def test_a_fragment_runs_in_its_context(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block.in_its_context())
    done = run([sys.executable, str(program)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", of_rule("fragment of"), ids=str)
def test_a_fragment_is_part_of_its_example_which_is_tested(block: Block) -> None:
    lines = (ROOT / block.about).read_text().splitlines()
    wanted = [line.strip().rstrip(",") for line in block.code.splitlines() if line.strip()]
    assert [one for one in wanted if not any(one in line for line in lines)] == [], block.about
    assert (ROOT / "tests" / "examples" / f"test_{Path(block.about).stem}.py").is_file()


COMMANDS = [pytest.param(c, id=f"{b}: {c}"[:90]) for b in of_rule("", "sh") for c in b.commands()]


@pytest.mark.system
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    assert program == "helixrt", "commands of other programs need a comment: see tests/docs/blocks.py"
    if arguments[0] == "train" and "--help" not in arguments:
        arguments.insert(1, f"output.root={tmp_path}")
    arguments = [
        str(tmp_path / one) if previous == "-o" else one for previous, one in zip(["", *arguments], arguments, strict=False)
    ]
    done = run([sys.executable, "-m", "helixrt.cli", *arguments], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", of_rule("needs"), ids=str)
def test_commands_of_a_program_that_is_not_here_are_shell(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"\b{block.about}\b", block.code)


def test_the_slurm_script_is_shell_and_starts_the_example() -> None:
    script = ROOT / "examples" / "slurm_replicas.sh"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    directives = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.MULTILINE)
    assert {"array", "ntasks", "requeue"} <= set(directives)
    program = (ROOT / "examples" / "hsdp.py").read_text()
    served = re.search(r"helixrt serve --replicas (\d+) --dp-shard (\d+)", script.read_text())
    trained = re.search(r"replicas=(\d+), mesh=helixrt\.Mesh\(dp_shard=(\d+)\)", program)
    assert served is not None and trained is not None and served.groups() == trained.groups()
    replicas, ranks = map(int, served.groups())
    assert f"#SBATCH --array=0-{replicas - 1}\n#SBATCH --ntasks={ranks}\n" in script.read_text()


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900
    programs = [b for b in BLOCKS if b.page == "README.md"]
    assert len(programs) == 7
    for block in programs:
        assert len([line for line in block.code.splitlines() if line.strip()]) <= 10, block


@pytest.mark.parametrize(
    "file", [*pages(), ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_every_link_and_picture_is_there(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        found = file.parent / target if target else file
        assert found.exists(), f"{file.name}: {link}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], link
        if target.endswith((".png", ".svg")):
            assert found.stat().st_size < 300_000, target


def test_every_make_target_is_one_that_ci_runs() -> None:
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    named = {target for file in pages() for target in re.findall(r"(?:^|`)make ([a-z-]+)", file.read_text(), re.MULTILINE)}
    assert {"train", "test", "lint", "docs"} <= named
    for target in named - {"test-slow", "test-torch"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
        assert re.search(rf"\bmake {target}\b", ci), f"make {target} is not run by CI"


def folders(under: Path) -> set[str]:
    """What a checkout holds: real folders with a file in them that no run has made."""
    return {
        one.name
        for one in under.iterdir()
        if one.is_dir() and not one.is_symlink() and not re.match(r"[._]", one.name) and one.suffix != ".egg-info"
        if one.name not in MADE_BY_RUNS and any(f.is_file() and "__pycache__" not in f.parts for f in one.rglob("*"))
    }


def test_every_folder_has_its_line_and_every_line_its_folder() -> None:
    top, inside = page("concepts/layers.md").split("| in `helixrt/` |")
    for text, where in ((top, ROOT), (inside, ROOT / "helixrt")):
        assert set(re.findall(r"^\| `([\w.]+)/` \|", text, re.MULTILINE)) == folders(where)


def test_versions_and_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = [*project["dependencies"], *(w for extra in project["optional-dependencies"].values() for w in extra)]
    least = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=(\S+)$", "\n".join(wanted), re.MULTILINE))
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \|$", page("operations/versions.md"), re.MULTILINE)
    assert rows[0][:2] == ("Python", project["requires-python"].removeprefix(">="))
    assert len(rows) > 3
    for name, at_least, tested in rows[1:]:
        assert (at_least, tested) == (least[name], pinned[name]), name
    extras = re.findall(r"^\| `([a-z]+)` \|", page("operations/versions.md"), re.MULTILINE)
    assert set(extras) == set(project["optional-dependencies"])


def test_every_setting_in_the_table_exists() -> None:
    from helixrt.train.config import TrainConfig

    plain = TrainConfig().to_plain()
    rows = re.findall(r"^\| (`.+?`) \|", page("guides/built-in-job.md"), re.MULTILINE)
    keys = [key for row in rows for key in re.findall(r"`([\w.]+)", row)]
    assert len(keys) > 20
    for key in keys:
        value: object = plain
        for part in key.split("."):
            assert isinstance(value, dict) and part in value, key
            value = value[part]


def test_every_environment_variable_of_ours_is_in_the_table_and_no_other() -> None:
    table = set(re.findall(r"`(HELIX\w*)`(?=[^\n]*\|)", page("operations/environment.md")))
    sources = [f for top in ("helixrt", "passes", "ray_cluster", "triton_kernels") for f in (ROOT / top).rglob("*.py")]
    used = {
        name for file in sources for name in re.findall(r"[\"'](HELIX(?:RT)?_[A-Z_]+)[\"']", file.read_text(encoding="utf-8"))
    }
    assert used == table
    assert all(name.startswith("HELIXRT_") for name in used), "one prefix"


def test_settings_of_the_run_in_the_lab_exist() -> None:
    from helixrt.train.schema import load_config

    lines = [c for b in BLOCKS if b.page.endswith("networks.md") for c in b.commands() if "helixrt.train" in c]
    (command,) = [shlex.split(line) for line in lines]
    config = load_config(command[command.index("helixrt.train") + 1 :])
    assert config.transport.rails_of(1) == ("rxe_b1", "rxe_b2")
    assert [one.command.split()[0] for one in config.chaos.run] == ["ip", "python", "sleep"]


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (extra: docs); `make docs` installs it"
)
def test_the_documentation_is_built_offline_without_a_warning(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    site = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.html")}
    assert {"index.html", "guides/own-model.html", "reference/run.html", "repository/SECURITY.html"} <= site
    assert "helixrt.job.launch.run" in (tmp_path / "reference/run.html").read_text(encoding="utf-8")
