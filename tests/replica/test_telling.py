"""Messages that cannot be printed are lost, and cost nothing else."""

from __future__ import annotations

import io

import pytest

from helixrt.replica.telling import tell


def test_a_stream_that_takes_nothing_and_one_that_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    tell("lost", full)
    tell("lost, too", full)
    with pytest.raises(OSError):
        full.close()
    closed = io.StringIO()
    closed.close()
    tell("lost", closed)
    tell("said")
    assert capsys.readouterr().err == "said\n"
