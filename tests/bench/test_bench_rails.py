"""`helixrt bench rails`: what it records of a lost rail and of slow paths, and that a machine says the same again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helixrt.bench.rails import acknowledged, check
from helixrt.cli import main
from helixrt.errors import Fatal
from helixrt.protocol.link.recording import Recording

RECORDED = Path(__file__).resolve().parents[2] / "notebooks" / "data"


def read(path: Path) -> Recording:
    return Recording.of(path.read_text().splitlines())


@pytest.mark.parametrize("name", ["rails-failover.jsonl", "rails-hop.jsonl"])
def test_the_committed_recordings_are_whole(name: str) -> None:
    recording = read(RECORDED / name)
    check(recording)
    assert acknowledged(recording)
    half = replace(recording, events=recording.events[: len(recording.events) // 2])
    with pytest.raises(Fatal, match="incomplete"):
        check(half)


@pytest.mark.parametrize("wrong", [["--rate-mbit", "0"], ["--trouble", "-1"]])
def test_settings_that_cannot_be(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rails", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.parametrize("cut", ["path", "device"])
def test_a_recording_can_be_made_again(cut: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rails", "--cut", cut, "--record", str(tmp_path)]) == 0
    failover, hop = (read(tmp_path / f"rails-{name}.jsonl") for name in ("failover", "hop"))
    assert failover.about["counters"]["failovers"] >= 1
    assert "RailLeft" in [kind for _, kind, *_ in failover.about["said"]]
    assert {rail for _, rail, _ in acknowledged(failover)} == {0, 1}
    assert {"PathProbed", "Hopped"} <= {kind for _, kind, *_ in hop.about["said"]}
    printed = capsys.readouterr().out
    assert "failover:" in printed and "hop:" in printed
