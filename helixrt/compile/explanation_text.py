"""An explanation as text: what was captured, what each strand is made of, what hides behind what.

In: an `Explanation`. Out: lines. Equal operators are one line; JSON has each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from helixrt.passes.operators import COMMUNICATION, Kind, Operator
from helixrt.passes.timing import BACKWARD, Place, work_us
from helixrt.pipeline.strands import Plan

if TYPE_CHECKING:
    from helixrt.compile.explanation import Explanation

MIB = 1 << 20
SHOWN_PAIRS, SHOWN_OPERATORS, SHOWN_BEHIND = 20, 12, 4
WIDEST = 72  # characters of an operator's signature


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
    for one in explanation.supposed.values():
        found.append(f"  supposed: {one}; an estimate, only compute is measured")
    plan = explanation.plan
    if plan is None:
        return found
    pairing = plan.pairing
    if pairing is None:
        found.append("  no communication: nothing to hide, the strands alternate")
        if (timings := explanation.timings()) is not None:
            found.append(f"  predicted: {timings[1].total_us / 1e3:.2f} ms of compute")
    else:
        found.append(
            f"  predicted: {pairing.predicted_us / 1e3:.2f} ms woven ({pairing.policy}), "
            f"{pairing.sequential_us / 1e3:.2f} ms one after the other, {pairing.bound_us / 1e3:.2f} ms at least; "
            f"{pairing.hidden_us / 1e3:.2f} of {pairing.communication_us / 1e3:.2f} ms of communication hidden"
        )
    if plan.profile is not None and plan.profile.unsteady:
        found.append(
            f"  the machine was too busy: {len(plan.profile.unsteady)} of {len(plan.profile.times) + len(plan.profile.pairs)} "
            "times vary from run to run, or cannot be; they are used here and not kept; measure again when it is idle"
        )
    for name, operators in (("backward", plan.backward), ("forward", plan.forward)):
        if operators:
            found += ["", *strand_lines(name, operators)]
    if pairing is not None:
        found += ["", "what hides behind what (b backward, f forward)"]
        for pair in pairing.pairs[:SHOWN_PAIRS]:
            places = sorted((*pair.behind, *pair.beside), key=lambda place: -operator_at(plan, place).time_us)
            behind = ", ".join(called(plan, place) for place in places[:SHOWN_BEHIND]) or "nothing"
            more = f" and {len(places) - SHOWN_BEHIND} more" if len(places) > SHOWN_BEHIND else ""
            exposed = f", {pair.exposed_us / 1e3:.2f} ms exposed" if pair.exposed_us >= 5.0 else ""
            found.append(f"  {called(plan, pair.collective)}: {pair.hidden_us / 1e3:.2f} ms behind {behind}{more}{exposed}")
        if len(pairing.pairs) > SHOWN_PAIRS:
            found.append(f"  ... and {len(pairing.pairs) - SHOWN_PAIRS} more; all are in explain().plan.pairing.pairs")
    return found


def strand_lines(name: str, operators: Sequence[Operator]) -> list[str]:
    """A strand's operators, those that take longest first; equal operators are one line."""
    compute = sum(map(work_us, operators)) / 1e3
    talk = sum(operator.time_us for operator in operators if operator.kind in COMMUNICATION) / 1e3
    found = [f"{name} strand: {compute:.2f} ms of work for the processor, {talk:.2f} ms of communication"]
    alike: dict[tuple[str, Kind], list[float]] = defaultdict(list)
    for operator in operators:
        if operator.kind is Kind.COMPUTE or operator.kind in COMMUNICATION:
            alike[operator.signature, operator.kind].append(operator.time_us)
    ordered = sorted(alike.items(), key=lambda item: -sum(item[1]))
    found.append(f"  {'total ms':>9} {'times':>5} {'each ms':>8}  {'class':24} operator")
    for (signature, kind), times in ordered[:SHOWN_OPERATORS]:
        each, total = sum(times) / len(times) / 1e3, sum(times) / 1e3
        found.append(f"  {total:9.3f} {len(times):5} {each:8.3f}  {kind!s:24} {shortened(signature)}")
    rest = ordered[SHOWN_OPERATORS:]
    if rest:
        total = sum(sum(times) for _, times in rest) / 1e3
        found.append(f"  {total:9.3f} {sum(len(times) for _, times in rest):5} {'':8}  {'':24} {len(rest)} others")
    return found


def shortened(signature: str) -> str:
    name = signature.removeprefix("aten.")
    return name if len(name) <= WIDEST else name[: WIDEST - 3] + "..."


def sized(count: int) -> str:
    """A number of bytes, readable."""
    return f"{count / MIB:,.1f} MiB" if count >= MIB else f"{count / 1024:.1f} KiB"


def called(plan: Plan, place: Place) -> str:
    """An operator as the report calls it."""
    return f"{'b' if place[0] == BACKWARD else 'f'}.{operator_at(plan, place).node}"


def operator_at(plan: Plan, place: Place) -> Operator:
    return (plan.backward if place[0] == BACKWARD else plan.forward)[place[1]]
