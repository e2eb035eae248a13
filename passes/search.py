"""The search for the issue order of two strands: dynamic programming over how far each of them has come.

DHelix's equation 2 (section 4.2) advances by one segment of either strand or by a pair of them, with a barrier after
each. Here a state is how many steps of either strand have been issued, fixed ones and deferred ones apart, with the
clock of the processor and what is under way on the lanes: collectives reach over any number of steps, no barrier is
needed, and where each movable operator runs is part of the state. Of labels of one state, those that are nowhere
earlier than another are dropped; this is exact where operators overlap perfectly. Of the labels with equally many
steps issued the `width` most promising are kept; without a width all, and the result is the optimum.

In: two lines cut into steps. Out: the order, as steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from helixrt.passes.operators import COMMUNICATION, Kind
from helixrt.passes.segment import Step, Steps
from helixrt.passes.timing import BACKWARD, FORWARD, LANES, NOTHING, Lanes, Place, Slowdowns, advance, collective_of, tails_us

FIXED, DEFERRED = 0, 1
STRAND_OF = (FORWARD, FORWARD, BACKWARD, BACKWARD)  # a track is a strand's fixed or deferred steps

# Steps issued of each track; of the backward's deferred ones all but one that is held back (-1: none).
Cell = tuple[int, int, int, int, int]
START: Cell = (0, 0, 0, 0, -1)
Move = tuple[int, int, Cell]  # track, step, and the cell it leads to


class _Label(NamedTuple):
    score: float
    bound: float  # on the time at the end
    now: float
    lanes: Lanes
    cell: Cell
    last: tuple[int, int]  # track and number of the last step
    before: _Label | None


@dataclass(frozen=True)
class _Compute:
    work: float
    kind: int


@dataclass(frozen=True)
class _Launch:
    place: Place
    inter: bool
    time: float
    host: float
    kind: int


@dataclass(frozen=True)
class _Wait:
    place: Place


class Problem:
    """Two strands, compiled for the search. `ahead`: layers the forward may be ahead of what the backward released."""

    def __init__(self, forward: Steps, backward: Steps, slowdowns: Slowdowns, ahead: int) -> None:
        self.tracks: tuple[tuple[Step, ...], ...] = (forward.fixed, forward.deferred, backward.fixed, backward.deferred)
        self.strands = (forward, backward)
        self.extra = slowdowns.extra
        self.perfect = slowdowns.none
        self.programs = tuple(
            tuple(self._compile(strand, step, slowdowns) for step in track)
            for strand, track in zip(STRAND_OF, self.tracks, strict=True)
        )
        self.gates = tuple(tuple(min(step.rank + 1 - ahead, backward.layers) for step in track) for track in self.tracks[:2])
        self.drag = tuple(self._drag(slowdowns, kind) for kind in LANES)
        # What is left after the first n steps of each track: processor, either lane, longest chain.
        left = [self._left(strand, track) for strand, track in zip(STRAND_OF, self.tracks, strict=True)]
        self.work, self.intra, self.inter, self.chain = (tuple(column) for column in zip(*left, strict=True))

    def _compile(self, strand: int, step: Step, slowdowns: Slowdowns) -> tuple[_Compute | _Launch | _Wait, ...]:
        operators = self.strands[strand].line.operators
        program: list[_Compute | _Launch | _Wait] = []
        for index in step.operators:
            operator, kind = operators[index], slowdowns.class_of[strand][index]
            if operator.kind is Kind.COMPUTE:
                last = program[-1] if program else None
                if isinstance(last, _Compute) and (self.perfect or last.kind == kind):
                    program[-1] = _Compute(last.work + operator.time_us, kind)
                else:
                    program.append(_Compute(operator.time_us, kind))
            elif operator.kind in COMMUNICATION:
                inter = operator.kind is Kind.INTER
                program.append(_Launch((strand, index), inter, operator.time_us, operator.host_us, kind))
            elif operator.kind is Kind.WAIT:
                program.append(_Wait((strand, collective_of(operators, index))))
        return tuple(program)

    def _left(self, strand: int, track: Sequence[Step]) -> tuple[tuple[float, ...], ...]:
        operators = self.strands[strand].line.operators
        tails = tails_us(operators)
        rows = [(0.0, 0.0, 0.0, 0.0)]
        for step in reversed(track):
            work, *lanes, chain = rows[-1]
            for index in step.operators:
                operator = operators[index]
                work += operator.host_us if operator.kind in COMMUNICATION else operator.time_us
                for number, kind in enumerate(LANES):
                    lanes[number] += operator.time_us if operator.kind is kind else 0.0
                chain = max(chain, tails[index])
            rows.append((work, lanes[0], lanes[1], chain))
        return tuple(zip(*reversed(rows), strict=True))

    def released(self, cell: Cell) -> int:
        """Layers the backward is done with."""
        fixed, deferred = self.strands[BACKWARD].finished
        done = min(fixed[cell[2]], deferred[cell[3]])
        return min(done, deferred[cell[4]]) if cell[4] >= 0 else done

    def allowed(self, track: int, at: int, cell: Cell) -> bool:
        """Whether a step may be issued, as far as the other track of its strand and the memory rule go."""
        steps = self.tracks[track]
        if at >= len(steps):
            return False
        issued = cell[track ^ 1]
        if track == 2 and cell[4] >= 0:
            issued = cell[4]  # what is held back, and what comes after it, does not count
        if steps[at].after > issued:
            return False
        return track >= 2 or self.gates[track][at] <= self.released(cell)

    def moves(self, cell: Cell, hold: bool) -> list[Move]:
        """Every step that may be issued next; with `hold` also the second of the backward's deferred ones."""
        a, b, c, d, held = cell
        found: list[Move] = []
        if self.allowed(0, a, cell):
            found.append((0, a, (a + 1, b, c, d, held)))
        if self.allowed(1, b, cell):
            found.append((1, b, (a, b + 1, c, d, held)))
        if self.allowed(2, c, cell):
            found.append((2, c, (a, b, c + 1, d, held)))
        if self.allowed(3, d, cell) and held not in self.tracks[3][d].needs:
            found.append((3, d, (a, b, c, d + 1, held)))
        if held >= 0:
            found.append((3, held, (a, b, c, d, -1)))
        elif hold and self.allowed(3, d + 1, cell) and d not in self.tracks[3][d + 1].needs:
            found.append((3, d + 1, (a, b, c, d + 2, d)))
        return found

    def issue(self, now: float, lanes: Lanes, track: int, at: int) -> tuple[float, Lanes]:
        """The clock and the lanes after a step."""
        for item in self.programs[track][at]:
            if isinstance(item, _Compute):
                now, lanes = self._run(now, lanes, item.work, item.kind)
            elif isinstance(item, _Launch):
                lane = lanes[item.inter]
                begin = max(lane[-1][1], now) if lane else now
                lane = (*lane, (item.place, begin + item.time, item.kind))
                lanes = (lanes[0], lane) if item.inter else (lane, lanes[1])
                if item.host:
                    now, lanes = self._run(now, lanes, item.host, NOTHING)
            else:
                now, lanes = self._wait(now, lanes, item.place)
        return now, lanes

    def _run(self, now: float, lanes: Lanes, work: float, kind: int) -> tuple[float, Lanes]:
        if not self.perfect:
            now, lanes, _ = advance(now, lanes, work, kind, None, self.extra)
            return now, lanes
        now += work
        return now, _landed(now, lanes)

    def _wait(self, now: float, lanes: Lanes, place: Place) -> tuple[float, Lanes]:
        if not self.perfect:
            now, lanes, _ = advance(now, lanes, 0.0, NOTHING, place, self.extra)
            return now, lanes
        for lane in lanes:
            for flight in lane:
                if flight[0] == place:
                    now = max(now, flight[1])
                    return now, _landed(now, lanes)
        return now, lanes

    def _drag(self, slowdowns: Slowdowns, lane: Kind) -> float:
        """What a microsecond of communication costs the compute it overlaps, on average."""
        compute: dict[int, float] = {}
        talk: dict[int, float] = {}
        for strand, classes in zip(self.strands, slowdowns.class_of, strict=True):
            for operator, kind in zip(strand.line.operators, classes, strict=True):
                if operator.kind is Kind.COMPUTE:
                    compute[kind] = compute.get(kind, 0.0) + operator.time_us
                elif operator.kind is lane:
                    talk[kind] = talk.get(kind, 0.0) + operator.time_us
        pairs = sum(compute.values()) * sum(talk.values())
        cost = sum(slowdowns.extra[c][t] * compute[c] * talk[t] for c in compute for t in talk)
        return min(cost / pairs, 1.0) if pairs else 0.0

    def ahead_of(self, now: float, lanes: Lanes, cell: Cell, weight: float) -> tuple[float, float]:
        """A bound on the time at the end, and a score: the expected time at the end, with `weight` times what processor
        and lanes would need each by itself."""
        a, b, c, d, held = cell
        work, intra, inter, chain = self.work, self.intra, self.inter, self.chain
        busy = work[0][a] + work[1][b] + work[2][c] + work[3][d]
        first = intra[0][a] + intra[1][b] + intra[2][c] + intra[3][d]
        second = inter[0][a] + inter[1][b] + inter[2][c] + inter[3][d]
        if held >= 0:
            busy += work[3][held] - work[3][held + 1]
            first += intra[3][held] - intra[3][held + 1]
            second += inter[3][held] - inter[3][held + 1]
        if lanes[0]:
            first += lanes[0][-1][1] - now
        if lanes[1]:
            second += lanes[1][-1][1] - now
        longest = max(chain[0][a], chain[1][b], chain[2][c], chain[3][d])
        bound = max(busy, first, second, longest)
        if not self.perfect:
            cost_first, cost_second = self.drag[0] * min(first, busy), self.drag[1] * min(second, busy)
            busy, first, second = busy + cost_first + cost_second, first + cost_first, second + cost_second
        return now + bound, now + max(busy, first, second, longest) + weight * (3.0 * now + busy + first + second)


def _landed(now: float, lanes: Lanes) -> Lanes:
    intra, inter = lanes
    while intra and intra[0][1] <= now:
        intra = intra[1:]
    while inter and inter[0][1] <= now:
        inter = inter[1:]
    return intra, inter


def search(
    problem: Problem,
    width: int | None,
    *,
    labels: int | None = 2,
    weight: float = 0.1,
    hold: bool = True,
    best_us: float = math.inf,
) -> tuple[float, list[tuple[int, int]]]:
    """The shortest order found: its time in microseconds, and each step as (track, number).

    Kept are the `width` labels (None: all) of the best score, see `Problem.ahead_of`; with some `weight`, idle time of
    processor or lanes counts though it delays nothing yet. `labels` of one state are kept at most. Without `hold`
    deferred steps run in the order they become ready; with it one at a time may be passed over. Orders that cannot end
    before `best_us` are left out; the time is infinite when none is left.
    """
    level: list[_Label] = [_Label(0.0, 0.0, 0.0, ((), ()), START, (-1, -1), None)]
    for _ in range(sum(map(len, problem.tracks))):
        cells: dict[Cell, list[_Label]] = {}
        for label in level:
            for track, at, cell in problem.moves(label.cell, hold):
                now, lanes = problem.issue(label.now, label.lanes, track, at)
                bound, score = problem.ahead_of(now, lanes, cell, weight)
                if bound < best_us:
                    made = _Label(score, bound, now, lanes, cell, (track, at), label)
                    _add(cells.setdefault(cell, []), made, labels)
        found = [label for kept in cells.values() for label in kept]
        level = found if width is None else heapq.nsmallest(width, found, key=_by_score)
    if not level:
        return math.inf, []
    last = min(level, key=lambda label: label.bound)
    steps: list[tuple[int, int]] = []
    at_last: _Label | None = last
    while at_last is not None and at_last.before is not None:
        steps.append(at_last.last)
        at_last = at_last.before
    return last.bound, steps[::-1]


def _by_score(label: _Label) -> tuple[float, bool, Cell]:
    return label.score, label.cell[4] >= 0, label.cell  # never by chance: all ranks must find the same order


def _add(kept: list[_Label], label: _Label, most: int | None) -> None:
    if any(_no_later(other, label) for other in kept):
        return
    kept[:] = [other for other in kept if not _no_later(label, other)]
    kept.append(label)
    if most is not None and len(kept) > most:
        kept.remove(max(kept, key=_by_score))


def _no_later(one: _Label, other: _Label) -> bool:
    """Whether one's processor and each of its collectives are done no later; both have issued the same steps."""
    if one.now > other.now:
        return False
    for mine, theirs in zip(one.lanes, other.lanes, strict=True):
        if mine:
            ends = {place: end for place, end, _ in theirs}
            if any(end > ends.get(place, other.now) for place, end, _ in mine):
                return False
    return True


def issue_order(problem: Problem, found: Sequence[tuple[int, int]]) -> list[Place]:
    """The operators of a found order."""
    return [(STRAND_OF[track], index) for track, at in found for index in problem.tracks[track][at].operators]
