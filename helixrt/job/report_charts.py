"""The charts of the report page, as inline SVG. Pure text: numbers in, markup out.

Colours and fonts are CSS variables of the page, so that light and dark both work. `data-tip` on an
element is what the page shows while the pointer is over it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape

from helixrt.job.metrics import StepMetrics, ValidationMetrics
from helixrt.observe.failures import Failure
from helixrt.observe.timeline import COMPUTE, Bar, Message, Timeline
from helixrt.protocol.step.lineage import CommitRecord

WIDTH = 1040
_LEFT, _RIGHT = 64, 20
_LANE, _COMPUTE_TOP, _COMPUTE_HEIGHT = 62, 10, 22  # of a timeline, in pixels
_BELOW = {"exchange": 35, "awaited": 42, "fetch": 42, "snapshot": 42, "quorum": 49}  # bars under the computation


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from `low` to `high`."""
    span = max(high - low, 1e-12)
    unit = 10 ** math.floor(math.log10(span / about))
    step = next(unit * m for m in (1, 2, 5, 10) if span / (unit * m) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class _Axis:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        return self._begin + (value - self.low) / (self.high - self.low) * (self._end - self._begin)


def replica_colour(replica: int) -> str:
    return f"var(--r{replica % 6})"


def loss_chart(
    steps: Sequence[StepMetrics], validations: Sequence[ValidationMetrics], order0: float | None, failures: Sequence[Failure]
) -> str:
    """Training loss of every replica, validation loss, the order-0 entropy, and where replicas were lost. Losses that are not
    finite are left out."""
    validations = [v for v in validations if math.isfinite(v.bits_per_byte)]
    losses = [m.bits_per_byte for m in steps if _shown(m)] + [v.bits_per_byte for v in validations]
    if not losses:
        return _nothing("no step was recorded")
    height, top, bottom = 360, 28, 320
    last = max([m.step for m in steps] + [v.step for v in validations])
    x = _Axis(0, last, _LEFT, WIDTH - _RIGHT)
    shown = [loss for loss in (*losses, order0) if loss is not None]
    low, high = min(shown), max(shown)
    y = _Axis(max(0.0, low - 0.08 * (high - low)), high + 0.06 * (high - low), bottom, top)
    parts = [_grid_y(y, "bits per byte"), _grid_x(x, bottom, "step")]
    if order0 is not None:
        parts.append(f'<line class="order0" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(order0):.1f}" y2="{y(order0):.1f}"/>')
        label = f"order-0 entropy of the corpus: {order0:.3f}"
        parts.append(f'<text class="note" x="{WIDTH - _RIGHT}" y="{y(order0) - 6:.1f}" text-anchor="end">{label}</text>')
    for failure in failures:
        at = f"{x(failure.step):.1f}"
        parts.append(f'<line class="kill" x1="{at}" x2="{at}" y1="{top}" y2="{bottom}"/>')
        near_end = failure.step > 0.75 * last
        shift, anchor = (-6, "end") if near_end else (6, "start")
        text = f"replica {failure.replica} lost in step {failure.step}"
        parts.append(f'<text class="kill-text" x="{float(at) + shift}" y="{top + 10}" text-anchor="{anchor}">{text}</text>')
    by_replica: dict[int, list[StepMetrics]] = defaultdict(list)
    for m in steps:
        by_replica[m.replica].append(m)
    for replica, mine in sorted(by_replica.items()):
        parts.append(_lines(mine, x, y, replica))
    if validations:
        points = " ".join(f"{x(v.step):.1f},{y(v.bits_per_byte):.1f}" for v in validations)
        parts.append(f'<polyline class="validation" points="{points}"/>')
        for v in validations:
            parts.append(f'<circle class="validation-dot" cx="{x(v.step):.1f}" cy="{y(v.bits_per_byte):.1f}" r="4.5"/>')
        end = validations[-1]
        parts.append(
            f'<text class="value" x="{x(end.step) - 8:.1f}" y="{y(end.bits_per_byte) + 20:.1f}" text-anchor="end">'
            f"{end.bits_per_byte:.3f}</text>"
        )
    parts.append(_columns(steps, validations, x, top, bottom))
    return _svg(height, parts, "Loss over steps")


def _lines(mine: Sequence[StepMetrics], x: _Axis, y: _Axis, replica: int) -> str:
    """One replica's loss, broken where it was away, or the loss was not finite."""
    pieces: list[list[str]] = [[]]
    before = None
    for m in mine:
        if not _shown(m) or (before is not None and m.step != before + 1):
            pieces.append([])
        if m.bits_per_byte is not None and _shown(m):
            pieces[-1].append(f"{x(m.step):.1f},{y(m.bits_per_byte):.1f}")
        before = m.step
    colour = replica_colour(replica)
    return "".join(f'<polyline class="loss" style="stroke:{colour}" points="{" ".join(p)}"/>' for p in pieces if p)


def _shown(m: StepMetrics) -> bool:
    return m.bits_per_byte is not None and math.isfinite(m.bits_per_byte)


def _columns(
    steps: Sequence[StepMetrics], validations: Sequence[ValidationMetrics], x: _Axis, top: float, bottom: float
) -> str:
    """One invisible column per step that tells its figures."""
    told: dict[int, list[str]] = defaultdict(list)
    for m in steps:
        loss = "catching up" if m.bits_per_byte is None else f"{m.bits_per_byte:.3f} bits/byte"
        told[m.step].append(f"replica {m.replica}: {loss}, {m.tokens_per_s:,.0f} tokens/s, {m.participants} taking part")
    for v in validations:
        told[v.step].append(f"validation: {v.bits_per_byte:.3f} bits/byte{f' ({v.partial})' if v.partial else ''}")
    width = max(2.0, x(1) - x(0))
    return "".join(
        f'<g class="column"><rect x="{x(step) - width / 2:.1f}" y="{top}" width="{width:.1f}" height="{bottom - top}"'
        f' data-tip="{escape(chr(10).join([f"step {step}", *lines]))}"/></g>'
        for step, lines in sorted(told.items())
    )


def participants_chart(
    commits: Sequence[tuple[float, CommitRecord]],
    lives: Sequence[tuple[int, float]],
    failures: Sequence[Failure],
    replicas: int,
    begin_s: float,
) -> str:
    """Who was in each update, over the run's time: one row per replica."""
    if not commits:
        return _nothing("no update was recorded")
    row, top = 34, 12
    bottom = top + replicas * row
    x = _Axis(0, commits[-1][0] - begin_s, _LEFT + 40, WIDTH - _RIGHT)
    parts = [_grid_x(x, bottom, "seconds since the run began", top)]
    for replica in range(replicas):
        y = top + replica * row + 6
        parts.append(f'<text class="lane-name" x="{_LEFT + 28}" y="{y + 16}" text-anchor="end">replica {replica}</text>')
        parts.append(f'<rect class="idle" x="{x(0):.1f}" y="{y}" width="{x(x.high) - x(0):.1f}" height="22" rx="4"/>')
        parts += [
            _span(x, y, begin, end, kind, f"replica {replica}: {kind}\n{begin:.1f} s to {end:.1f} s{more}")
            for begin, end, kind, more in _presence(replica, commits, lives, failures, begin_s)
        ]
    for failure in failures:
        at = x(failure.lost_s - begin_s)
        y = top + failure.replica * row + 1
        parts.append(f'<line class="kill" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 32}"/>')
    return _svg(bottom + 40, parts, "Replicas that took part, over time")


def _presence(
    replica: int,
    commits: Sequence[tuple[float, CommitRecord]],
    lives: Sequence[tuple[int, float]],
    failures: Sequence[Failure],
    begin_s: float,
) -> list[tuple[float, float, str, str]]:
    """(begin, end, kind, more to tell) of a replica: training, catching up or lost; seconds since the run's begin."""
    spans: list[tuple[float, float, str, str]] = []
    before_s = commits[0][0]
    since: float | None = None
    first_step = 0
    for at_s, record in commits:
        inside = replica in record.replicas
        if inside and since is None:
            since, first_step = before_s, record.step
        if not inside and since is not None:
            spans.append((since, before_s, "training", f", steps {first_step} to {record.step - 1}"))
            since = None
        before_s = at_s
    if since is not None:
        spans.append((since, before_s, "training", f", steps {first_step} to {commits[-1][1].step}"))
    trained = [(b, e, "training", more) for b, e, _, more in spans]
    for failure in (f for f in failures if f.replica == replica):
        born = next((at_s for r, at_s in lives if r == replica and at_s > failure.lost_s), None)
        back = next((b for b, *_ in trained if b > failure.lost_s), None)
        end = commits[-1][0]
        trained.append((failure.lost_s, born or end, "lost", ""))
        if born is not None:
            trained.append((born, back or end, "coming back", ""))
    return [(b - begin_s, e - begin_s, kind, more) for b, e, kind, more in trained if e > b]


def _span(x: _Axis, y: float, begin: float, end: float, kind: str, tip: str) -> str:
    name = kind.replace(" ", "-")
    left, right = x(max(begin, x.low)), x(min(end, x.high))
    return (
        f'<rect class="{name}" x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="22" rx="4"'
        f' data-tip="{escape(tip)}"/>'
    )


def timeline_chart(shown: Timeline) -> str:
    """One lane per rank: what it computed above, what it awaited and exchanged below; messages as lines between lanes."""
    lane, top = _LANE, 10
    bottom = top + len(shown.lanes) * lane
    left = _LEFT + 16
    x = _Axis(0, shown.duration_s * 1e3, left, WIDTH - _RIGHT)
    parts = [_grid_x(x, bottom, "milliseconds", top)]
    for i, (name, bars) in enumerate((one.rank, one.bars) for one in shown.lanes):
        y = top + i * lane
        parts.append(f'<text class="lane-name" x="{left - 10}" y="{y + 23}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<line class="lane" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{y + lane - 3}" y2="{y + lane - 3}"/>')
        parts += [_bar(bar, x, y) for bar in sorted(bars, key=lambda b: b.what in COMPUTE)]
    lane_top = {one.rank: top + i * lane for i, one in enumerate(shown.lanes)}
    parts += [_message(m, x, lane_top[m.sender], lane_top[m.receiver]) for m in shown.messages]
    for one in shown.lanes:
        y = lane_top[one.rank]
        for mark in one.marks:
            at = x(min(max(mark.begin_s * 1e3, x.low), x.high))
            kind = "bad" if "fail" in mark.what else "good"
            parts.append(f'<path class="mark-{kind}" d="M{at:.1f} {y + 2} l5 -0 l-5 8 l-5 -8 z" data-tip="{_tip(mark)}"/>')
    return _svg(bottom + 40, parts, f"Timeline of step {shown.step}")


def _bar(bar: Bar, x: _Axis, y: float) -> str:
    begin, end = x(max(bar.begin_s * 1e3, x.low)), x(min(bar.end_s * 1e3, x.high))
    width = max(1.0, end - begin)
    compute = bar.what in COMPUTE
    top, height = (y + _COMPUTE_TOP, _COMPUTE_HEIGHT) if compute else (y + _BELOW[bar.what], 6)
    if bar.woven:  # both of a pair at once: the forward above the backward
        height = _COMPUTE_HEIGHT // 2
        top += height if bar.what != "F" else 0
    kind = f"op-{bar.what} other-step" if bar.other_step else f"op-{bar.what}"
    rect = (
        f'<rect class="{kind}" x="{begin:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="2" data-tip="{_tip(bar)}"/>'
    )
    if not compute or bar.other_step or width < 17:
        return rect
    name = f"{bar.what}{bar.label.split(', ')[0].split()[-1]}" if bar.what in "FBW" else bar.what
    if 7 * len(name) > width:
        return rect
    middle = f'x="{begin + width / 2:.1f}" y="{top + height / 2 + 4:g}" text-anchor="middle"'
    return rect + f'<text class="op-text" {middle}>{escape(name)}</text>'


def _message(message: Message, x: _Axis, sender: float, receiver: float) -> str:
    """From the edge of the sender's computation to the near edge of the receiver's."""
    begin, end = x(max(message.sent_s * 1e3, x.low)), x(min(message.taken_s * 1e3, x.high))
    down = receiver > sender
    y1 = sender + _COMPUTE_TOP + (_COMPUTE_HEIGHT if down else 0)
    y2 = receiver + _COMPUTE_TOP + (0 if down else _COMPUTE_HEIGHT)
    what = {"F": "activations", "B": "gradients"}[message.what]
    lines = (
        f"{what} of micro-batch {message.microbatch}, {message.nbytes:,} bytes",
        f"{message.sender} to {message.receiver}",
        f"sent at {message.sent_s * 1e3:.1f} ms, taken {(message.taken_s - message.sent_s) * 1e3:.1f} ms later",
    )
    tip = escape(chr(10).join(lines))
    ends = f'x1="{begin:.1f}" y1="{y1}" x2="{end:.1f}" y2="{y2}"'
    return (
        f'<g class="message-{message.what}" data-tip="{tip}"><line class="reach" {ends}/><line {ends}/>'
        f'<circle cx="{end:.1f}" cy="{y2}" r="2.4"/></g>'
    )


def _tip(bar: Bar) -> str:
    lines = bar.label.replace(", ", "\n")
    return escape(f"{lines}\n{bar.begin_s * 1e3:.1f} ms, for {(bar.end_s - bar.begin_s) * 1e3:.2f} ms")


def _grid_y(y: _Axis, title: str) -> str:
    parts = []
    for value in ticks(y.low, y.high):
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{float(at) + 4}" text-anchor="end">{value:g}</text>')
    middle = (y(y.low) + y(y.high)) / 2
    parts.append(f'<text class="axis" transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">{title}</text>')
    return "".join(parts)


def _grid_x(x: _Axis, bottom: float, title: str, top: float | None = None) -> str:
    parts = []
    for value in ticks(x.low, x.high, 10):
        at = f"{x(value):.1f}"
        if top is not None:
            parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{at}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    middle = (x(x.low) + x(x.high)) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{bottom + 34}" text-anchor="middle">{title}</text>')
    return "".join(parts)


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _nothing(why: str) -> str:
    return f'<p class="nothing">{escape(why)}</p>'
