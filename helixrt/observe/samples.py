"""What is kept of many measurements of one thing: robust summaries, and the messages of a flow reduced to delay and rate.

In: durations, or the stamps of messages. Out: `Sample`, `FlowSample`. All times in ms, but for stamps (Unix times in s).

A message is sent at s by the sender's clock and arrives at a by the receiver's. Messages of a link leave one after the other,
each occupies it for `wire` (size by rate), then takes `delay`; so message i begins at max(s_i, begin of the one before + wire),
and a_i = begin_i + wire + delay + offset of the clocks. `delay` is therefore measured with that offset in it.

Messages of several queues share a link of limited rate: they arrive in another order, and with other gaps, than one after the
other. But of messages with equal sizes the j-th arrival is never earlier than if they went one after the other, and the last
one of those that the link carried without a pause is as late. By that wire and delay are found, too (`_shared`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

_TO_SIGMA = 1.4826  # of normal samples: standard deviation by median absolute deviation
_QUEUED_SHARE = 0.5  # a message that arrived later than an unqueued one by this share of the gap before it had queued
_LEAST_QUEUED = 3  # messages, for a rate
_EXPLAINED = 0.5  # of the differences between messages that may be left when queueing is taken out
_HALVINGS = 20  # of the interval in which a shared wire is
_SAME_GAP = 0.25  # spread of the gaps behind queued messages, by their median, up to which they are the wire's


class Sample(NamedTuple):
    """Median and robust standard deviation of `size` measurements."""

    median: float
    spread: float
    size: int


class Stamped(NamedTuple):
    """One message. `exact`: `arrived_s` is when it arrived, else only when it was taken."""

    sent_s: float
    arrived_s: float
    exact: bool


class FlowSample(NamedTuple):
    """A step's messages of one flow. `least_ms`: the smallest difference of the stamps, which bounds the clocks' offset."""

    at_s: float  # sender's clock, median
    least_ms: float
    delay: Sample
    wire: Sample  # size 0: no message queued behind another
    nbytes: int
    upper_bound: bool  # of the delay: no arrival is known


NO_SAMPLE = Sample(0.0, 0.0, 0)


def summary(values: Sequence[float]) -> Sample:
    """Of at least one value."""
    if len(values) == 1:
        return Sample(values[0], 0.0, 1)
    ordered = sorted(values)
    middle = _middle(ordered)
    return Sample(middle, _TO_SIGMA * _middle(sorted([abs(value - middle) for value in ordered])), len(ordered))


def median(values: Sequence[float]) -> float:
    """Of at least one value."""
    return _middle(sorted(values))


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def flow_sample(messages: Sequence[Stamped], nbytes: int) -> FlowSample:
    """Of at least one message.

    A message whose arrival was not recorded arrived at the latest when it was taken. Those that were waited for are the late
    ones: the delay is theirs if they are at least half of all, else it is at most the smallest difference there is.
    """
    ordered = sorted(messages)
    transits_ms = [(m.arrived_s - m.sent_s) * 1e3 for m in ordered]
    least_ms, at_s = min(transits_ms), ordered[len(ordered) // 2].sent_s
    exact = [m.exact for m in ordered]
    known = sum(exact)
    if 2 * known < len(ordered):
        return FlowSample(at_s, least_ms, Sample(least_ms, 0.0, len(ordered)), NO_SAMPLE, nbytes, upper_bound=True)
    delays_ms = _delays(ordered, 0.0)
    best = summary(delays_ms), NO_SAMPLE
    least = _EXPLAINED * _variation(delays_ms)
    if known == len(ordered):
        for left_ms, delay, wire in _queued(ordered, transits_ms, least_ms):
            if (variation := _variation(left_ms)) < least:
                best, least = (delay, wire), variation
    return FlowSample(at_s, least_ms, *best, nbytes, upper_bound=False)


def _queued(
    ordered: Sequence[Stamped], transits_ms: Sequence[float], least_ms: float
) -> Iterator[tuple[list[float], Sample, Sample]]:
    """How messages may have queued: the difference that is left of each, the delay, and the wire."""
    if (wire := _wire(ordered, transits_ms, least_ms)).size:
        left_ms = _delays(ordered, wire.median)
        yield left_ms, summary(left_ms), wire
    if (shared := _shared(ordered)) is not None:
        wire_ms, delay_ms, later_ms = shared
        count, varied_ms = len(ordered), _variation(transits_ms)
        if not _QUEUED_SHARE * count * wire_ms < varied_ms < _QUEUED_SHARE * count**2 * wire_ms:
            return  # a burst that queues varies by a quarter of count**2 wires; messages that do not, by nothing
        delay = Sample(delay_ms, summary(later_ms).spread, len(ordered))
        yield later_ms, delay, Sample(wire_ms, 0.0, len(later_ms))


def _delays(ordered: Sequence[Stamped], wire_ms: float) -> list[float]:
    """Of the messages whose arrival is known, what is left when queueing and the wire are taken out."""
    begin_s, found = -math.inf, []
    for message in ordered:
        begin_s = max(message.sent_s, begin_s + wire_ms * 1e-3)
        if message.exact:
            found.append((message.arrived_s - begin_s) * 1e3 - wire_ms)
    return found


def _variation(values: Sequence[float]) -> float:
    middle = median(values)
    return sum([abs(value - middle) for value in values])


def _wire(ordered: Sequence[Stamped], transits_ms: Sequence[float], least_ms: float) -> Sample:
    """How long a message occupies the link: the gap between two arrivals, where the second message queued behind the first."""
    gaps_ms = []
    for i in range(1, len(ordered)):
        gap_ms = (ordered[i].arrived_s - ordered[i - 1].arrived_s) * 1e3
        if gap_ms > 0 and transits_ms[i] - least_ms > _QUEUED_SHARE * gap_ms:
            gaps_ms.append(gap_ms)
    if len(gaps_ms) < _LEAST_QUEUED or 4 * len(gaps_ms) < len(ordered):
        return NO_SAMPLE
    found = summary(gaps_ms)
    return found if found.spread <= _SAME_GAP * found.median else NO_SAMPLE


def _shared(ordered: Sequence[Stamped]) -> tuple[float, float, list[float]] | None:
    """Wire, delay, and how much later each arrival was than if the messages had gone one after the other: of the longest run of
    messages that were on their way together; None where most were not. The least wire for which none came too early."""
    run = max(_together(ordered), key=len)
    if len(run) <= _LEAST_QUEUED or 2 * len(run) < len(ordered):
        return None
    sent_s, arrived_s = [m.sent_s for m in run], sorted([m.arrived_s for m in run])

    def later_ms(wire_s: float) -> list[float]:
        free_s, found = -math.inf, []
        for begin_s, end_s in zip(sent_s, arrived_s, strict=True):
            free_s = max(begin_s, free_s) + wire_s
            found.append((end_s - free_s) * 1e3)
        return found

    low_s, high_s = 0.0, max(_gaps(arrived_s))  # by the largest gap the last arrival is the least late
    for _ in range(_HALVINGS):
        middle_s = 0.5 * (low_s + high_s)
        later = later_ms(middle_s)
        low_s, high_s = (low_s, middle_s) if later[-1] <= min(later) else (middle_s, high_s)
    later = later_ms(high_s)
    return high_s * 1e3, min(later), [value - min(later) for value in later]


def _together(ordered: Sequence[Stamped]) -> list[list[Stamped]]:
    """Runs of messages, each of which the link carried behind earlier ones, whatever the two clocks differ by: the link is free
    about a wire after an arrival, less the smallest difference. A run that is too long does no harm."""
    if len(ordered) < 2:
        return [list(ordered)]
    carried_s = 2 * median(_gaps(sorted([m.arrived_s for m in ordered]))) - min(m.arrived_s - m.sent_s for m in ordered)
    runs: list[list[Stamped]] = []
    last_s = -math.inf
    for message in ordered:
        if message.sent_s >= last_s:
            runs.append([])
        runs[-1].append(message)
        last_s = max(last_s, message.arrived_s + carried_s)
    return runs


def _gaps(values: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]
