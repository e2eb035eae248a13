"""What others do with two strands, to compare with: their issue orders, under the same model and memory rule.

- sequential: one strand after the other, as captured; communication is exposed unless the listing itself hides it.
- intra_batch: one after the other, each strand's own compute moved behind its own collectives (MegaScale, the DHelix
  paper's "Intra-batch").
- round_robin: one operator of either strand in turn, as Wavelet does; a collective has the other strand's next operator
  to hide behind.
- eq2: DHelix's published search (section 4.2, equation 2) over the listing's segments: at each barrier go on with one
  segment of either strand, or with a pair of them. That cuts are part of its search shows in that a segment with a
  collective may be paired with a run of up to `RUN` segments of compute.

In: two strands. Out: orders of all their operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from helixrt.passes.operators import COMMUNICATION, Kind, Operator, Overlap
from helixrt.passes.search import Problem
from helixrt.passes.segment import segments, steps
from helixrt.passes.sequence import candidates, captured
from helixrt.passes.timing import BACKWARD, FORWARD, Lanes, Place, Slowdowns, simulate

RUN = 8
BAND = 3  # layers by which eq2 lets the strands' progress differ when it cannot look at all pairs
ALL_PAIRS = 100_000

Strand = Sequence[Operator]


def sequential(forward: Strand, backward: Strand) -> list[Place]:
    """Backward, then forward, as listed."""
    return [(strand, index) for strand, listed in ((BACKWARD, backward), (FORWARD, forward)) for index in range(len(listed))]


def intra_batch(forward: Strand, backward: Strand, overlap: Overlap) -> list[Place]:
    """Backward, then forward, each in the better of its own orders."""
    found: list[Place] = []
    for strand, listed in ((BACKWARD, backward), (FORWARD, forward)):
        orders = [[(0, index) for index in line.order] for line in candidates(listed, reorder=False)]
        orders.append([(0, index) for index in range(len(listed))])
        best = min(orders, key=lambda order: simulate((listed,), order, overlap).total_us)
        found.extend((strand, index) for _, index in best)
    return found


def round_robin(forward: Strand, backward: Strand, overlap: Overlap, ahead: int = 1) -> list[Place]:
    """In turn; the forward misses its turns while it is `ahead` layers ahead of what the backward has released."""
    problem = by_operator(forward, backward, overlap, ahead)
    orders = [line.line.order for line in problem.strands]
    at, order, turn = [0, 0], [], FORWARD
    while at[0] < len(orders[0]) or at[1] < len(orders[1]):
        strand = turn if problem.allowed(2 * turn, at[turn], (at[0], 0, at[1], 0, -1)) else 1 - turn
        while at[strand] < len(orders[strand]):
            index = orders[strand][at[strand]]
            if not problem.allowed(2 * strand, at[strand], (at[0], 0, at[1], 0, -1)):
                break
            order.append((strand, index))
            at[strand] += 1
            if (forward, backward)[strand][index].kind not in (Kind.WAIT, Kind.FREE):
                break
        turn = 1 - strand
    return order


def eq2(forward: Strand, backward: Strand, overlap: Overlap, ahead: int = 1, grain_us: float = 0.0) -> list[Place]:
    """The best path of equation 2 through the grid of segments."""
    return _Grid(forward, backward, overlap, ahead, grain_us).order()


def by_operator(forward: Strand, backward: Strand, overlap: Overlap, ahead: int) -> Problem:
    """Steps of one operator each, nothing deferred: step n is the n-th of the line's order."""
    lines = [steps(captured(listed, reorder=False)) for listed in (forward, backward)]
    return Problem(lines[FORWARD], lines[BACKWARD], Slowdowns((forward, backward), overlap), ahead)


class _Grid:
    """Equation 2's table, T(i, j): shortest time for i segments of the forward and j of the backward."""

    def __init__(self, forward: Strand, backward: Strand, overlap: Overlap, ahead: int, grain_us: float) -> None:
        self.strands = (forward, backward)
        self.problem = by_operator(forward, backward, overlap, ahead)
        self.ranges = tuple(tuple(_ranges(segments(s.line, grain_us))) for s in self.problem.strands)
        self.positions = tuple({index: at for at, index in enumerate(s.line.order)} for s in self.problem.strands)
        self.sending = tuple(
            tuple(any(self._operator(strand, at).kind in COMMUNICATION for at in piece) for piece in pieces)
            for strand, pieces in enumerate(self.ranges)
        )
        names: dict[object, int] = {}
        self.names = tuple(
            tuple(names.setdefault(self._likeness(strand, piece), len(names)) for piece in pieces)
            for strand, pieces in enumerate(self.ranges)
        )
        self.times: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, bool]] = {}

    def _operator(self, strand: int, at: int) -> Operator:
        return self.strands[strand][self.problem.strands[strand].line.order[at]]

    def _likeness(self, strand: int, piece: range) -> object:
        """Equal for segments that take equal times beside any other segment (of the same strand)."""
        operators = [self._operator(strand, at) for at in piece]
        return strand, tuple((o.kind, o.signature, o.time_us, o.host_us) for o in operators)

    def order(self) -> list[Place]:
        banded = len(self.ranges[0]) * len(self.ranges[1]) > ALL_PAIRS
        moves = self._solve(banded) or self._solve(False)
        assert moves is not None  # one strand after the other is a path
        order: list[Place] = []
        i = j = 0
        for a, b in moves:
            order.extend(self._issue(i, a, j, b, self._together(i, a, j, b)[1]))
            i, j = i + a, j + b
        return order

    def _solve(self, banded: bool) -> list[tuple[int, int]] | None:
        rows, columns = len(self.ranges[0]), len(self.ranges[1])
        layers = min(strand.layers for strand in self.problem.strands)
        reach = math.ceil(BAND * columns / max(layers, 1)) if banded else columns
        table = [[math.inf] * (columns + 1) for _ in range(rows + 1)]
        best: dict[tuple[int, int], tuple[int, int]] = {}
        table[0][0] = 0.0
        for i in range(rows + 1):
            middle = i * columns // max(rows, 1)
            for j in range(max(0, middle - reach), min(columns, middle + reach) + 1):
                if table[i][j] == math.inf:
                    continue
                for a, b in self._moves(i, j):
                    time = table[i][j] + self._together(i, a, j, b)[0]
                    if time < table[i + a][j + b]:
                        table[i + a][j + b] = time
                        best[i + a, j + b] = (a, b)
        if table[rows][columns] == math.inf:
            return None
        moves, i, j = [], rows, columns
        while i or j:
            a, b = best[i, j]
            moves.append((a, b))
            i, j = i - a, j - b
        return moves[::-1]

    def _moves(self, i: int, j: int) -> Iterator[tuple[int, int]]:
        """How many segments of either strand the next barrier may enclose."""
        rows, columns = len(self.ranges[0]), len(self.ranges[1])
        if j < columns:
            yield 0, 1
        runs = self._run(FORWARD, i), self._run(BACKWARD, j)
        allowed = self._allowed(i, j)
        for a in range(1, min(allowed, max(runs[0], 1) if j < columns and self.sending[1][j] else 1) + 1):
            if a == 1:
                yield 1, 0
            if j < columns:
                yield a, 1
        if allowed and i < rows and self.sending[0][i]:
            for b in range(2, runs[1] + 1):
                yield 1, b

    def _run(self, strand: int, begin: int) -> int:
        """Length of the run of compute segments from here, at most `RUN`."""
        sending, end = self.sending[strand], begin
        while end < len(sending) and end - begin < RUN and not sending[end]:
            end += 1
        return end - begin

    def _allowed(self, i: int, j: int) -> int:
        """How many forward segments may begin now, by the memory rule; at most `RUN`."""
        pieces = self.ranges[FORWARD]
        released = self.problem.released((0, 0, self.ranges[BACKWARD][j - 1].stop if j else 0, 0, -1))
        gates = self.problem.gates[0]
        count = 0
        while count < RUN and i + count < len(pieces) and gates[pieces[i + count].stop - 1] <= released:
            count += 1
        return count

    def _together(self, i: int, a: int, j: int, b: int) -> tuple[float, bool]:
        """Time between two barriers, and whether the forward's launches go first."""
        key = self.names[0][i : i + a], self.names[1][j : j + b]
        if key not in self.times:
            times = [self._time(self._issue(i, a, j, b, first)) for first in (True, False)]
            self.times[key] = (times[0], True) if times[0] <= times[1] else (times[1], False)
        return self.times[key]

    def _time(self, order: Sequence[Place]) -> float:
        now = 0.0
        lanes: Lanes = ((), ())
        for strand, index in order:
            now, lanes = self.problem.issue(now, lanes, 2 * strand, self.positions[strand][index])
        return max([now, *(lane[-1][1] for lane in lanes if lane)])

    def _issue(self, i: int, a: int, j: int, b: int, forward_first: bool) -> list[Place]:
        """Both up to their first wait, then the rest of both."""
        halves = [self._halves(FORWARD, i, a), self._halves(BACKWARD, j, b)]
        if not forward_first:
            halves.reverse()
        return [*halves[0][0], *halves[1][0], *halves[0][1], *halves[1][1]]

    def _halves(self, strand: int, begin: int, count: int) -> tuple[list[Place], list[Place]]:
        order = self.problem.strands[strand].line.order
        places = [(strand, order[at]) for piece in self.ranges[strand][begin : begin + count] for at in piece]
        waits = (n for n, (_, index) in enumerate(places) if self.strands[strand][index].kind is Kind.WAIT)
        cut = next(waits, len(places))
        return places[:cut], places[cut:]


def _ranges(pieces: Sequence[Sequence[int]]) -> Iterator[range]:
    begin = 0
    for piece in pieces:
        yield range(begin, begin + len(piece))
        begin += len(piece)


BASELINES: dict[str, Callable[[Strand, Strand, Overlap, int], list[Place]]] = {
    "sequential": lambda forward, backward, overlap, ahead: sequential(forward, backward),
    "intra_batch": lambda forward, backward, overlap, ahead: intra_batch(forward, backward, overlap),
    "round_robin": round_robin,
    "eq2": eq2,
}
