"""What is kept of many measurements of one thing: robust summaries, and the messages of a flow reduced to delay and rate.

In: durations, or the stamps of messages. Out: `Sample`, `FlowSample`. All times in ms, but for stamps (Unix times in s).

A message is sent at s by the sender's clock and arrives at a by the receiver's. Messages of a link leave one after the other,
each occupies it for `wire` (size by rate), then takes `delay`; so message i begins at max(s_i, begin of the one before + wire),
and a_i = begin_i + wire + delay + offset of the clocks. `delay` is therefore measured with that offset in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_TO_SIGMA = 1.4826  # of normal samples: standard deviation by median absolute deviation
_QUEUED_SHARE = 0.5  # a message that arrived later than an unqueued one by this share of the gap before it had queued
_LEAST_QUEUED = 3  # messages, for a rate
_EXPLAINED = 0.5  # of the differences between messages that may be left when queueing is taken out
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
    delays_ms, wire = _delays(ordered, 0.0), NO_SAMPLE
    if known == len(ordered) and (found := _wire(ordered, transits_ms, least_ms)).size:
        behind_ms = _delays(ordered, found.median)
        if _variation(behind_ms) < _EXPLAINED * _variation(delays_ms):
            delays_ms, wire = behind_ms, found
    return FlowSample(at_s, least_ms, summary(delays_ms), wire, nbytes, upper_bound=False)


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
