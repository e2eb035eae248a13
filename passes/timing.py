"""How long an issue order of operators takes: one processor, two network lanes.

The processor runs compute operators one at a time, in issue order. A collective is launched in that order too, keeps
the processor for its `host_us`, and then proceeds on its lane (one inside the node, one between nodes), where
collectives run one at a time in the order of their launches. A WAIT holds the processor until its collective is done.
Whatever runs at the same moment slows each other by the overlap effectiveness factor of DHelix (section 3.2,
equation 1): while two operators run together each needs 2 - factor microseconds for one of its own, which gives
exactly equation 1 for two operators started together, and extends it to those that overlap in part.

In: strands (operators and what they need) and an order of (strand, operator). Out: when everything ran, and bounds.
Pure functions; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from helixrt.passes.errors import VerifyError
from helixrt.passes.operators import COMMUNICATION, Kind, Operator, Overlap

FORWARD, BACKWARD = 0, 1
LANES = (Kind.INTRA, Kind.INTER)

Place = tuple[int, int]  # strand, operator
Strands = Sequence[Sequence[Operator]]

# What is under way on a lane, first to finish first: which collective, when it is done if nothing slows it further,
# and its class. All but the first have not begun yet; each begins when the one before it ends.
Flight = tuple[Place, float, int]
Lane = tuple[Flight, ...]
Lanes = tuple[Lane, Lane]  # intra, inter
NOTHING: int = -1  # the class of work that neither slows nor is slowed


@dataclass(frozen=True, slots=True)
class Span:
    """What kept the processor or a lane busy, and when. On the processor a WAIT's span is the stall."""

    place: Place
    kind: Kind
    start_us: float
    end_us: float

    @property
    def length_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Timing:
    """An issue order, timed. `processor` in issue order, `network` in order of launch."""

    total_us: float
    processor: tuple[Span, ...]
    network: tuple[Span, ...]

    @property
    def stalled_us(self) -> float:
        """Time in which the processor waits for a collective (what the end waits for included)."""
        worked = sum(span.length_us for span in self.processor if span.kind is not Kind.WAIT)
        return self.total_us - worked


class Slowdowns:
    """Overlap factors of all operators of the strands, as a table of classes: equal operators share one."""

    def __init__(self, strands: Strands, overlap: Overlap) -> None:
        examples: list[Operator] = []
        classes: dict[tuple[str, Kind], int] = {}
        self.class_of: tuple[tuple[int, ...], ...] = tuple(
            tuple(self._class(operator, classes, examples) for operator in strand) for strand in strands
        )
        # Microseconds that one microsecond together costs each of the two. Two collectives of one lane never overlap.
        self.extra: tuple[tuple[float, ...], ...] = tuple(
            tuple(max(0.0, 1.0 - overlap.factor(one, other)) if self._meet(one, other) else 0.0 for other in examples)
            for one in examples
        )
        self.none = not any(any(row) for row in self.extra)

    @staticmethod
    def _class(operator: Operator, classes: dict[tuple[str, Kind], int], examples: list[Operator]) -> int:
        key = (operator.signature, operator.kind)
        if key not in classes:
            classes[key] = len(examples)
            examples.append(operator)
        return classes[key]

    @staticmethod
    def _meet(one: Operator, other: Operator) -> bool:
        kinds = {one.kind, other.kind}
        return len(kinds) == 2 and kinds <= COMMUNICATION | {Kind.COMPUTE}


def advance(
    now: float, lanes: Lanes, work: float, kind: int, until: Place | None, extra: Sequence[Sequence[float]]
) -> tuple[float, Lanes, tuple[Flight, ...]]:
    """Run the processor for `work` of class `kind`, or (until given) idle until that collective is done.

    Returns the time, what is still under way, and what has ended meanwhile (with the time it did).
    """
    intra, inter = lanes
    ended: list[Flight] = []
    while True:
        while intra and intra[0][1] <= now:
            ended.append(intra[0])
            intra = intra[1:]
        while inter and inter[0][1] <= now:
            ended.append(inter[0])
            inter = inter[1:]
        if until is not None:
            if all(flight[0] != until for flight in intra) and all(flight[0] != until for flight in inter):
                break
        elif work <= 0:
            break
        slow = slow_intra = slow_inter = 1.0
        if kind != NOTHING:
            if intra:
                cost = extra[kind][intra[0][2]]
                slow, slow_intra = slow + cost, slow_intra + cost
            if inter:
                cost = extra[kind][inter[0][2]]
                slow, slow_inter = slow + cost, slow_inter + cost
        if intra and inter:
            cost = extra[intra[0][2]][inter[0][2]]
            slow_intra, slow_inter = slow_intra + cost, slow_inter + cost
        span = math.inf if until is not None else work * slow
        left_intra = (intra[0][1] - now) * slow_intra if intra else math.inf
        left_inter = (inter[0][1] - now) * slow_inter if inter else math.inf
        step = min(span, left_intra, left_inter)
        later = now + step
        if intra:
            intra = _delayed(intra, later, step - step / slow_intra, finished=left_intra <= step)
        if inter:
            inter = _delayed(inter, later, step - step / slow_inter, finished=left_inter <= step)
        work = 0.0 if span <= step else work - step / slow
        now = later
    return now, (intra, inter), tuple(ended)


def _delayed(lane: Lane, now: float, by: float, *, finished: bool) -> Lane:
    """The lane with all ends put off; a head that finishes ends exactly now, independent of rounding."""
    if by == 0.0 and not finished:
        return lane
    shifted = [(place, end + by, kind) for place, end, kind in lane]
    if finished:
        shifted[0] = (shifted[0][0], now, shifted[0][2])
    return tuple(shifted)


def collective_of(operators: Sequence[Operator], wait: int) -> int:
    """The collective a WAIT is for, through views of its result. Raises VerifyError when there is none."""
    for need in operators[wait].needs:
        source = need
        while operators[source].kind is Kind.FREE and operators[source].needs:
            source = operators[source].needs[0]
        if operators[source].kind in COMMUNICATION:
            return source
    raise VerifyError(f"{operators[wait].node} waits, but none of what it takes in is a collective")


def simulate(strands: Strands, order: Sequence[Place], overlap: Overlap) -> Timing:
    """Time an issue order of all operators (microseconds). Raises VerifyError when it misses one or breaks a need."""
    check_order(strands, order)
    slowdowns = Slowdowns(strands, overlap)
    now = 0.0
    lanes: Lanes = ((), ())
    processor: list[Span] = []
    ends: dict[Place, float] = {}
    begun: dict[Place, float] = {}  # when launched; the lane may still be busy then
    for place in order:
        strand, index = place
        operator = strands[strand][index]
        start, work, kind, until = now, operator.time_us, slowdowns.class_of[strand][index], None
        if operator.kind in COMMUNICATION:
            lanes = launched(now, lanes, place, operator, kind)
            begun[place] = now
            work, kind = operator.host_us, NOTHING
        elif operator.kind is Kind.WAIT:
            kind, until = NOTHING, (strand, collective_of(strands[strand], index))
        elif operator.kind is Kind.FREE:
            continue
        now, lanes, ended = advance(now, lanes, work, kind, until, slowdowns.extra)
        ends.update((flight[0], flight[1]) for flight in ended)
        if now > start:
            processor.append(Span(place, operator.kind, start, now))
    while any(lanes):
        last = next(lane for lane in lanes if lane)[-1][0]
        now, lanes, ended = advance(now, lanes, 0.0, NOTHING, last, slowdowns.extra)
        ends.update((flight[0], flight[1]) for flight in ended)
    return Timing(max([now, *ends.values()]), tuple(processor), _network(strands, begun, ends))


def launched(now: float, lanes: Lanes, place: Place, operator: Operator, kind: int) -> Lanes:
    """The lanes after this launch."""
    intra, inter = lanes
    lane = intra if operator.kind is Kind.INTRA else inter
    begin = lane[-1][1] if lane and lane[-1][1] > now else now
    lane = (*lane, (place, begin + operator.time_us, kind))
    return (lane, inter) if operator.kind is Kind.INTRA else (intra, lane)


def _network(strands: Strands, begun: Mapping[Place, float], ends: Mapping[Place, float]) -> tuple[Span, ...]:
    spans, free = [], dict.fromkeys(LANES, 0.0)
    for place, launch in begun.items():
        kind = strands[place[0]][place[1]].kind
        spans.append(Span(place, kind, max(launch, free[kind]), ends[place]))
        free[kind] = ends[place]
    return tuple(spans)


def check_order(strands: Strands, order: Sequence[Place]) -> None:
    """Every operator once, after what it needs. Raises VerifyError naming the operator."""
    done: set[Place] = set()
    for strand, index in order:
        operator = strands[strand][index]
        if (strand, index) in done:
            raise VerifyError(f"strand {strand}: {operator.node} is issued twice")
        for need in operator.needs:
            if (strand, need) not in done:
                raise VerifyError(f"strand {strand}: {operator.node} is issued before {strands[strand][need].node}")
        done.add((strand, index))
    if len(done) != sum(len(strand) for strand in strands):
        missing = next((s, o) for s, strand in enumerate(strands) for o in range(len(strand)) if (s, o) not in done)
        raise VerifyError(f"strand {missing[0]}: {strands[missing[0]][missing[1]].node} is never issued")


def work_us(operator: Operator) -> float:
    """What an operator takes of the processor."""
    if operator.kind is Kind.COMPUTE:
        return operator.time_us
    return operator.host_us if operator.kind in COMMUNICATION else 0.0


def tails_us(operators: Sequence[Operator]) -> list[float]:
    """Longest chain from the start of each operator to the end of its strand, all else being free."""
    tails = [0.0] * len(operators)
    for index in range(len(operators) - 1, -1, -1):
        operator = operators[index]
        if operator.kind is Kind.COMPUTE:
            tails[index] += operator.time_us
        elif operator.kind in COMMUNICATION:
            tails[index] += max(operator.time_us, operator.host_us)
        for need in operator.needs:
            if need >= index:
                raise VerifyError(f"{operator.node} stands before {operators[need].node}, which it needs")
            tails[need] = max(tails[need], tails[index])
    return tails


def bound_us(strands: Strands, overlap: Overlap) -> float:
    """No order takes less: the longest chain, each lane's work with what must come before its first and after its last
    collective, and processor and lane together, overlapped as far and as cheaply as they can be.

    With perfect overlap this is max(C + m, M) of compute C, communication M and its processor time m, plus what is
    exposed at either end; or more, where a chain is longer.
    """
    bound = 0.0
    heads: dict[Kind, float] = {}
    ends: dict[Kind, float] = {}
    for strand in strands:
        tails = tails_us(strand)
        bound = max([bound, *tails])
        reached = [0.0] * len(strand)  # earliest start
        for index, operator in enumerate(strand):
            reached[index] = max((_end(strand[need], reached[need]) for need in operator.needs), default=0.0)
            if operator.kind in COMMUNICATION:
                kind = operator.kind
                heads[kind] = min(heads.get(kind, math.inf), reached[index])
                after = tails[index] - max(operator.time_us, operator.host_us)
                ends[kind] = min(ends.get(kind, math.inf), after)
    for kind in heads:
        work = sum(operator.time_us for strand in strands for operator in strand if operator.kind is kind)
        bound = max(bound, heads[kind] + work + ends[kind])
    return max(bound, _busy_us(strands, Slowdowns(strands, overlap)))


def _busy_us(strands: Strands, slowdowns: Slowdowns) -> float:
    """The processor's work with what overlapping costs it. While a collective proceeds by a microsecond, the processor
    does a microsecond of compute (and both take longer), or launches something, or waits."""
    compute: dict[int, float] = {}
    talk: dict[Kind, float] = dict.fromkeys(LANES, 0.0)
    classes: dict[Kind, set[int]] = {kind: set() for kind in LANES}
    host = 0.0
    for strand, operators in enumerate(strands):
        for index, operator in enumerate(operators):
            kind = slowdowns.class_of[strand][index]
            if operator.kind is Kind.COMPUTE:
                compute[kind] = compute.get(kind, 0.0) + operator.time_us
            elif operator.kind in COMMUNICATION:
                talk[operator.kind] += operator.time_us
                classes[operator.kind].add(kind)
                host += operator.host_us
    work = sum(compute.values())
    bound = both = work + host
    worst = 0.0
    for lane in LANES:
        if not classes[lane]:
            continue
        costs = {kind: min(slowdowns.extra[kind][other] for other in classes[lane]) for kind in compute}
        hideable = max(talk[lane] - host, 0.0)
        saved = 0.0
        for extra, time in sorted((costs[kind], time) for kind, time in compute.items()):
            part = min(time, hideable)
            saved += part * max(0.0, 1.0 - extra)
            both += part * extra
            hideable -= part
        worst += max(costs.values(), default=0.0)
        bound = max(bound, work + talk[lane] - saved)
    # Standing still lets both lanes proceed at once; that pays only where they cost more than that together.
    return max(bound, both) if worst <= 1.0 else bound


def _end(operator: Operator, start: float) -> float:
    return start + (0.0 if operator.kind in (Kind.WAIT, Kind.FREE) else max(operator.time_us, operator.host_us))
