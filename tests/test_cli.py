"""The command: benchmarks are found without importing them, wrong settings end in one line and exit code 2."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import helixrt
from helixrt import cli
from helixrt.commands import serve

PROBE = '''"""Count to a number.

More text.
"""
from helixrt.errors import ConfigError

def add_arguments(parser):
    parser.add_argument("--to", type=int, default=3)

def run(args):
    if args.to < 0:
        raise ConfigError("to", args.to, "must not be negative")
    print(sum(range(args.to)))
    return 5
'''


@pytest.fixture
def bench_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package `helixrt.bench` with two more benchmarks, one of which does not even import."""
    package = importlib.import_module("helixrt.bench")
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "broken.py").write_text('"""Needs what is not there."""\nimport package_that_is_not_installed\n')
    (tmp_path / "_private.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    yield tmp_path
    sys.modules.pop("helixrt.bench.probe", None)
    vars(package).pop("probe", None)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"helixrt {helixrt.__version__}\n"


def test_benchmarks_are_listed_with_their_first_line_and_not_imported(
    bench_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.benchmarks() == {"broken": "Needs what is not there.", "probe": "Count to a number."}
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", "--help"])
    assert exited.value.code == 0 and "Count to a number." in capsys.readouterr().out
    assert "helixrt.bench.probe" not in sys.modules


def test_a_benchmark_gets_its_own_arguments_and_gives_the_exit_code(
    bench_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "probe", "--to", "4"]) == 5
    assert capsys.readouterr().out == "6\n"


def test_a_wrong_setting_is_one_line_and_exit_code_2(bench_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "probe", "--to", "-1"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "helixrt: to=-1: must not be negative\n" and captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["nope"], ["bench"], ["bench", "nope"], ["doctor", "--nope"]])
def test_wrong_usage_exits_with_2(bench_folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(arguments)
    said = capsys.readouterr().err
    assert exited.value.code == 2 and "usage: helixrt" in said and said.count("\n") == 1


def test_every_benchmark_of_the_package_keeps_the_contract() -> None:
    for name, summary in cli.benchmarks().items():
        module = importlib.import_module(f"helixrt.bench.{name}")
        assert summary and callable(module.add_arguments) and callable(module.run), name


def test_the_acceptance_of_a_loss_reaches_the_driver_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from helixrt.job.loss_acceptance import note_waiting, take_acceptance

    assert cli.main(["accept-loss", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}")
    assert cli.main(["accept-loss", str(tmp_path)]) == 2
    assert "no replica waits" in capsys.readouterr().err and not take_acceptance(tmp_path)
    note_waiting(tmp_path, "waits for replica 0")
    assert cli.main(["accept-loss", str(tmp_path)]) == 0
    assert take_acceptance(tmp_path) and not take_acceptance(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--replicas", "0"], "replicas=0: must be at least 1"),
        (["--replicas", "2", "--membership", "votes"], "membership=votes: must be one of auto, torchft, store"),
        (["--replicas", "2", "--step-timeout-s", "1"], "step_timeout_s=1.0: must be at least 5 seconds"),
        (["--replicas", "2", "--wait-s", "0"], "wait_s=0.0: must be above 0"),
        (["--replicas", "2", "--secret-file", "/nowhere"], "secret-file=/nowhere: cannot be read"),
        (["--replicas", "2", "--secret-file", sys.executable], "cannot be read: it is no text"),
        (["--replicas", "2", "--port", "99999"], "port=99999: must be from 1 to 65535, or 0 for any free one"),
        (["--replicas", "2", "--port", "-1"], "port=-1: must be from 1 to 65535, or 0 for any free one"),
        (["--replicas", "2", "--host", "0"], "host=0: is every address of this machine"),
        (["--replicas", "2", "--host", "a..b"], "host=a..b: is no address of this machine"),
    ],
)
def test_serve_refuses_wrong_settings_before_anything_is_made(
    arguments: list[str], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments, "--storage", str(tmp_path / "out")]) == 2
    assert rule in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("storage", ["/proc/x", __file__])
def test_serve_refuses_a_storage_that_cannot_be_written(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--replicas", "1", "--storage", storage]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"helixrt: storage={storage}: cannot be written: ") and said.count("\n") == 1


def test_serve_prints_paths_as_a_shell_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my runs; a 'few'"
    folder.mkdir()
    run = SimpleNamespace(name="run-1", folder=folder)
    driver = SimpleNamespace(run_=run, address="10.0.0.1:5", secret="the secret", config=SimpleNamespace(host="10.0.0.1"))
    sizes = {"replicas": 1, "pp": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    for given, file in (("", folder / "secret"), ("given", folder / "own")):
        serve._say(driver, SimpleNamespace(secret_file=folder / "own", **sizes), given)
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "SECRET_FILE" in line]
        assert shlex.split(line) == ["export", f"HELIXRT_SECRET_FILE={file}"]


def test_a_run_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{")
    assert cli.main(["drain", "0", "--run", str(tmp_path)]) == 2
    assert "its run.json or config.json cannot be read" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), "--to", str(tmp_path / "to")]) == 1
    assert f"helixrt: {tmp_path / 'run.json'} cannot be read" in capsys.readouterr().err


def test_an_address_at_which_no_ray_cluster_answers_is_one_line() -> None:
    """In a process of its own: Ray reads the way of authentication once in a process."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    ended = subprocess.run(
        [sys.executable, "-m", "helixrt.cli", "attach", "job-1"],
        env={**os.environ, "RAY_ADDRESS": "nonsense"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.endswith("helixrt: RAY_ADDRESS=nonsense: no Ray cluster with a dashboard answers there\n")


def test_serve_takes_no_short_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELIXRT_SECRET", "short")
    assert cli.main(["serve", "--replicas", "2", "--storage", str(tmp_path / "out")]) == 2
    assert "must have at least 16 characters" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("handled", "code"), [("interrupted()", 130), ("130", -signal.SIGINT)])
def test_a_program_that_has_handled_ctrl_c_in_code_from_a_text_ends_as_it_says(tmp_path: Path, handled: str, code: int) -> None:
    """Such code is the class body of a dataclass. Without `interrupted` Python itself ends a module by the signal."""
    lines = [
        "import sys",
        "from helixrt.errors import interrupted",
        "try:",
        "    exec('raise KeyboardInterrupt')",
        "except KeyboardInterrupt:",
        f"    sys.exit({handled})",
    ]
    (tmp_path / "handles.py").write_text("\n".join(lines))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    ended = subprocess.run([sys.executable, "-m", "handles"], env=os.environ | {"PYTHONPATH": path}, timeout=60)
    assert ended.returncode == code
