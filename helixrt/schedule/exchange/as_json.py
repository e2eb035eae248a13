"""A replayed schedule as JSON, such an order read back, and the text and the hash by which an order is stored.

Out: one object with the keys of `report`. `order` has per stage a list of labels as `Schedule.label` writes
them: `F0`, `B3`, `W3`, `BW3`, `F4.1` for the stage's second chunk, `F4+B2` for an overlapped pair. In: such an
object, of which `order` and `placement` are read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from helixrt.errors import ConfigError
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule, operations_of
from helixrt.schedule.timeline import Timeline

_LABEL = re.compile(r"(F|BW|B|W)([0-9]{1,9})(?:\.([0-9]{1,9}))?")


def gap(makespan_ms: float, lower_bound_ms: float) -> float:
    """How far above the bound: 0 is proven best, 0.01 at most one percent longer than the best."""
    return makespan_ms / lower_bound_ms - 1.0 if lower_bound_ms > 0 else 0.0


def report(timeline: Timeline, lower_bound_ms: float, solve_ms: float, policy: str) -> dict[str, Any]:
    """The figures of a replay under its own costs: times in ms, `bubble_rate` 0 to 1, lists per stage.

    `lower_bound_ms` is of the costs of the timeline; `solve_ms` is the time it took to make the order.
    """
    schedule = timeline.schedule
    return {
        "policy": policy,
        "makespan_ms": timeline.makespan_ms,
        "lower_bound_ms": lower_bound_ms,
        "gap": gap(timeline.makespan_ms, lower_bound_ms),
        "bubble_rate": timeline.bubble_rate,
        "warmup": list(schedule.warmup()),
        "peak_memory": list(timeline.peak_memory),
        "solve_ms": solve_ms,
        "placement": list(schedule.placement),
        "order": [[schedule.label(entry) for entry in entries] for entries in schedule.entries],
    }


def write(timeline: Timeline, lower_bound_ms: float, solve_ms: float, policy: str) -> str:
    """`report` as text: one line per key and per stage, so that orders can be compared by eye."""
    pairs = []
    for key, value in report(timeline, lower_bound_ms, solve_ms, policy).items():
        text = json.dumps(value)
        if key == "order":
            text = "[\n" + ",\n".join(f"    {json.dumps(line)}" for line in value) + "\n  ]"
        pairs.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(pairs) + "\n}\n"


def order_text(schedule: Schedule) -> str:
    """The order and the placement alone, without the name, as one line that `read` takes: equal orders have equal texts."""
    order = [[schedule.label(entry) for entry in entries] for entries in schedule.entries]
    return json.dumps({"placement": list(schedule.placement), "order": order}, separators=(",", ":"))


def order_key(schedule: Schedule) -> str:
    """Names the order: a hash of `order_text`."""
    return key_of(order_text(schedule))


def key_of(text: str) -> str:
    """The key of the order with this `order_text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(text: str, name: str) -> Schedule:
    """The schedule whose `order` and `placement` stand in `text`, called `name` (also in messages).

    Raises ConfigError for what is not such JSON and for labels that name no operation of the stage, with stage and
    entry numbers from 0. Its order is as it stands: prove it with `check`.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(name, "''", f"is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("order"), list) or not found["order"]:
        raise ConfigError(name, "''", 'needs "order": one list of labels per stage')
    order = found["order"]
    placement = found.get("placement", list(range(len(order))))
    if not isinstance(placement, list) or not all(isinstance(s, int) and 0 <= s < len(order) for s in placement):
        raise ConfigError(f"{name} placement", placement, f"must be the stage of every chunk, each below {len(order)}")
    held: list[list[int]] = [[] for _ in order]
    for chunk, stage in enumerate(placement):
        held[stage].append(chunk)
    entries = []
    seen: set[int] = set()
    for stage, labels in enumerate(order):
        if not isinstance(labels, list):
            raise ConfigError(f"{name} order[{stage}]", labels, "must be a list of labels such as F0, B3, W3 or F4+B2")
        line = [_entry(label, held[stage], f"{name} order[{stage}][{at}]") for at, label in enumerate(labels)]
        seen.update(o.microbatch for entry in line for o in operations_of(entry))
        entries.append(tuple(line))
    microbatches = max(seen, default=-1) + 1
    if len(seen) < max(microbatches, 1):
        absent = next(m for m in range(microbatches + 1) if m not in seen)
        raise ConfigError(name, f"{microbatches} micro-batches", f"no entry is of micro-batch {absent}")
    return Schedule(name, len(order), microbatches, tuple(placement), tuple(entries))


def _entry(label: object, held: Sequence[int], where: str) -> Entry:
    found = [_LABEL.fullmatch(part) for part in label.split("+")] if isinstance(label, str) else []
    operations = []
    for match in found:
        nth = int(match[3] or 0) if match else 0
        if match is None or nth >= len(held):
            break
        operations.append(Operation(Op(match[1]), held[nth], int(match[2])))
    if len(operations) == len(found) == 1:
        return operations[0]
    if len(operations) == len(found) == 2 and operations[0].op is Op.F and operations[1].op in (Op.B, Op.BW):
        return Pair(*operations)
    raise ConfigError(where, label, f"must be such as F0, B3, W3, BW3, F4+B2, with .k for chunk k below {len(held)}")
