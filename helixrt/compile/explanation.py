"""What `explain()` says: whether a model is captured and woven, its operators, and what hides behind what.

In: the graphs of a stage and how they were planned. Out: an `Explanation`; printed, it is a report, and its fields have
what the report is made of. Times are predictions, in milliseconds, for one backward woven with one forward.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from helixrt.compile.options import Options
from helixrt.passes.classify import classify, strand
from helixrt.passes.flat import lying_in, usage
from helixrt.passes.groups import Group
from helixrt.passes.operators import Operator
from helixrt.passes.parts import Part, Stamp
from helixrt.passes.profile import device_of
from helixrt.passes.timing import BACKWARD, FORWARD, Place
from helixrt.pipeline.strands import Plan, Strands

MIB = 1 << 20
SHOWN_PAIRS = 20


@dataclass(frozen=True)
class Explanation:
    """`state` is "woven", "single strand", "fallback" (see `reason`), or says that there is nothing yet.

    `counts` has the operators of each graph by kind. `plan` has the operators with their times, the order, the pairs and
    the predicted times; its pairing is None for a model that does not communicate. `measured_ms` are medians of each
    graph's latest runs (on processors; a GPU's graphs are not timed). Memory is what the model's tensors
    need besides parameters, gradients and inputs, at most, of one strand and of two.
    """

    state: str
    reason: str = ""
    seconds: float = 0.0
    stamps: tuple[Stamp, ...] = ()
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    plan: Plan | None = None
    measured_ms: dict[str, float] = field(default_factory=dict)
    single_peak_bytes: int = 0
    woven_peak_bytes: int = 0
    code: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(lines(self))


def explained(strands: Strands, seconds: float, options: Options) -> Explanation:
    """The explanation of graphs that are in use."""
    forward, backward = strands.forward.part, strands.backward.part
    parts = {"forward": forward, "backward": backward}
    if strands.woven is not None:
        parts["woven"] = strands.woven.part
    single, woven = peaks(forward, backward, strands.plan)
    reason = ""
    if strands.woven is None:
        reason = "microbatches=1: nothing to weave with" if options.strands == 2 else "strands=1"
    return Explanation(
        state="single strand" if strands.woven is None else "woven",
        reason=reason,
        seconds=seconds,
        stamps=parts["woven"].stamps if strands.woven else backward.stamps,
        counts={name: counted(part) for name, part in parts.items()},
        plan=strands.plan,
        measured_ms=measured(strands),
        single_peak_bytes=single,
        woven_peak_bytes=woven,
        code={name: part.code() for name, part in parts.items()},
    )


def counted(part: Part) -> dict[str, int]:
    """How many operators there are of each kind; all communication counts as inside the node here."""
    groups = _AnyGroup()
    return dict(Counter(str(kind) for kind in classify(part, groups).values()))


def measured(strands: Strands) -> dict[str, float]:
    """Median time of each graph's latest runs."""
    graphs = {"forward": strands.forward, "backward": strands.backward, "woven": strands.woven}
    if device_of([strands.forward.part]).type != "cpu":
        return {}
    return {name: 1e3 * statistics.median(graph.took_s) for name, graph in graphs.items() if graph and graph.took_s}


def peaks(forward: Part, backward: Part, plan: Plan | None) -> tuple[int, int]:
    """The most alive at a time, one strand after the other and in the planned order, in bytes."""
    memory = lying_in(forward)
    apart = [usage(forward, range(len(strand(forward)))), usage(backward, range(len(strand(backward))), memory)]
    single = max(each.peak for each in apart)
    if plan is None:
        return single, single
    orders = [[index for which, index in plan.order if which == wanted] for wanted in (FORWARD, BACKWARD)]
    both = usage(forward, orders[FORWARD]), usage(backward, orders[BACKWARD], memory)
    at, most = [0, 0], both[FORWARD].before[0] + both[BACKWARD].before[0]
    for which, _ in plan.order:
        most = max(most, both[which].during[at[which]] + both[1 - which].before[at[1 - which]])
        at[which] += 1
    return single, most


def lines(explanation: Explanation) -> list[str]:
    head = explanation.state + (f" ({explanation.reason})" if explanation.reason else "")
    if not explanation.counts:
        return [head]
    found = [f"{head}, ready after {explanation.seconds:.1f} s"]
    for name, counts in explanation.counts.items():
        found.append(f"  {name:9}" + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    found.append(
        f"  memory: at most {sized(explanation.single_peak_bytes)} of activations"
        + (f" with one strand, {sized(explanation.woven_peak_bytes)} with two" if explanation.state == "woven" else "")
    )
    if explanation.measured_ms:
        found.append("  measured: " + ", ".join(f"{name} {took:.2f} ms" for name, took in explanation.measured_ms.items()))
    plan = explanation.plan
    if plan is None:
        return found
    pairing = plan.pairing
    if pairing is None:
        return [*found, "  no communication: nothing to hide, the strands alternate"]
    found.append(
        f"  predicted: {pairing.predicted_us / 1e3:.2f} ms woven ({pairing.policy}), {pairing.sequential_us / 1e3:.2f} ms one "
        f"after the other, {pairing.bound_us / 1e3:.2f} ms at least; {pairing.hidden_us / 1e3:.2f} of "
        f"{pairing.communication_us / 1e3:.2f} ms of communication hidden"
    )
    for pair in pairing.pairs[:SHOWN_PAIRS]:
        behind = ", ".join(called(plan, place) for place in (*pair.behind, *pair.beside)) or "nothing"
        found.append(f"  {called(plan, pair.collective)}: {pair.hidden_us / 1e3:.2f} ms behind {behind}")
    if len(pairing.pairs) > SHOWN_PAIRS:
        found.append(f"  ... and {len(pairing.pairs) - SHOWN_PAIRS} more: explain().plan.pairing.pairs")
    return found


def sized(count: int) -> str:
    """A number of bytes, readable."""
    return f"{count / MIB:,.1f} MiB" if count >= MIB else f"{count / 1024:.1f} KiB"


def called(plan: Plan, place: Place) -> str:
    """An operator as the report calls it."""
    operators: tuple[Operator, ...] = plan.backward if place[0] == BACKWARD else plan.forward
    return f"{'b' if place[0] == BACKWARD else 'f'}.{operators[place[1]].node}"


class _AnyGroup(dict[str, Group]):
    """Takes every group to be on one host: counting needs no exchange among ranks."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> Group:
        return Group((1,))
