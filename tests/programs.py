"""Python programs that tests start: forked from a process that has imported torch, instead of importing it anew.

In: what `subprocess.Popen` takes, with a command of this interpreter: `[sys.executable, ("-u",) SCRIPT, "-m" MODULE or "-c"
TEXT, arguments…]`. Out: the same process as `subprocess.Popen` would start, a child of the caller, except that its imports are
done. An import of torch and its compiler takes 4 s of processor time, and a run of helixrt makes two: in its driver and in the
process that forks its ranks. Both are forked here, so a small run takes 2 s instead of 9.

A `_Server` is the process that forks. It has imported what programs need, runs one thread, and has computed nothing. It forks
twice, and the caller adopts the program (`helixrt.replica.adoption`). Each program has a server of its own, forked before its
first line, for the programs that it starts in turn (`_IN_PROGRAMS`).

Only tests that `make test-system` or `make test-slow` runs may start programs (`refused`).

A program starts in the plain way in a test marked `smoke`, if its environment differs in a variable that is read before its
first line, if the caller differs from the server in what a child inherits, or if it is asked for something that only a new
process can do.
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import gc
import importlib
import json
import os
import random
import re
import runpy
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from helixrt.job.inherited import Inherited, difference, inherited
from helixrt.replica.adoption import GO, adopting

ROOT = str(Path(__file__).resolve().parents[1])
_IMPORTED = (
    "torch.distributed.fsdp",  # brings DTensor
    "torch._dynamo",  # which torch.optim imports when the first optimizer is made
    "torch.distributed.checkpoint",
    "torch.utils.data",
    "torchdata.stateful_dataloader",
    "torch.utils.tensorboard",
    "helixrt.job.session_rank",
    "helixrt.job.driver",
    "helixrt.job.report",
    "helixrt.commands.serve",
    "helixrt.train.config",
)
_READ_AT_START = re.compile(r"PYTHON(?!PATH$|UNBUFFERED$)|TORCH|PYTORCH|OMP_|MKL|KMP|OPENBLAS|LD_|MALLOC|GLIBC|LC_|LANG|CUDA")
_SERVED = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as helixrt gives them to ranks
_IN_PROGRAMS = re.compile(r"helixrt\.job\.forerunner_process$|.*\.py$")  # what a program's own server starts
_PLAIN_POPEN = subprocess.Popen
_ANSWER_S = 60.0
_generators: list[random.Random] = []  # of the modules that a server has imported


class _Server:
    """The client's side: `control` is its connection to the process that forks; `inherited` is what that process has."""

    def __init__(self, control: socket.socket, pid: int, has: Inherited) -> None:
        self.control, self.pid, self.inherited, self.owner = control, pid, has, os.getpid()

    @staticmethod
    def new() -> _Server:
        environment = {**os.environ, **_SERVED}
        control, theirs = socket.socketpair()
        program = f"import sys; sys.path.insert(0, {ROOT!r}); from tests import programs; programs.serve_new({theirs.fileno()})"
        with theirs:
            command = [sys.executable, "-c", program]
            process = _PLAIN_POPEN(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT)
        atexit.register(_end, control, process)
        server = _Server(control, process.pid, inherited(environment))
        control.settimeout(300)
        if control.recv(1) != b"r":
            raise RuntimeError("the server of programs did not start")
        return server

    def start(self, order: Mapping[str, Any], files: Sequence[int]) -> int:
        """The process id of a program that this process has adopted. `files`: its standard files, then those of `pass_fds`."""
        answer, theirs = socket.socketpair()
        with answer, theirs, adopting():
            answer.settimeout(_ANSWER_S)
            text = os.memfd_create("order")
            try:
                os.write(text, json.dumps(order).encode())
                os.lseek(text, 0, os.SEEK_SET)
                socket.send_fds(self.control, [b"f"], [theirs.fileno(), text, *files])
            finally:
                os.close(text)
            theirs.close()
            said = answer.recv(32)
            if not said:
                raise RuntimeError("the server of programs forked nothing")
            answer.sendall(GO)
        return int(said)


_server: _Server | None = None
refused = ""  # why the present test may start no program; set by conftest.py
forks = True  # False for tests marked `smoke`, which start programs as users do


def kept() -> set[tuple[str, int]]:
    """What this process keeps until its end: its server, and the connection to it."""
    return {("process", _server.pid), ("descriptor", _server.control.fileno())} if _server is not None else set()


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` for a command of this interpreter."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        assert not refused, refused
        _, _, shell, p2cread, _, _, c2pwrite, _, errwrite, _, gid, gids, uid, umask, session, group = more
        only_new = (executable, preexec_fn, shell, not close_fds, gid, gids, uid, umask != -1, group != -1)
        order = None if any(only_new) or not forks else _order(args, env, cwd, bool(session), pass_fds)
        if order is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)  # type: ignore[misc]
            return
        assert _server is not None
        standard = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = _server.start(order, [*standard, *pass_fds])
        finally:
            self._close_pipe_fds(*more[3:9])  # type: ignore[attr-defined]


def run(command: Sequence[object], *, timeout: float = 230.0, input: Any = None, check: bool = False, **options: Any) -> Any:
    """`subprocess.run`, for commands of this interpreter."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(list(map(str, command)), **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done: Any = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def output_of(*arguments: object, timeout: float = 230.0, cwd: str | Path | None = None, **variables: str) -> Any:
    """What this interpreter says and ends with, given these arguments, with the checkout on its path, and these variables."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **variables}
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": environment, "cwd": cwd, "timeout": timeout}
    return run([sys.executable, *arguments], **options)


def succeeded(*arguments: object, timeout: float = 230.0, **variables: str) -> Any:
    """The same of a program that must end with exit code 0."""
    done = output_of(*arguments, timeout=timeout, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _order(args: Any, env: Any, cwd: Any, session: bool, passed: Any) -> dict[str, Any] | None:
    """What the server is told, or None for a program that starts in the plain way."""
    global _server
    words = list(map(os.fspath, args))
    if words[0] != sys.executable:
        return None
    unbuffered = words[1] == "-u"
    del words[: 1 + unbuffered]
    if words[0] not in ("-m", "-c") and not words[0].endswith(".py"):
        return None
    environment = dict(os.environ if env is None else env)
    if _server is None:
        _server = _Server.new()
    elif _server.owner != os.getpid():
        return None
    if difference_from_server(environment):
        return None
    return {
        "words": words,
        "environment": environment,
        "folder": os.path.abspath(cwd or "."),
        "session": session,
        "unbuffered": unbuffered or bool(environment.get("PYTHONUNBUFFERED")),
        "passed": list(passed),
        "parent": os.getpid(),
    }


def difference_from_server(environment: Mapping[str, str]) -> str:
    """Why a program with this environment starts in the plain way: the first thing that its server has not alike, or ""."""
    if _server is None:
        return ""
    theirs = {**_server.inherited.environment, "TORCHINDUCTOR_CACHE_DIR": environment.get("TORCHINDUCTOR_CACHE_DIR")}
    read = {name for name in {*environment, *theirs} if _READ_AT_START.match(name)} - {"TORCH_CPP_LOG_LEVEL"}
    for name in sorted(read):
        if environment.get(name) != theirs.get(name):
            return f"{name} of the environment"
    now, place = inherited({}), {"working directory": ""}
    before = Inherited({}, {**_server.inherited.others, **place})
    return difference(before, Inherited({}, {**now.others, **place}), {})


# ---------------------------------------------------------------- the server's process


def serve_new(descriptor: int) -> None:
    """The main program of the server of a process of tests."""
    from helixrt.job import forerunner_process

    control = socket.socket(fileno=descriptor)
    for module in _IMPORTED:
        importlib.import_module(module)
    if refused := forerunner_process._obstacle():
        raise RuntimeError(refused)
    _generators.extend(each for each in gc.get_objects() if issubclass(type(each), random.Random))
    gc.collect()
    gc.freeze()
    control.sendall(b"r")
    _serve(control, inherited(dict(os.environ)))


def _serve(control: socket.socket, has: Inherited) -> bool:
    """Fork programs until the client has closed the connection. True in a program that has ended, False in the server."""
    while True:
        said, files, _, _ = socket.recv_fds(control, 1, 64)
        if not said:
            return False
        if os.fork() == 0:
            if os.fork() != 0:
                os._exit(0)
            control.close()
            _become(files, has)
            return True
        os.wait()
        for descriptor in files:
            os.close(descriptor)


def _become(files: list[int], has: Inherited) -> None:
    """Be the program of the order in the second file, when the client has adopted this process; returns when it has ended."""
    from helixrt.job import forerunner_process

    answer, text, *given = files
    with open(text, encoding="utf-8") as file:
        order = json.load(file)
    above = [_above(each) for each in (answer, *given)]
    for each in (answer, *given):
        os.close(each)
    answer, *given = above
    for each, number in zip(given, [0, 1, 2, *order["passed"]], strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)
    if order["session"]:
        os.setsid()
    os.chdir(order["folder"])
    before = dict(os.environ)
    made = {name: value for name, value in before.items() if name not in has.environment}
    os.environ.clear()
    os.environ.update({**made, **order["environment"]})
    deadline = time.monotonic() + _ANSWER_S
    while os.getppid() != order["parent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    os.write(answer, str(os.getpid()).encode())
    if not os.read(answer, len(GO)):
        os._exit(1)
    os.close(answer)
    if _server_of_its_own(has):
        return
    forerunner_process._draw_anew(_generators)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=order["unbuffered"])  # type: ignore[union-attr]
    _run(order["words"], has)


def _above(descriptor: int) -> int:
    """A copy of a descriptor whose number no program asks for."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 200)


def _server_of_its_own(has: Inherited) -> bool:
    """Fork it. True in a program that it has forked, and that has ended."""
    global _server
    ours, theirs = socket.socketpair()
    if (server := os.fork()) == 0:
        ours.close()
        os.setsid()  # a signal to the program's group is not for it: it ends when its connection does
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # of the program, whose readers wait for the end of its output
            os.dup2(null, standard)
        if _serve(theirs, has):
            return True
        os._exit(0)
    theirs.close()
    _server = _Server(ours, server, has)
    subprocess.Popen = _OfProgram  # type: ignore[misc]
    return False


class _OfProgram(Popen):
    """What programs get as `subprocess.Popen`: other programs than those of `_IN_PROGRAMS` start in the plain way."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        words = [args] if isinstance(args, str | bytes) else list(map(str, args))
        named = [word for word in words[1:5] if _IN_PROGRAMS.match(word)]
        (super() if named and words[0] == sys.executable else super(Popen, self))._execute_child(args, *others)  # type: ignore[misc]


def _run(words: list[str], has: Inherited) -> None:
    """Run a script, or `-m` and a module, as this interpreter would."""
    for module in (__name__, "helixrt.job.forerunner_process", "helixrt.replica.orphan"):
        sys.modules.pop(module, None)
    had = {ROOT, *filter(None, has.environment.get("PYTHONPATH", "").split(os.pathsep))}
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *(p for p in sys.path if p and p not in had)]
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-m":
        sys.path[:] = [os.getcwd(), *paths]
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if words[0] == "-c":
        sys.path[:] = ["", *paths]
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
        return
    sys.path[:] = [os.path.dirname(os.path.realpath(words[0])), *paths]
    sys.argv = words
    main.__dict__.update({"__file__": words[0], "__loader__": SourceFileLoader("__main__", words[0]), "__cached__": None})
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
