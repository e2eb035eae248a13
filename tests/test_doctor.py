"""Doctor: each finding follows from the facts it is given, and the exit code from the findings."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helixrt import doctor
from helixrt.doctor import Finding, Need, Package, State, import_paths
from helixrt.lab import vm_setup
from helixrt.lab.machine import Lack

TORCHFT = Package("torchft", (0, 2), "membership", "ft", Need.JOB, ("torchft",), load="torchft.coordination")
RAY = Package("ray", (2, 40), "jobs", "ray", Need.RAY_JOB)


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.13.0+cpu", (2, 13, 0)), ("3.7.1", (3, 7, 1)), ("2.14.0a0+git12", (2, 14, 0)), ("10", (10,)), ("unknown", ())],
)
def test_versions_are_read_as_numbers(text: str, version: tuple[int, ...]) -> None:
    assert doctor.parse_version(text) == version


@pytest.mark.parametrize(("version", "state"), [((3, 10, 9), State.BAD), ((3, 11, 0), State.ON), ((3, 14, 1), State.ON)])
def test_python(version: tuple[int, ...], state: State) -> None:
    assert doctor.python_finding(version, "/usr/bin/python3").state is state


@pytest.mark.parametrize(
    ("package", "version", "missing", "error", "state", "says"),
    [
        (TORCHFT, "0.2.0", (), "", State.ON, "0.2.0"),
        (TORCHFT, None, (), "", State.BAD, "not installed"),
        (TORCHFT, "0.1.9", (), "", State.BAD, "0.1.9 is older than 0.2"),
        (TORCHFT, "0.10.0", (), "", State.ON, "0.10.0"),
        (TORCHFT, "0.2.0", ("torchft",), "", State.BAD, "without torchft"),
        (TORCHFT, "0.2.0", (), "ImportError: libc", State.BAD, "does not load: ImportError: libc"),
        (RAY, None, (), "", State.OFF, "not installed"),
        (RAY, "2.60.0", ("aiohttp",), "", State.BAD, "without aiohttp"),
    ],
)
def test_packages(package: Package, version: str | None, missing: tuple[str, ...], error: str, state: State, says: str) -> None:
    finding = doctor.package_finding(package, version, missing, error)
    assert finding.state is state and says in finding.detail
    assert finding.fix == ("" if state is State.ON else f"pip install 'helixrt[{package.extra}]'")
    assert finding.needed_for is package.needed_for


def test_triton_is_compared_with_what_torch_declares() -> None:
    assert doctor.triton_finding("3.7.1", "3.7.1", accelerator=True).state is State.ON
    wrong = doctor.triton_finding("3.9.0", "3.7.1", accelerator=True)
    assert wrong.state is State.WARN and wrong.fix == "pip install triton==3.7.1"
    assert doctor.triton_finding(None, "3.7.1", accelerator=False).fix == "pip install triton==3.7.1"
    assert "interpreter" in doctor.triton_finding("3.7.1", None, accelerator=False).detail


def a_copy(folder: Path, text: str) -> Path:
    package = folder / "helixrt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return package


def test_two_copies_of_the_package_are_found_and_compared(tmp_path: Path) -> None:
    used = a_copy(tmp_path / "used", "x = 1\n")
    equal, other = a_copy(tmp_path / "equal", "x = 1\n"), a_copy(tmp_path / "other", "x = 2\n")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "helixrt").symlink_to(used)

    def finding(*folders: Path) -> Finding:
        found = [path for path in import_paths.find_copies(map(str, folders), used) if path.is_relative_to(tmp_path)]
        return import_paths.copies_finding(used, found, lambda a, b: import_paths.digest(a) == import_paths.digest(b))

    assert finding(tmp_path / "used", tmp_path / "linked", tmp_path / "absent").state is State.ON
    assert finding(tmp_path / "used", tmp_path / "equal").state is State.WARN
    broken = finding(tmp_path / "used", tmp_path / "equal", tmp_path / "other")
    assert broken.state is State.BAD and str(other) in broken.detail and str(equal) in broken.detail
    assert not doctor.can_run([broken], Need.JOB)


def test_bare_imports() -> None:
    assert import_paths.bare_finding([], []).state is State.ON
    assert import_paths.bare_finding([], ["triton_kernels"]).state is State.WARN
    assert not import_paths.bare_finding(["passes"], ["conf"]).works


def test_ports() -> None:
    assert doctor.ports_finding("", [], "").state is State.ON
    assert doctor.ports_finding("", [8265], "http://127.0.0.1:8265").state is State.ON
    assert doctor.ports_finding("", [8265], "").state is State.WARN
    assert doctor.ports_finding("Cannot assign requested address", [], "").state is State.BAD


def test_a_head_on_its_usual_port_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "RAY_PORTS", {port: "a head"})
        assert f"{port} (a head)" in doctor.look_at_ports().detail
    assert doctor.look_at_ports().state is State.ON


def test_namespaces() -> None:
    assert doctor.namespaces_finding(None).state is State.ON
    finding = doctor.namespaces_finding(Lack("not root", "run as root"))
    assert (finding.state, finding.detail, finding.fix) == (State.OFF, "not root", "run as root")


def test_rdma_needs_a_device_and_pyverbs() -> None:
    assert doctor.rdma_finding(True, ["rxe0"]).state is State.ON
    assert "pyverbs is not installed" in doctor.rdma_finding(False, ["rxe0"]).detail
    assert doctor.rdma_finding(True, []).state is State.OFF


def test_the_vm_lab() -> None:
    assert doctor.lab_finding(None, "6.1.0-9-amd64").state is State.ON
    finding = doctor.lab_finding(Lack("not installed: kmod", "helixrt lab setup"), "")
    assert (finding.state, finding.detail, finding.fix) == (State.OFF, "not installed: kmod", "helixrt lab setup")


def test_what_can_run_follows_from_what_it_needs() -> None:
    fine = Finding("torch", State.ON, "2.13", needed_for=Need.JOB)
    no_ray = Finding("ray", State.OFF, "not installed", "pip install", Need.RAY_JOB)
    no_option = Finding("rdma", State.OFF, "no device")
    no_torch = Finding("torch", State.BAD, "not installed", "pip install", Need.JOB)
    assert doctor.can_run([fine, no_option], Need.RAY_JOB)
    assert doctor.can_run([fine, no_ray], Need.JOB) and not doctor.can_run([fine, no_ray], Need.RAY_JOB)
    assert not doctor.can_run([no_torch], Need.JOB) and not doctor.can_run([no_torch], Need.RAY_JOB)
    text = doctor.to_text([fine, no_ray])
    assert "-> pip install" in text
    assert text.splitlines()[-1].endswith("cannot run: ray") and text.splitlines()[-2].endswith("can run")


def run_doctor(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "helixrt.cli", "doctor", *arguments]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.system
def test_here_the_main_job_can_run_and_json_says_the_same(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["main_job"] is True
    findings = {finding["name"]: finding for finding in report["findings"]}
    asked = "python package torch accelerator triton ray torchft deepspeed rdma ports"
    assert set(asked.split()) <= set(findings)
    assert not [name for name, finding in findings.items() if finding["state"] != "on" and not finding["fix"]]
    assert findings["deepspeed"]["state"] == "on"


@pytest.mark.system
def test_a_second_different_copy_on_the_path_ends_with_1(tmp_path: Path) -> None:
    source = Path(doctor.__file__).parents[1]
    shutil.copytree(source, tmp_path / "helixrt", ignore=shutil.ignore_patterns("__pycache__"))  # as a wheel: real folders
    (tmp_path / "helixrt" / "errors.py").open("a").write("\nCHANGED = True\n")
    done = run_doctor(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"bad   package       used from {(tmp_path / 'helixrt').resolve()}; different copies at" in done.stdout
    assert "cannot run: package" in done.stdout


def test_a_user_without_home_and_name_and_what_cannot_be_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert vm_setup.cache_folder().is_absolute()
    monkeypatch.setattr(doctor, "look_at_lab", lambda: unknown(5))
    assert doctor.examine()[-1] == Finding("rdma lab", State.WARN, "cannot be examined: KeyError: 5")
