"""Throughput of a verbs link over time while a NIC goes down and comes back: Figure 7 of the SHIFT paper, in the lab.

In: the NIC pair to break. Out: the bytes that landed per sample by the default NIC and by its backup (JSON), and the picture
of it (PNG). One panel per end whose NIC goes down.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helixrt.bench._verbs_end import RECEIVER, Ends, Stream
from helixrt.errors import MissingExtra
from helixrt.lab.nics import NicPair
from helixrt.transport.verbs.queue_pair import Patience, Sizes

DOWN_S, UP_S, END_S, SAMPLE_S = 5.0, 10.0, 15.0, 0.25
BROKEN = {"the sender's NIC": "a", "the receiver's NIC": "b"}


def record(pair: NicPair, devices: Sequence[Sequence[str]], sizes: Sizes, patience: Patience) -> dict[str, Any]:
    """Stream, break, mend, stream. `devices` of either end, the default first: that of `pair`."""
    panels = {}
    ends = Ends()
    try:
        for name, end in BROKEN.items():
            pair.heal()
            ends.open(devices, sizes, patience)
            try:
                panels[name] = _stream(ends, devices, lambda end=end: pair.down(end), pair.heal)  # type: ignore[misc]
            finally:
                pair.heal()
            ends.shut()
    finally:
        ends.close()
    return {"sample_s": SAMPLE_S, "chunk_bytes": sizes.chunk_bytes, "panels": panels}


def _stream(ends: Ends, devices: Sequence[Sequence[str]], down: Callable[[], float], up: Callable[[], float]) -> dict[str, Any]:
    ends.ask(Stream())
    time.sleep(1.0)
    ends.ask("clear")
    begin = time.monotonic()
    _sleep_until(begin + DOWN_S)
    went_down = down()
    _sleep_until(begin + UP_S)
    went_up = up()
    _sleep_until(begin + END_S)
    reports = ends.reports()
    samples = [[0] * round(END_S / SAMPLE_S) for _ in devices[RECEIVER]]
    for when, device, length in reports[RECEIVER].seen.chunks:
        at = int((when - begin) / SAMPLE_S)
        if 0 <= at < len(samples[0]):
            samples[devices[RECEIVER].index(device)][at] += length
    rates = [[round(each / SAMPLE_S / 1e6, 2) for each in one] for one in samples]
    back = max(report.turns[-1][0] for report in reports if report.turns)
    return {
        "down_s": round(went_down - begin, 4),
        "up_s": round(went_up - begin, 4),
        "back_s": round(back - begin, 4),
        "MB_s": dict(zip(devices[RECEIVER], rates, strict=True)),
    }


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


def write(recorded: dict[str, Any], picture: Path) -> None:
    """The picture, and the data beside it."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    data = picture.with_suffix(".json")
    data.write_text(json.dumps(recorded) + "\n")
    draw(recorded, picture)
    print(f"  drawn to {picture}, from {data}")


def draw(recorded: dict[str, Any], picture: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "train", "--picture") from error

    figure = Figure(figsize=(10, 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = recorded["panels"]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        for (device, rates), label, colour in zip(
            panel["MB_s"].items(), ("default NIC", "backup NIC"), ("tab:blue", "tab:orange"), strict=False
        ):
            at = [recorded["sample_s"] * (number + 0.5) for number in range(len(rates))]
            axis.plot(at, rates, label=f"{label} ({device})", color=colour, linewidth=1.4)
        for key, word, colour in (("down_s", "down", "tab:red"), ("up_s", "up", "tab:green")):
            axis.axvline(panel[key], color=colour, linestyle="--", linewidth=1)
            axis.annotate(
                word, (panel[key], 1.0), xycoords=("data", "axes fraction"), xytext=(3, -11), textcoords="offset points",
                color=colour, fontsize=9,
            )  # fmt: skip
        axis.set_title(f"{name} goes down and comes back", fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_xlim(0, recorded["sample_s"] * len(rates))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(loc=(0.01, 0.12), fontsize=8)
    axes[0].set_ylabel("MB/s received")
    figure.savefig(picture)
