"""The main job with a link that is slowed down, over every kind of channel between stages: equal numbers, later messages."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from helixrt.record import Kind, read_events
from tests.train.jobs import losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
]
STEPS, FIRST, END, DELAY_MS = 8, 4, 6, 400
LINK = f"chaos.link=[{{from: 0, to: 1, delay_ms: {DELAY_MS}, steps: [{FIRST}, {END}]}}]"
ALONE = ("mesh.replicas=1", "mesh.pp=2", f"steps={STEPS}", "checkpoint.every=0")


def transit_s(folder: Path, label: str) -> dict[int, list[float]]:
    """By the sender's step of what `label` got: how long each message took, on this one host."""
    found: dict[int, list[float]] = defaultdict(list)
    for event in read_events(folder / "flight" / f"{label}.inc0.detail.jsonl"):
        if event.kind is Kind.RECV and event.detail["tag"].endswith((".F", ".B")):
            found[event.step].append(event.detail["arrived_s"] - event.detail["sent_s"])
    return found


def test_a_slow_link_and_every_kind_of_channel_give_the_same_numbers(make_job: Any) -> None:
    ways = {
        "gloo": ("pipeline.channels=gloo",),
        "delegated": (LINK,),
        "direct": (LINK, "pipeline.direct=2", "pipeline.queues=1"),
        "zero-bubble": (LINK, "schedule.name=zb", "schedule.graphs=never"),
    }
    found: dict[str, dict[int, float]] = {}
    for name, settings in ways.items():
        run = make_job(*ALONE, *settings)
        ended = run.run()
        assert ended.code == 0, ended.err
        found[name] = losses(run.root)
        if LINK in settings:
            towards, back = transit_s(run.folder, "r0.pp1"), transit_s(run.folder, "r0.pp0")
            slow = [s for step in range(FIRST, END) for s in towards[step]]
            other = [min(per) for times in (towards, back) for step, per in times.items() if step not in range(FIRST, END)]
            assert slow and min(slow) >= DELAY_MS / 1e3, name
            assert min(other) < DELAY_MS / 1e3, name  # no limit to what a busy machine adds to one of them
    assert len(found["gloo"]) == STEPS
    assert all(values == found["gloo"] for values in found.values())
