"""Tabu search over the orders of all stages, along the critical path.

In: a problem and an order that keeps to its memory caps. Out: an order at least as good that keeps to them too.

Under a fixed order the step is a longest path: every operation has a head (when it ends) and a tail (how long the step
lasts from its start on). The operations of a stage that follow each other without idle time on a critical path
are a block, and only an order in which some operation leaves the inside of a block for its front or its end can be
shorter: the moves tried are those (Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem",
Management Science 1996; Balas and Vazacopoulos, Management Science 1998), each valued by the heads and tails along the
moved operations alone, and the best that is not tabu is made. Micro-batches stay in order in every lane; a W, that
no operation waits for, is what moves farthest. Memory depends on the order alone, so a move that would exceed a cap is known
before it is made.
"""

from __future__ import annotations

import random

from helixrt.schedule.planner.lanes import TOLERANCE, Lanes, Order

REACH = 6  # operations that one move passes, at most
TENURE = (8, 16)  # moves for which a passed pair of operations keeps its new order
RESORT = 64  # moves after which the topological order is sorted again, by time
MOVE_COST = 12  # work counted per move looked at, in operations timed


class _Timing:
    """Heads and tails of every operation under the present order, kept up to date move by move.

    Operation lane * microbatches + micro-batch; the number after the last stands for "none" (it ends at 0).
    """

    def __init__(self, problem: Lanes, order: Order) -> None:
        count, lanes = problem.microbatches, problem.lanes
        self.count, self.none = count, lanes * count
        none = self.none
        self.duration = [problem.duration[lane] for lane in range(lanes) for _ in range(count)] + [0.0]
        self.stage = [problem.stage[lane] for lane in range(lanes) for _ in range(count)] + [-1]
        self.take = [problem.take[lane] for lane in range(lanes) for _ in range(count)]
        self.give = [problem.give[lane] for lane in range(lanes) for _ in range(count)]
        self.cap = problem.cap
        self.source, self.latency = [none] * (none + 1), [0.0] * (none + 1)
        self.reader, self.distance = [none] * (none + 1), [0.0] * (none + 1)
        self.local = [none] * none
        for lane in range(lanes):
            for m in range(count):
                operation = lane * count + m
                if problem.local[lane] >= 0:
                    self.local[operation] = problem.local[lane] * count + m
                if problem.source[lane] >= 0:
                    source = problem.source[lane] * count + m
                    self.source[operation], self.reader[source] = source, operation
                    # Messages that wait for a link are not seen here: with wire times the makespan is a close estimate.
                    self.latency[operation] = problem.latency[lane] + problem.wire[lane]
                    self.distance[source] = self.latency[operation]
        self.lists: list[list[int]] = []
        self.before, self.after = [none] * (none + 1), [none] * (none + 1)
        self.place = [0] * (none + 1)
        self.held = [0.0] * none  # memory held when the operation starts, without what it takes itself
        for stage, codes in enumerate(order):
            made = [0] * lanes
            self.lists.append([])
            for lane in codes:
                self.lists[stage].append(lane * count + made[lane])
                made[lane] += 1
            self._relink(stage, 0, len(codes) - 1)
        self.head, self.tail = [0.0] * (none + 1), [0.0] * (none + 1)
        self.sorted = self._topological()
        self._heads(0)
        self.resort()

    def order(self) -> Order:
        return [[operation // self.count for operation in listed] for listed in self.lists]

    def resort(self) -> None:
        """By their ends: neighbours in time then stand near each other, which keeps repairs short.

        The sort is stable and an end is never before that of what it waits for, so the order stays topological.
        """
        self.sorted.sort(key=self.head.__getitem__)
        self._heads(0)
        self._tails(self.none - 1)

    def _topological(self) -> list[int]:
        done = [False] * self.none + [True]
        at = [0] * len(self.lists)
        found: list[int] = []
        while len(found) < self.none:
            before = len(found)
            for stage, listed in enumerate(self.lists):
                while at[stage] < len(listed) and done[self.source[listed[at[stage]]]]:
                    operation = listed[at[stage]]
                    done[operation] = True
                    found.append(operation)
                    at[stage] += 1
            assert len(found) > before, "the order blocks itself"
        return found

    def _relink(self, stage: int, first: int, last: int) -> None:
        """Neighbours, places and memory of the list's part from `first` to `last`, after it has changed."""
        listed, none = self.lists[stage], self.none
        previous = listed[first - 1] if first else none
        held = self.held[previous] + self.take[previous] - self.give[previous] if first else 0.0
        for place in range(first, last + 1):
            operation = listed[place]
            self.before[operation], self.place[operation] = previous, place
            self.after[previous] = operation
            self.held[operation] = held
            held += self.take[operation] - self.give[operation]
            previous = operation
        following = listed[last + 1] if last + 1 < len(listed) else none
        self.after[previous] = following
        self.before[following] = previous
        self.after[none] = self.before[none] = none

    def _heads(self, first: int) -> None:
        head, before, source, latency, duration = self.head, self.before, self.source, self.latency, self.duration
        for operation in self.sorted[first:] if first else self.sorted:
            ready, arrived = head[before[operation]], head[source[operation]] + latency[operation]
            head[operation] = (ready if ready > arrived else arrived) + duration[operation]
        self.makespan_ms = max(head[listed[-1]] for listed in self.lists)

    def _tails(self, last: int) -> None:
        tail, after, reader, distance, duration = self.tail, self.after, self.reader, self.distance, self.duration
        for operation in self.sorted[last::-1]:
            here, there = tail[after[operation]], tail[reader[operation]] + distance[operation]
            tail[operation] = (here if here > there else there) + duration[operation]

    def blocks(self, draw: random.Random) -> list[tuple[int, int, int]]:
        """The blocks (stage, first place, last place) of one critical path, in order of time; ties are drawn."""
        head, duration, before, source, latency = self.head, self.duration, self.before, self.source, self.latency
        slip = TOLERANCE * self.makespan_ms
        last = [listed[-1] for listed in self.lists if head[listed[-1]] >= self.makespan_ms - slip]
        operation = last[0] if len(last) == 1 else draw.choice(last)
        found, block_end = [], operation
        while True:
            start = head[operation] - duration[operation]
            if start <= slip:
                break
            previous, sender = before[operation], source[operation]
            here = previous != self.none and head[previous] >= start - slip
            there = sender != self.none and head[sender] + latency[operation] >= start - slip
            if here and not (there and draw.random() < 0.5):
                operation = previous
            else:
                found.append((self.stage[operation], self.place[operation], self.place[block_end]))
                operation = block_end = sender
        found.append((self.stage[operation], self.place[operation], self.place[block_end]))
        found.reverse()
        return found

    def later(self, stage: int, first: int, last: int) -> float | None:
        """About how long the step is with the operation at `first` moved behind `last`; None if it may not go there.

        Never more than it then really is, as far as paths through the moved operations go.
        """
        listed, head, tail, duration = self.lists[stage], self.head, self.tail, self.duration
        source, latency, take, count = self.source, self.latency, self.take, self.count
        moved = listed[first]
        lane, reader, none = moved // count, self.reader[moved], self.none
        read = head[reader] if reader != none else -1.0
        change, room = take[moved] - self.give[moved], self.cap[stage]
        for place in range(first + 1, last + 1):
            other = listed[place]
            if other // count == lane or other == reader or self.local[other] == moved:
                return None
            if reader != none and source[other] != none and read <= head[source[other]]:
                return None  # there may be a way from the moved operation's reader to the other one
            if take[other] and change < 0 and self.held[other] - change + take[other] > room:
                return None
        if take[moved]:
            end = listed[last]
            if self.held[end] + take[end] - self.give[end] - change + take[moved] > room:
                return None
        at = head[self.before[moved]]
        starts = []
        for place in range(first + 1, last + 1):
            other = listed[place]
            arrived = head[source[other]] + latency[other]
            if arrived > at:
                at = arrived
            starts.append(at)
            at += duration[other]
        arrived = head[source[moved]] + latency[moved]
        if arrived > at:
            at = arrived
        rest, there = tail[self.after[listed[last]]], tail[reader] + self.distance[moved]
        rest = (rest if rest > there else there) + duration[moved]
        longest = at + rest
        for place in range(last, first, -1):
            other = listed[place]
            there = tail[self.reader[other]] + self.distance[other]
            rest = (rest if rest > there else there) + duration[other]
            through = starts[place - first - 1] + rest
            if through > longest:
                longest = through
        return longest

    def earlier(self, stage: int, first: int, last: int) -> float | None:
        """The same for the operation at `last` moved before `first`."""
        listed, head, tail, duration = self.lists[stage], self.head, self.tail, self.duration
        source, latency, take, count = self.source, self.latency, self.take, self.count
        moved = listed[last]
        lane, sender, none = moved // count, self.source[moved], self.none
        sent = head[sender] if sender != none else -1.0
        change, room = take[moved] - self.give[moved], self.cap[stage]
        if take[moved] and self.held[listed[first]] + take[moved] > room:
            return None
        for place in range(first, last):
            other = listed[place]
            if other // count == lane or other == sender or self.local[moved] == other:
                return None
            reader = self.reader[other]
            if sender != none and reader != none and head[reader] <= sent:
                return None
            if take[other] and change > 0 and self.held[other] + change + take[other] > room:
                return None
        at, arrived = head[self.before[listed[first]]], head[sender] + latency[moved]
        if arrived > at:
            at = arrived
        start = at
        at += duration[moved]
        starts = []
        for place in range(first, last):
            other = listed[place]
            arrived = head[source[other]] + latency[other]
            if arrived > at:
                at = arrived
            starts.append(at)
            at += duration[other]
        rest, longest = tail[self.after[moved]], 0.0
        for place in range(last - 1, first - 1, -1):
            other = listed[place]
            there = tail[self.reader[other]] + self.distance[other]
            rest = (rest if rest > there else there) + duration[other]
            through = starts[place - first] + rest
            if through > longest:
                longest = through
        there = tail[self.reader[moved]] + self.distance[moved]
        through = start + (rest if rest > there else there) + duration[moved]
        return through if through > longest else longest

    def move(self, stage: int, first: int, last: int, later: bool) -> int:
        """Move the operation at `first` behind `last`, or the one at `last` before `first`; the operations with new times."""
        listed = self.lists[stage]
        low = self.sorted.index(listed[first])
        high = self.sorted.index(listed[last], low)
        if later:
            listed.insert(last, listed.pop(first))
        else:
            listed.insert(first, listed.pop(last))
        self._relink(stage, first, last)
        # What comes after the operation moved later now follows it, in the part of the topological order in between.
        part, before, source = self.sorted[low : high + 1], self.before, self.source
        stay, go = [], []
        if later:
            behind = {part[0]}
            for operation in part:
                if operation in behind or before[operation] in behind or source[operation] in behind:
                    behind.add(operation)
                    go.append(operation)
                else:
                    stay.append(operation)
            self.sorted[low : high + 1] = stay + go
        else:
            needed = {part[-1]}
            for operation in reversed(part):
                if operation in needed:
                    needed.add(before[operation])
                    needed.add(source[operation])
                    go.append(operation)
                else:
                    stay.append(operation)
            self.sorted[low : high + 1] = go[::-1] + stay[::-1]
        self._heads(low)
        self._tails(high)
        return self.none - low + high


def improve(problem: Lanes, order: Order, bound_ms: float, work: float, draw: random.Random) -> tuple[float, Order]:
    """(makespan in ms, order) of the best order found, from `order` on, until it reaches the bound or the work is done.

    `work` counts operations timed. For problems without overlapped pairs; where messages take time on the wire the
    makespan is an estimate.
    """
    timing = _Timing(problem, order)
    best_ms, best = timing.makespan_ms, order
    enough = bound_ms * (1 + TOLERANCE)
    tabu: dict[int, int] = {}
    size = timing.none
    turn = 0
    while work > 0 and best_ms > enough:
        turn += 1
        blocks = timing.blocks(draw)
        moves = []
        for index, (stage, first, last) in enumerate(blocks):
            if index + 1 < len(blocks):
                for place in range(max(first, last - REACH), last):
                    value = timing.later(stage, place, last)
                    if value is not None:
                        moves.append((value, draw.random(), stage, place, last, True))
            if index:
                # Two operations are swapped by the loop above, unless this is the last block.
                fresh = first + 1 if last > first + 1 or index + 1 == len(blocks) else first + 2
                for place in range(fresh, min(last, first + REACH) + 1):
                    value = timing.earlier(stage, first, place)
                    if value is not None:
                        moves.append((value, draw.random(), stage, first, place, False))
        if not moves:
            break
        work -= MOVE_COST * len(moves)
        moves.sort()
        for value, _, stage, first, last, later in moves:
            listed = timing.lists[stage]
            if later:
                turned = [listed[place] * size + listed[first] for place in range(first + 1, last + 1)]
            else:
                turned = [listed[last] * size + listed[place] for place in range(first, last)]
            if value < best_ms - TOLERANCE * best_ms or all(tabu.get(pair, 0) < turn for pair in turned):
                break
        else:
            _, _, stage, first, last, later = draw.choice(moves)
            listed = timing.lists[stage]
        until = turn + draw.randint(*TENURE)
        if later:
            tabu.update((listed[first] * size + listed[place], until) for place in range(first + 1, last + 1))
        else:
            tabu.update((listed[place] * size + listed[last], until) for place in range(first, last))
        work -= timing.move(stage, first, last, later)
        if turn % RESORT == 0:
            timing.resort()
        if timing.makespan_ms < best_ms - TOLERANCE * best_ms:
            best_ms, best = timing.makespan_ms, timing.order()
    return best_ms, best
