"""A timeline as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

Out: JSON of the Trace Event Format (1 ms stays 1 ms there; its unit is the microsecond). One thread per stage
with its operations, idle times as their own category, arrows from an operation to the one that takes its output,
one row per used direction of a link with the messages on their way, and one memory counter per stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from helixrt.schedule.ir import Op, Operation, operations_of, provides
from helixrt.schedule.timeline import Message, Span, Timeline

_STAGES, _LINKS = 0, 1  # process ids
# Perfetto hashes names into colours; chrome://tracing knows these by name.
_COLOURS = {Op.F: "thread_state_running", Op.B: "rail_animation", Op.W: "good", Op.BW: "bad"}


def write(timeline: Timeline) -> str:
    """The trace of a timeline as JSON text."""
    events = [*_names(timeline), *_spans(timeline), *_messages(timeline), *_memory(timeline)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _us(ms: float) -> float:
    return round(ms * 1000.0, 6)


def _ways(timeline: Timeline) -> dict[tuple[int, int], int]:
    return {way: at for at, way in enumerate(sorted({(m.source, m.target) for m in timeline.messages}))}


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    def name(kind: str, pid: int, tid: int, text: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}

    schedule = timeline.schedule
    yield name("process_name", _STAGES, 0, f"{schedule.name}: {schedule.stages} stages")
    for stage in range(schedule.stages):
        yield name("thread_name", _STAGES, stage, f"stage {stage}")
    if timeline.messages:
        yield name("process_name", _LINKS, 0, "links")
    for (source, target), tid in _ways(timeline).items():
        yield name("thread_name", _LINKS, tid, f"{source} > {target}")


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    schedule = timeline.schedule
    for stage, spans in enumerate(timeline.spans):
        for span in spans:
            operations = operations_of(span.entry)
            yield {
                "ph": "X",
                "name": schedule.label(span.entry),
                "cat": "+".join(o.op.value for o in operations),
                "cname": _COLOURS[operations[-1].op],
                "pid": _STAGES,
                "tid": stage,
                "ts": _us(span.start_ms),
                "dur": _us(span.end_ms - span.start_ms),
                "args": {"chunk": [o.chunk for o in operations], "microbatch": [o.microbatch for o in operations]},
            }
        for bubble in timeline.bubbles[stage]:
            yield {
                "ph": "X",
                "name": bubble.cause.value,
                "cat": "bubble",
                "cname": "grey",
                "pid": _STAGES,
                "tid": stage,
                "ts": _us(bubble.start_ms),
                "dur": _us(bubble.end_ms - bubble.start_ms),
                "args": {"waits": schedule.label(bubble.waiting) if bubble.waiting is not None else ""},
            }


def _messages(timeline: Timeline) -> Iterator[dict[str, Any]]:
    schedule, ways = timeline.schedule, _ways(timeline)
    made: dict[Operation, Span] = {}
    for spans in timeline.spans:
        for span in spans:
            made.update((result, span) for o in operations_of(span.entry) for result in provides(o))
    for at, message in enumerate(timeline.messages):
        way = (message.source, message.target)
        on_link = {"cat": "message", "name": schedule.label(message.operation), "id": at, "pid": _LINKS, "tid": ways[way]}
        queued = {"queued_ms": message.begin_ms - message.ready_ms}
        yield {"ph": "b", "ts": _us(message.begin_ms), "args": queued, **on_link}
        yield {"ph": "e", "ts": _us(message.arrive_ms), **on_link}
        taken = made.get(_taker(message))
        if taken is not None:
            arrow = {"cat": "arrow", "name": on_link["name"], "id": at, "pid": _STAGES}
            # An arrow hangs on the slice that encloses its end points: within the sender's, at the taker's begin.
            sender = made[provides(message.operation)[0]]
            yield {"ph": "s", "tid": message.source, "ts": _us((sender.start_ms + sender.end_ms) / 2), **arrow}
            yield {"ph": "f", "bp": "e", "tid": message.target, "ts": _us(taken.start_ms), **arrow}


def _taker(message: Message) -> Operation:
    """The result of the operation that takes the message in."""
    operation = message.operation
    if operation.op is Op.F:
        return Operation(Op.F, operation.chunk + 1, operation.microbatch)
    return Operation(Op.B, operation.chunk - 1, operation.microbatch)


def _memory(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for stage, steps in enumerate(timeline.memory):
        for at_ms, held in steps:
            yield {"ph": "C", "name": f"memory of stage {stage}", "pid": _STAGES, "ts": _us(at_ms), "args": {"held": held}}
