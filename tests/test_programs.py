"""Programs of tests/programs.py behave as `subprocess` would have them, and import nothing anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.system
TOLD = """
import json, os, random, sys, uuid
import torch
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": globals().get("__file__"), "folder": os.getcwd(),
    "variable": os.environ.get("VARIABLE"), "group": os.getpgid(0), "session": os.getsid(0), "parent": os.getppid(),
    "main": sys.modules["__main__"].__dict__ is globals(), "said": sys.stdin.read(), "passed": sys.argv[-1:],
    "drawn": None if len(sys.argv) < 3 else [random.random(), torch.rand(1).item()],
    "files": sorted(int(each) for each in os.listdir("/proc/self/fd")),
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["script", "module", "text"])
@pytest.mark.parametrize("session", [False, True])
def test_a_program_finds_what_a_new_process_would(kind: str, session: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "told.py").write_text(TOLD)
    words = {"script": [str(tmp_path / "told.py")], "module": ["-m", "told"], "text": ["-c", TOLD]}[kind]
    environment = {**os.environ, "VARIABLE": "7", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *words, "given"]
    options = {"env": environment, "cwd": tmp_path / "folder", "input": "asked", "text": True, "start_new_session": session}
    forked, new = (kind.run(command, capture_output=True, timeout=200, **options) for kind in (programs, subprocess))
    assert (forked.returncode, forked.stderr) == (new.returncode, new.stderr) == (7, "to stderr\n")
    ours, theirs = json.loads(forked.stdout), json.loads(new.stdout)
    for own in ("group", "session") if session else ():  # its process id
        assert ours.pop(own) != theirs.pop(own)
    ours["files"], theirs["files"] = ours["files"][:3], theirs["files"][:3]
    assert ours == theirs and ours["parent"] == os.getpid()


def test_programs_draw_different_numbers_and_have_no_file_of_each_other(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb"):
        running = [
            programs.Popen([sys.executable, "-c", TOLD, "a", str(writing)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, pass_fds=[writing])
            for _ in range(3)
        ]  # fmt: skip
        told = [json.loads(process.communicate(timeout=100)[0]) for process in running]
    assert len({tuple(each["drawn"]) for each in told}) == 3
    assert all(writing in each["files"] for each in told)


def test_a_program_is_killed_and_one_that_fails_says_so(tmp_path: Path) -> None:
    process = programs.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    done = programs.run([sys.executable, "-c", "1 / 0"], capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run([sys.executable, "-c", "import time; time.sleep(300)"], timeout=0.2)


@pytest.mark.parametrize("differs", [{"OMP_NUM_THREADS": "2"}, {"PYTHONHASHSEED": "5"}, {}])
def test_what_is_read_before_the_first_line_needs_a_new_process(differs: dict[str, str]) -> None:
    text = "import sys; print('torch' in sys.modules)"
    done = programs.run([sys.executable, "-c", text], capture_output=True, text=True, env={**os.environ, **differs})
    assert done.stdout == f"{not differs}\n", programs.difference_from_server({**os.environ, **differs})
