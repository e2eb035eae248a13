"""`helixrt bench session`: both sides train alike and figures are written."""

from __future__ import annotations

import json
import math
import random
import threading
from pathlib import Path

import pytest

from helixrt.bench import session
from helixrt.bench._session_rank import BlockClock, CallCounter, RankFigures, Settings, Side
from helixrt.train.config import ModelConfig
from tests.bench.running import run_bench


@pytest.mark.slow
def test_a_short_run_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", "1", "--dim", "16", "--batch", "2", "--seq-len", "8", "--rounds", "2", "--block", "3"]
    assert run_bench(session, *small, "--tiny-block", "6", "--json", str(tmp_path / "figures.json")) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    ratio, latency, calls = written["figures"]["ratio"], written["last_bucket_to_update_ms"], written["calls_per_step"]
    assert 0 < ratio["p20"] <= ratio["p50"] <= ratio["p80"] and 0 < latency["p50"] <= latency["p99"]
    assert calls["MainThread"] > 100 and written["figures"]["one_replica_cpu_ms"]["p50"] > 0
    assert "one_replica_cost_ms" in capsys.readouterr().out


def test_a_block_is_counted_without_its_first_step_and_the_first_block_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    clock, now = BlockClock(side, block=4), [0]
    monkeypatch.setattr(BlockClock, "_now", staticmethod(lambda: (float(now[0]), 2.0 * now[0], 3 * now[0])))
    for seconds in [9, 9, 9, 9, 100, 1, 2, 3, 100, 4, 4, 4]:
        now[0] += seconds
        clock.step()
    assert side.seconds == [2.0, 4.0] and side.cpu_seconds == [4.0, 8.0] and side.switches == [6.0, 12.0]


def test_the_last_replica_decides_when_a_span_begins_and_when_it_ends(seed: int) -> None:
    rng = random.Random(seed)
    spans = [[(handed := rng.random(), handed + 1 + rng.random()) for _ in range(200)] for _ in range(3)]
    found = session.bucket_to_update_ms([RankFigures(spans=mine) for mine in spans])
    expected = sorted(1e3 * (max(s[i][1] for s in spans) - max(s[i][0] for s in spans)) for i in range(200))
    assert math.isclose(found["p50"], (expected[99] + expected[100]) / 2) and found["p99"] == expected[197]


def test_calls_are_counted_by_thread() -> None:
    counter = CallCounter()

    def called() -> None:
        pass

    def work() -> None:
        for _ in range(50):
            called()

    thread = threading.Thread(target=work, name="worker")
    try:
        thread.start()
        thread.join()
        called()
    finally:
        counter.close()
    counts = counter.take()
    assert 51 <= counts["worker"] < 100 and counts[threading.current_thread().name] >= 1
    called()
    assert not counter.take()


def test_figures_and_settings_survive_the_way_to_the_ranks_and_back(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path), 3, 5, ModelConfig("gpt", 2, 32), store="127.0.0.1:5", calls=True)
    assert Settings.from_text(settings.to_text()) == settings
    figures = RankFigures(Side([1.0], [2.0], [3.0], 0.5), Side(), [(1.0, 2.0)], {"MainThread": 3.0})
    figures.write(settings, 1)
    assert RankFigures.read(settings, 1) == figures
