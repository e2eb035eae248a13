"""The process behind a `forerunner.Forerunner`: imports what ranks need, then forks a rank for each order.

In: the descriptor of a connection to the driver, and the module that ranks run. It says a line: `made`, variables that the
imports have set, or `refused`, why it cannot fork. An order is a byte with four files: what to run, the rank's standard input,
its log, and a socket for the answer. Out: "pid N" from the rank, when it is the driver's child, or "errno N", or "refused WHY".
The rank runs its program when it is told to go.

A fork has the memory of one thread alone, so there is one:

- The imports start none in Python. OpenBLAS, which NumPy brings, starts its pool when it is loaded, OMP_NUM_THREADS less one
  threads; it ends them before a fork and starts them again with its next product. So this process forks a child for nothing
  first, and computes nothing. OpenMP's pool (torch's) starts with the first parallel region.
- A thread that was joined stays in the kernel's list for a moment, which is long on a busy machine. So threads of which Python
  does not know have a moment to end.
- No driver of a GPU may be in use, since a fork cannot use it any more: there is no open device of one.

What a process of its own would draw for itself, a rank draws anew (`_draw_anew`): the states of torch's, NumPy's and Python's
random generators (torch's too begins with a number from the system), and multiprocessing's key. Ranks have the seed of
`hash(str)` in common. The objects of the imports are left out of garbage collection, which would copy their pages.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

from helixrt.replica.adoption import GO
from helixrt.replica.orphan import PARENT_VARIABLE, command, die_with_parent, run_as_main
from helixrt.replica.telling import flush_all

_FIRST_OPTIMIZER = "torch._dynamo"  # which torch.optim imports when the first optimizer is made
_DEVICES = ("/dev/nvidia", "/dev/kfd")  # of CUDA and ROCm
_THREADS_END_S, _LAST_LOOK_S = 2.0, 0.1


@dataclass(frozen=True)
class _Order:
    arguments: list[str]  # a module, and what it is given
    environment: dict[str, str]
    driver: int  # its process id


def main(arguments: list[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    module, before = arguments[1], dict(os.environ)
    importlib.import_module(module)
    if "torch" in sys.modules:
        importlib.import_module(_FIRST_OPTIMIZER)
    made = {name: value for name, value in os.environ.items() if name not in before}
    generators = [each for each in gc.get_objects() if issubclass(type(each), random.Random)]
    gc.collect()
    gc.freeze()
    if (between := os.fork()) == 0:
        os._exit(0)
    os.waitpid(between, 0)
    refused = _obstacle()
    control.sendall(json.dumps({"made": made, "refused": refused}).encode() + b"\n")
    order = None if refused else _serve(control)
    if order is not None:  # this is a rank from now on
        os.environ.clear()
        os.environ.update({**made, **order.environment})
        del os.environ[PARENT_VARIABLE]  # as `orphan` does
        _draw_anew(generators)
        _forget(module)
        sys.orig_argv = command(*order.arguments)
        run_as_main(order.arguments)


def _obstacle() -> str:
    """Why a fork of this process is of no use, or ""."""
    deadline = time.monotonic() + _THREADS_END_S
    while (tasks := len(os.listdir("/proc/self/task"))) != 1 and threading.active_count() == 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    if tasks != 1 and threading.active_count() == 1:  # perhaps this process was stopped, and such a thread has not run since
        time.sleep(_LAST_LOOK_S)
        tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        return f"the imports have left {tasks} threads in the forerunner, of Python's: {names}"
    opened = [file for file in map(_target, os.listdir("/proc/self/fd")) if file.startswith(_DEVICES)]
    if opened or ("torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()):
        return f"the imports have initialized a GPU in the forerunner ({', '.join(opened) or 'torch.cuda'})"
    return ""


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the listing
        return ""


def _serve(control: socket.socket) -> _Order | None:
    """Fork ranks until the driver has closed the connection. In a rank: return its order."""
    while True:
        said, files, _, _ = socket.recv_fds(control, 1, 4)
        if not said:
            return None
        ordered, stdin, log, answer = files
        with open(ordered, encoding="utf-8") as file:
            order = _Order(**json.load(file))
        if refused := _obstacle():
            _say(answer, f"refused {refused}")
        else:
            flush_all()
            try:
                between = os.fork()
            except OSError as error:
                _say(answer, f"errno {error.errno}")
            else:
                if between == 0:
                    _fork_again(answer)
                    control.close()
                    _become_rank(order, stdin, log, answer)
                    return order
                os.waitpid(between, 0)
        for descriptor in (stdin, log, answer):
            os.close(descriptor)


def _fork_again(answer: int) -> None:
    """Returns in the new process, whose parent ends here."""
    try:
        if os.fork() == 0:
            return
    except OSError as error:
        _say(answer, f"errno {error.errno}")
    os._exit(0)


def _become_rank(order: _Order, stdin: int, log: int, answer: int) -> None:
    """A session of its own, with its files, whose parent is the driver. Ends the process if the driver has not got it.

    Returns when the driver adopts nobody any more: children of this rank that outlive it are not the driver's."""
    os.setsid()
    for ours, standard in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(ours, standard)
    between = os.getppid()
    while os.getppid() == between != order.driver:  # it ends now
        time.sleep(0.0005)
    die_with_parent(order.driver)
    _say(answer, f"pid {os.getpid()}")
    try:
        told = os.read(answer, len(GO))
    except ConnectionError:
        told = b""
    if not told:  # the driver has given this order up
        os._exit(1)
    for descriptor in (stdin, log, answer):
        os.close(descriptor)


def _say(answer: int, text: str) -> None:
    try:
        os.write(answer, text.encode() + b"\n")
    except ConnectionError:  # the driver has given this order up
        os._exit(1)


def _draw_anew(generators: list[random.Random]) -> None:
    """What a process of its own would have drawn at its start."""
    for generator in generators:
        generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None  # it follows TMPDIR
    importlib.invalidate_caches()


def _forget(module: str) -> None:
    """It is run as the main program, and a process of its own would not have imported it before."""
    del sys.modules[module]
    package, _, name = module.rpartition(".")
    if package:
        delattr(sys.modules[package], name)


if __name__ == "__main__":
    main(sys.argv[1:])
