"""A timeline as a picture for a terminal.

Out: a heading with the figures, one line per stage and an axis in ms. With colour, operations are painted in the
colours of the SVG and carry micro-batch numbers; without, they are letters (lower case for a stage's further
chunks) with numbers where they fit. Every column shows what its middle is in, so nothing is stretched.
"""

from __future__ import annotations

import math

from helixrt.schedule.exchange.as_json import gap
from helixrt.schedule.exchange.svg import FILLS, NAMES, number, tick_step
from helixrt.schedule.ir import Op, Operation, operations_of
from helixrt.schedule.timeline import Cause, Span, Timeline

# Without colour a bubble is a character, with colour a shade of grey with that character.
_IDLE = {Cause.WARM_UP: " ", Cause.DEPENDENCY: ".", Cause.BLOCKING: "!", Cause.COOL_DOWN: " "}
_RESET = "\x1b[0m"


def write(
    timeline: Timeline,
    lower_bound_ms: float | None = None,
    solve_ms: float | None = None,
    width: int = 100,
    color: bool = False,
) -> str:
    """The picture, at most `width` columns wide (never below 40), with ANSI colours when `color` is set."""
    width = max(width, 40)
    peaks = [f" {number(peak)}" for peak in timeline.peak_memory]
    left, right = len(str(timeline.schedule.stages - 1)) + 1, max(map(len, [*peaks, " mem"]))
    columns = max(width - left - right, 10)
    lines = _heading(timeline, lower_bound_ms, solve_ms, width, color)
    lines.append(" " * (left + columns) + " mem".rjust(right))
    for stage, peak in enumerate(peaks):
        body = _row(timeline, stage, columns, color)
        lines.append(f"{stage:>{left - 1}} {body}{peak:>{right}}")
    lines += axis(timeline.makespan_ms, left, columns)
    lines.append(_idle_sums(timeline))
    return "\n".join(lines) + "\n"


def _heading(timeline: Timeline, lower_bound_ms: float | None, solve_ms: float | None, width: int, color: bool) -> list[str]:
    schedule = timeline.schedule
    facts = [f"makespan {number(timeline.makespan_ms)} ms"]
    if lower_bound_ms is not None:
        over = gap(timeline.makespan_ms, lower_bound_ms)
        facts.append(f"proven bound {number(lower_bound_ms)} ms (gap {over:.2%})")
    facts.append(f"idle {timeline.bubble_rate:.1%}")
    if solve_ms is not None:
        facts.append(f"planned in {solve_ms:.1f} ms")
    title = f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches"
    lines = [f"\x1b[1m{title}{_RESET}" if color else title, *_wrapped(facts, width)]
    used = {o.op for stage in range(schedule.stages) for o in schedule.operations(stage)}
    names = []
    for op in Op:
        if op in used:
            names.append(f"{_paint(f' {op.value} ', op, 0.0) if color else _letter(op, 0)} {NAMES[op]}")
    if not color and schedule.chunks > schedule.stages:
        names.append("small letters: further chunks")
    causes = {bubble.cause for bubbles in timeline.bubbles for bubble in bubbles}
    names += [f"{_IDLE[c]} {c.value}" for c in (Cause.DEPENDENCY, Cause.BLOCKING) if c in causes]
    return lines + ["  ".join(names)] if color else lines + _wrapped(names, width)


def _wrapped(parts: list[str], width: int) -> list[str]:
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) > width:
            lines.append(part)
        else:
            lines[-1] += f"   {part}"
    return lines


def _row(timeline: Timeline, stage: int, columns: int, color: bool) -> str:
    """One stage: every column by its middle; runs of columns of one span or bubble become one piece."""
    per_column = timeline.makespan_ms / columns
    spans, bubbles = timeline.spans[stage], timeline.bubbles[stage]
    pieces: list[str] = []
    at_span = at_bubble = column = 0
    while column < columns:
        middle = (column + 0.5) * per_column
        while at_span < len(spans) and spans[at_span].end_ms <= middle:
            at_span += 1
        while at_bubble < len(bubbles) and bubbles[at_bubble].end_ms <= middle:
            at_bubble += 1
        span = spans[at_span] if at_span < len(spans) and spans[at_span].start_ms <= middle else None
        bubble = bubbles[at_bubble] if at_bubble < len(bubbles) and bubbles[at_bubble].start_ms <= middle else None
        end_ms = span.end_ms if span else bubble.end_ms if bubble else middle + per_column
        run = 1
        while column + run < columns and (column + run + 0.5) * per_column < end_ms:
            run += 1
        if span:
            pieces.append(_busy(timeline, stage, span, run, color))
        else:
            shown = (_IDLE[bubble.cause] if bubble else " ") * run
            pieces.append(f"\x1b[90m{shown}{_RESET}" if color and shown.strip() else shown)
        column += run
    return "".join(pieces)


def _busy(timeline: Timeline, stage: int, span: Span, run: int, color: bool) -> str:
    held = timeline.schedule.held[stage]
    operations = operations_of(span.entry)
    if not color:
        letters = [_letter(o.op, held.index(o.chunk)) for o in operations]
        label = "".join(f"{letter}{o.microbatch}" for letter, o in zip(letters, operations, strict=True))
        return (label if len(label) <= run else "".join(letters)).ljust(run)[:run]
    shares = [run] if len(operations) == 1 else [(run + 1) // 2, run // 2]
    return "".join(
        _paint(_centred(str(o.microbatch), share), o.op, _paler(o, held))
        for o, share in zip(operations, shares, strict=True)
        if share
    )


def _letter(op: Op, nth: int) -> str:
    """One character per operation: X for a whole backward; small for a stage's further chunks."""
    letter = "X" if op is Op.BW else op.value
    return letter.lower() if nth else letter


def _centred(text: str, width: int) -> str:
    return text.center(width) if len(text) <= width else " " * width


def _paler(operation: Operation, held: tuple[int, ...]) -> float:
    return 0.5 * held.index(operation.chunk) / (len(held) - 1) if len(held) > 1 else 0.0


def _paint(text: str, op: Op, paler: float) -> str:
    """Dark text on the operation's colour."""
    red, green, blue = (round(value + (255 - value) * paler) for value in FILLS[op])
    return f"\x1b[38;2;27;36;48;48;2;{red};{green};{blue}m{text}{_RESET}"


def axis(length: float, left: int, columns: int, unit: str = " ms") -> list[str]:
    """Two lines, marks and figures, of an axis from 0 to `length` over `columns` columns that begin at column `left`."""
    step = tick_step(length, max(columns // 8, 1))
    marks, labels = [" "] * (left + columns + 12), [" "] * (left + columns + 12)
    for tick in range(math.floor(length / step + 1e-9) + 1 if length else 1):
        at = left + min(round(tick * step / (length or 1.0) * columns), columns)
        text = number(tick * step) + (unit if tick == 0 else "")
        marks[at] = "|"
        labels[at : at + len(text)] = text
    return ["".join(marks).rstrip(), "".join(labels).rstrip()]


def _idle_sums(timeline: Timeline) -> str:
    sums = [f"{cause.value} {number(ms)}" for cause, ms in timeline.bubble_ms().items() if ms > 0]
    return "idle ms of all stages: " + (", ".join(sums) if sums else "none")
