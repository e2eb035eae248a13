"""The CSV of torch.distributed.pipelining (format "compute_only"), both ways.

In and out: one line per stage (torch's rank), one cell per entry: chunk (torch's stage index), operation, micro-batch.
`0F1` is a forward, `0I1` the backward for inputs (our B), `0W1` the one for weights, `0B1` the whole backward (our
BW), and `(0F1;3B0)OVERLAP_F_B` a forward and a backward that overlap. Empty cells are idle slots of torch's grid: an
order needs none. What torch's `_dump_csv(..., format="compute_only")` writes is read, and `_load_csv` reads
what is written here; the placement is not in the file, and follows from the line on which each chunk stands.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from helixrt.errors import ConfigError
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule, operations_of

_LETTERS = {Op.F: "F", Op.B: "I", Op.W: "W", Op.BW: "B"}
_OPS = {letter: op for op, letter in _LETTERS.items()}
_OPERATION = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"[0-9]+(SEND|RECV|UNSHARD|RESHARD|REDUCE)")


def write(schedule: Schedule) -> str:
    """The schedule as torch's compute-only CSV, lines ended by a newline. Loses the schedule's name."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cell(e) for e in entries] for entries in schedule.entries)
    return out.getvalue()


def _cell(entry: Entry) -> str:
    if isinstance(entry, Pair):
        return f"({_cell(entry.forward)};{_cell(entry.backward)})OVERLAP_F_B"
    return f"{entry.chunk}{_LETTERS[entry.op]}{entry.microbatch}"


def read(text: str, name: str, placement: Sequence[int] | None = None) -> Schedule:
    """The schedule in `text`, called `name` (also in messages). Its order is as it stands: prove it with `check`.

    Raises ConfigError with line and column (the cell's number, both from 1) for a cell that is no operation, a chunk
    on two lines, or one that `placement`, when given, puts elsewhere; also for lines without operations, and
    chunks and micro-batches that are nowhere.
    """
    homes: dict[int, int] = {}
    lines: list[tuple[Entry, ...]] = []
    seen: set[int] = set()  # micro-batches
    for stage, cells in enumerate(_rows(text, name)):
        entries: list[Entry] = []
        for column, cell in enumerate(map(str.strip, cells), 1):
            if not cell:
                continue
            where = f"{name} line {stage + 1} column {column}"
            entry = _entry(cell, where)
            for operation in operations_of(entry):
                home = homes.setdefault(operation.chunk, stage)
                if home != stage:
                    raise ConfigError(where, cell, f"chunk {operation.chunk} stands on line {home + 1} already")
                if placement is not None and (operation.chunk >= len(placement) or placement[operation.chunk] != stage):
                    raise ConfigError(where, cell, f"the placement {list(placement)} has no such chunk on stage {stage}")
                seen.add(operation.microbatch)
            entries.append(entry)
        if not entries:
            raise ConfigError(f"{name} line {stage + 1}", "''", "a stage without operations")
        lines.append(tuple(entries))
    if not lines:
        raise ConfigError(name, "''", "needs one line of operations per stage")
    chunks = max(homes) + 1 if placement is None else len(placement)
    if len(homes) < chunks:
        absent = next(chunk for chunk in range(chunks) if chunk not in homes)
        raise ConfigError(name, f"{chunks} chunks", f"no line has an operation of chunk {absent}")
    microbatches = max(seen) + 1
    if len(seen) < microbatches:
        absent = next(microbatch for microbatch in range(microbatches) if microbatch not in seen)
        raise ConfigError(name, f"{microbatches} micro-batches", f"no cell has an operation of micro-batch {absent}")
    return Schedule(name, len(lines), microbatches, tuple(homes[chunk] for chunk in range(chunks)), tuple(lines))


def _rows(text: str, name: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    rows: list[list[str]] = []
    try:
        rows.extend(reader)
    except csv.Error as error:
        raise ConfigError(f"{name} line {len(rows) + 1}", "''", f"is not CSV: {error}") from None
    while rows and not any(map(str.strip, rows[-1])):
        rows.pop()  # newlines at the end of the file
    return rows


def _entry(cell: str, where: str) -> Entry:
    if found := _OVERLAP.fullmatch(cell):
        forward, backward = (_operation(part.strip(), cell, where) for part in found.groups())
        if forward.op is not Op.F:
            forward, backward = backward, forward
        if forward.op is not Op.F or backward.op not in (Op.B, Op.BW):
            raise ConfigError(where, cell, "an overlap is of one F with one B or I")
        return Pair(forward, backward)
    return _operation(cell, cell, where)


def _operation(part: str, cell: str, where: str) -> Operation:
    if found := _OPERATION.fullmatch(part):
        chunk, letter, microbatch = found.groups()
        return Operation(_OPS[letter], int(chunk), int(microbatch))
    if _COMMUNICATION.match(part):
        raise ConfigError(where, cell, 'is no computation; write the file with format="compute_only"')
    shown = cell if len(cell) <= 40 else cell[:40] + "..."
    raise ConfigError(where, shown, "must be chunk, F, I, W or B, micro-batch, such as 0F3, or (0F3;1B2)OVERLAP_F_B")
