"""The driver's console: it is written in order, no line is lost in ordinary use, and a console that stalls blocks no caller."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from helixrt.job.console import Console
from helixrt.job.metrics import StepMetrics, read_metrics
from helixrt.job.output import RunOutput

LIMIT_S = 120.0
LEFT_OUT = re.compile(r"\((\d+) lines are left out here: the console took nothing\)")


class Pipe:
    """A console whose reader reads when the test says so."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        self.stream: TextIO = open(write, "w", encoding="utf-8")  # noqa: SIM115
        self.text = b""
        self._reader = threading.Thread(target=self._take, daemon=True)

    def read(self) -> None:
        self._reader.start()

    def _take(self) -> None:
        while part := os.read(self._read, 1 << 16):
            self.text += part

    def lines(self) -> list[str]:
        """All that was written, at the end."""
        self.stream.close()
        self._reader.join(LIMIT_S)
        assert not self._reader.is_alive()
        return self.text.decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    if made._reader.ident is None:
        made.read()
    made.lines()
    os.close(made._read)


def in_time(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return not thread.is_alive()


def test_all_lines_are_written_in_their_order_behind_what_others_have_printed(pipe: Pipe) -> None:
    print("before", file=pipe.stream)
    pipe.read()
    console = Console(pipe.stream, capacity=10_000)
    for number in range(5_000):
        console.write(f"{number}\n")
    console.close(LIMIT_S)
    console.close()
    console.write("behind the end\n")
    assert pipe.lines() == ["before", *map(str, range(5_000)), "behind the end"]


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with open(tmp_path / "shown", "w", encoding="ascii") as file, io.TextIOWrapper(raw, encoding="ascii") as notebook:
        for stream in (file, notebook):
            console = Console(stream)
            console.write("Verlust \u00e4 0.5\n")
            console.close(LIMIT_S)
        assert (tmp_path / "shown").read_bytes() == raw.getvalue() == b"Verlust \\xe4 0.5\n"


def test_a_console_that_takes_nothing_again_has_the_newest_lines_and_says_how_many_are_missing(pipe: Pipe) -> None:
    console = Console(pipe.stream, capacity=50)

    def say() -> None:
        for number in range(3_000):
            console.write(f"line {number}\n")
        console.close(0.1)

    assert in_time(say), "the writer waits for the console"
    pipe.read()
    assert console.flush(LIMIT_S)
    console.close(LIMIT_S)
    lines = pipe.lines()
    told, number = 0, 0
    for line in lines:
        missing = LEFT_OUT.fullmatch(line)
        if missing is None:
            assert line == f"line {number}"
        told += missing is not None
        number += 1 if missing is None else int(missing[1])
    assert number == 3_000 and told and lines[-50:] == [f"line {number}" for number in range(2_950, 3_000)]


def test_a_process_whose_console_takes_nothing_ends_with_its_own_exit_code() -> None:
    script = (
        "import sys; from helixrt.job.console import Console\n"
        "out, err = Console(sys.stdout), Console(sys.stderr)\n"
        "for number in range(40_000): out.write(f'line {number}\\n'); err.write(f'line {number}\\n')\n"
        "out.close(0.1); err.close(0.1); sys.exit(7)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(LIMIT_S) == 7
        finally:
            process.kill()


def test_a_driver_does_not_wait_for_a_stalled_console(pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helixrt.job.console.FLUSH_S", 0.1)
    first = StepMetrics(0, "r0", 1, 1.0, 8, 0.1, 1, 0.0, 0.5, 1e-3, 7)
    output = RunOutput(tmp_path, 1, pipe.stream)

    def drive() -> None:
        for step in range(1, 301):
            output.step(dataclasses.replace(first, step=step))
        output.close()

    assert in_time(drive), "the driver waits for the console"
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 300
    pipe.read()
    assert output._console.flush(LIMIT_S)
    steps = [int(line.split()[2]) for line in pipe.lines()]
    assert steps == list(range(1, 301)), "all lines had room"
