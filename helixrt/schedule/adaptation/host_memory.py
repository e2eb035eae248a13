"""The second tier of memory: activations that do not fit the device wait in host memory, at the price of copying them.

In: a stage's list, its costs (whose memory cap is the device's), host memory and its copy bandwidth. Out: when an entry
may start for the copies' sake, and how much the host holds. Only for delegated communication (ADAPTRA,
Sections 4.2 and 5.2), which puts what is sent through host memory anyway. The paper counts on virtually unlimited host
memory and free copies; here both have limits:

- An activation moves as a whole, between an operation that used it and the next that will; each direction has one
  copy engine, which copies one activation at a time at `copy_per_ms`, beside computation.
- What an entry uses must be on the device when it starts, and a forward's new activation must have room there. Without
  room, the activation whose next use is furthest in the list is copied out, from the moment it was last used (the
  list is known in advance); its room is free when the copy is done.
- Room that a backward leaves takes back at once what is needed next, from the moment the room is there.

So copies that keep up with computation cost nothing; those that do not delay the entries that wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Entry, Op, Schedule, operations_of

_SLIVER = 1e-9  # of the cap: rounding of sums of amounts


@dataclass(frozen=True)
class HostMemory:
    """Per stage, what the host can hold (in the costs' unit of memory) and how much it copies per ms, each way.

    Raises ConfigError for lists of different lengths, a negative capacity, a bandwidth that is not above 0.
    """

    capacity: tuple[float, ...]
    copy_per_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.capacity) != len(self.copy_per_ms):
            rule = f"must have {len(self.capacity)} values, one per stage"
            raise ConfigError("host.copy_per_ms", list(self.copy_per_ms), rule)
        for value in self.capacity:
            if not value >= 0:
                raise ConfigError("host.capacity", value, "must be a number, at least 0")
        for value in self.copy_per_ms:
            if not value > 0:
                raise ConfigError("host.copy_per_ms", value, "must be a number above 0")


_Held = tuple[int, int]  # chunk, micro-batch


class Tier:
    """One stage's device memory backed by the host, followed entry by entry in the order of the list."""

    def __init__(self, entries: Sequence[Entry], costs: Costs, stage: int, host: HostMemory) -> None:
        self._costs, self._cap, self._stage = costs, costs.memory[stage], stage
        self._copy_per_ms = host.copy_per_ms[stage]
        self._uses: dict[_Held, list[int]] = {}  # places in the list at which it will be used, the next one last
        for index in reversed(range(len(entries))):
            for o in operations_of(entries[index]):
                if o.op is not Op.F:
                    self._uses.setdefault((o.chunk, o.microbatch), []).append(index)
        self._room: list[tuple[float, float]] = [(0.0, self._cap)]  # heap of (from when, how much) free on the device
        self._free = self._cap
        self._here: dict[_Held, tuple[float, float]] = {}  # on the device: amount, from when copy or operation leave it
        self._away: dict[_Held, tuple[float, float]] = {}  # on the host: amount, from when it can come back
        self._out_free_ms = self._in_free_ms = 0.0
        self.host_peak = 0.0

    def begin(self, entry: Entry) -> float:
        """From when the entry can start, given all entries before it."""
        operations = operations_of(entry)
        used = {(o.chunk, o.microbatch) for o in operations}
        start_ms = 0.0
        for operation in operations:
            held = operation.chunk, operation.microbatch
            if operation.op is Op.F:
                amount = self._costs.activation[operation.chunk]
                start_ms = max(start_ms, self._take(amount, used))
                self._here[held] = (amount, math.inf)
                continue
            if held in self._away:
                self._fetch(held, used)
            start_ms = max(start_ms, self._here[held][1])
            more = self._costs.kept[operation.chunk] - self._here[held][0] if operation.op is Op.B else 0.0
            if more > 0.0:
                start_ms = max(start_ms, self._take(more, used))
                self._here[held] = (self._costs.kept[operation.chunk], math.inf)
        return start_ms

    def end(self, entry: Entry, end_ms: float) -> None:
        """The entry has ended: its room is free, or what it leaves waits for its next use."""
        for operation in operations_of(entry):
            held = operation.chunk, operation.microbatch
            amount = self._here[held][0]
            left = {Op.F: amount, Op.B: self._costs.kept[operation.chunk]}.get(operation.op, 0.0)
            if operation.op is not Op.F:
                self._uses[held].pop()
            if left < amount:
                self._give(end_ms, amount - left)
            if operation.op in (Op.W, Op.BW):
                del self._here[held]
            else:
                self._here[held] = (left, end_ms)
        while self._away:
            nearest = min(self._away, key=self._next_use)
            if not self._fits(self._away[nearest][0]):
                break
            self._fetch(nearest, {nearest})

    def _next_use(self, held: _Held) -> float:
        return self._uses[held][-1] if self._uses.get(held) else math.inf

    def _fits(self, amount: float) -> bool:
        return amount <= self._free + _SLIVER * self._cap

    def _give(self, at_ms: float, amount: float) -> None:
        heappush(self._room, (at_ms, amount))
        self._free += amount

    def _take(self, amount: float, used: set[_Held]) -> float:
        """Claim that much room, the longest free first; from when it is there."""
        while not self._fits(amount):
            idle = [held for held in self._here if held not in used]
            if not idle:
                rule = f"stage {self._stage} needs more on the device for one entry, whatever the host holds"
                raise ConfigError(f"costs.memory[{self._stage}]", self._cap, rule)
            self._evict(max(idle, key=self._next_use))
        self._free -= amount
        there_ms = 0.0
        while amount > 0.0 and self._room:
            from_ms, part = heappop(self._room)
            there_ms = from_ms
            if part > amount:
                heappush(self._room, (from_ms, part - amount))
            amount -= part
        return there_ms

    def _evict(self, held: _Held) -> None:
        amount, idle_ms = self._here.pop(held)
        self._out_free_ms = max(self._out_free_ms, idle_ms) + amount / self._copy_per_ms
        self._away[held] = (amount, self._out_free_ms)
        self.host_peak = max(self.host_peak, sum(amount for amount, _ in self._away.values()))
        self._give(self._out_free_ms, amount)

    def _fetch(self, held: _Held, used: set[_Held]) -> None:
        amount, away_ms = self._away[held]
        begin_ms = max(self._take(amount, used), self._in_free_ms, away_ms)
        del self._away[held]
        self._in_free_ms = begin_ms + amount / self._copy_per_ms
        self._here[held] = (amount, self._in_free_ms)


def tiers(schedule: Schedule, costs: Costs, host: HostMemory) -> list[Tier | None]:
    """A tier per stage, None for stages without a device cap.

    Raises ConfigError when `host` is of another number of stages.
    """
    if len(host.capacity) != schedule.stages:
        raise ConfigError("host.capacity", list(host.capacity), f"must have {schedule.stages} values, one per stage")
    return [None if math.isinf(costs.memory[s]) else Tier(schedule.entries[s], costs, s, host) for s in range(schedule.stages)]


def host_peak(schedule: Schedule, costs: Costs, host: HostMemory) -> tuple[float, ...]:
    """Per stage, the most that waits in host memory at once; it depends on the order alone, not on times.

    Raises ConfigError where one entry alone needs more than the device has.
    """
    peaks = []
    for stage, tier in enumerate(tiers(schedule, costs, host)):
        if tier is not None:
            for entry in schedule.entries[stage]:
                tier.begin(entry)
                tier.end(entry, 0.0)
        peaks.append(tier.host_peak if tier is not None else 0.0)
    return tuple(peaks)
