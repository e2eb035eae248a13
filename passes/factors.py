"""Factors: from pairs that were measured to overlap factors of all pairs, as the pairing search takes them.

In: kinds, limits and measured pairs of operators, by signature. Out: how long each collective keeps the processor,
and an `Overlap`.

On a CPU, communication needs the processor itself. That part of a collective's time is its `host_us`: the processor
time of all threads of the process while it runs alone, or what compute loses beside it where that is less (other cores
may do the work). It cannot be hidden, so factors for the search count only the rest of the collective's time as to be
hidden; the factor of DHelix (section 3.2, equation 1), which counts all of it, is `Together.effectiveness`. On a GPU
`host_us` is 0 and the two are the same. A pair that was not measured gets the median of similar pairs: compute limited by the
same roof beside the same collective, else any compute beside it, else the pair's kinds.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

from helixrt.passes.classify import Time
from helixrt.passes.estimate import Limit
from helixrt.passes.measure import Together
from helixrt.passes.operators import COMMUNICATION, Kind, Overlap

ASSUMED = 0.9  # of compute with communication, and of both kinds of communication, where no pair was measured
SPAN = (-2.0, 1.0)  # factors beyond are noise
NO_REST = 0.05  # of a collective's time without its processor work: less is nothing to hide

Pairs = Mapping[tuple[str, str], Together]  # (compute, or collective inside a node; collective)


def host_us(kinds: Mapping[str, Kind], times: Mapping[str, Time], pairs: Pairs) -> dict[str, float]:
    """How long each collective keeps the processor."""
    found = {}
    for name, kind in kinds.items():
        if kind in COMMUNICATION:
            lost = [
                max(0.0, pair.together_us - pair.first_us)
                for (first, second), pair in pairs.items()
                if second == name and kinds[first] is Kind.COMPUTE and pair.first_us >= 0.8 * pair.second_us
            ]
            found[name] = min([times[name].host_us, *([statistics.median(lost)] if lost else [])])
    return found


def factor(pair: Together, second: Time) -> float:
    """How much of the shorter one's time is hidden, counting of the second's only what is not processor work.

    The second's time is what it takes elsewhere in the profile, not its time in this pair: a search that adds up
    profiled times then finds the loss that the pair had.
    """
    rest = second.time_us - min(second.host_us, second.time_us)
    if rest < NO_REST * second.time_us:
        return SPAN[1]
    gained = pair.first_us + second.time_us - pair.together_us
    return min(max(gained / min(pair.first_us, rest), SPAN[0]), SPAN[1])


def overlap(
    kinds: Mapping[str, Kind],
    limits: Mapping[str, Limit],
    times: Mapping[str, Time],
    pairs: Pairs,
    blocking: Collection[str] = (),
) -> Overlap:
    """Factors of all pairs of compute and communication. `limits` of compute operators; `times` with `host_us`.

    `blocking` communicate and keep the processor; beside them no other communication is counted as hidden.
    """
    measured = {names: factor(pair, times[names[1]]) for names, pair in pairs.items()}
    defaults = {}
    for both in (*(frozenset({Kind.COMPUTE, kind}) for kind in COMMUNICATION), COMMUNICATION):
        alike = [value for (one, other), value in measured.items() if {kinds[one], kinds[other]} == both]
        defaults[both] = statistics.median(alike) if alike else ASSUMED
    filled = dict(measured)
    for name in (name for name, kind in kinds.items() if kind in COMMUNICATION):
        beside = [(limits[one], value) for (one, other), value in measured.items() if other == name and one in limits]
        for one, limit in limits.items():
            if beside and (one, name) not in filled:
                alike = [value for roof, value in beside if roof is limit]
                filled[one, name] = statistics.median(alike or [value for _, value in beside])
        filled |= {(one, name): 0.0 for one in blocking}
    return Overlap(defaults, filled)
