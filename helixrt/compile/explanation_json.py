"""An explanation as plain data, for JSON: keys stay as they are here, new ones may come.

- `format`: "helixrt strands 1". `state`, `reason`, `seconds` (to capture, plan and weave), `passes`: [name, seconds].
- `graphs`: for "forward", "backward" and "woven" their operators by class. `measured_ms`: of graphs that have run.
- `memory_bytes`: `single` and `woven`, the most of activations alive at a time.
- `supposed`: groups planned for without being there: `ranks_per_host`, `latency_us`, `mbit_per_s`, `host_share`.
- `strands`: for "forward" and "backward" a list of operators, `name`, `class`, `module`, `signature`, `layer` (or null),
  `time_us`, `host_us` (of a collective: how long it keeps the processor), `measured` (false: an estimate), `steady`
  (false: the machine was too busy to tell), `bytes`, `movable`, `needs` (indices in the same list). Empty where nothing was
  profiled.
- `plan`, or null: `policy`, `predicted_us`, `sequential_us`, `bound_us`, `compute_us`, `communication_us`, `hidden_us`,
  `hidden_share` (of what a perfect plan saves); `order`: [strand, index] in issue order; `pairs`: `collective`, `behind`,
  `beside`, `hidden_us`, `exposed_us`; `timeline` and `sequential_timeline`: for `processor` and `network` a list of
  [strand, index, class, start_us, end_us]; on the processor a wait is the time in which it is idle. `unsteady`: signatures
  (pairs as "A with B") whose times cannot be trusted.

Strands are "forward" and "backward"; places are [strand, index].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from helixrt.passes.operators import COMMUNICATION, Operator
from helixrt.passes.timing import Place, Span, Timing, work_us
from helixrt.pipeline.strands import Plan

if TYPE_CHECKING:
    from helixrt.compile.explanation import Explanation

FORMAT = "helixrt strands 1"
STRANDS = ("forward", "backward")


def plain(explanation: Explanation) -> dict[str, Any]:
    """Everything but the code of the graphs."""
    plan = explanation.plan
    operators = {"forward": plan.forward, "backward": plan.backward} if plan is not None else {name: () for name in STRANDS}
    return {
        "format": FORMAT,
        "state": explanation.state,
        "reason": explanation.reason,
        "seconds": explanation.seconds,
        "passes": [[stamp.name, stamp.seconds] for stamp in explanation.stamps],
        "graphs": explanation.counts,
        "measured_ms": explanation.measured_ms,
        "memory_bytes": {"single": explanation.single_peak_bytes, "woven": explanation.woven_peak_bytes},
        "supposed": {
            name: {
                "ranks_per_host": list(one.group.ranks_per_host),
                "latency_us": one.wire.latency_us,
                "mbit_per_s": one.wire.bytes_per_us * 8,
                "host_share": one.wire.host_share,
            }
            for name, one in explanation.supposed.items()
        },
        "strands": {
            name: [_operator(each, explanation.modules.get(name, {}), plan) for each in listed]
            for name, listed in operators.items()
        },
        "plan": _plan(explanation, plan) if plan is not None else None,
    }


def _operator(operator: Operator, modules: dict[str, str], plan: Plan | None) -> dict[str, Any]:
    time = plan.profile.times.get(operator.signature) if plan is not None and plan.profile is not None else None
    return {
        "name": operator.node,
        "class": str(operator.kind),
        "module": modules.get(operator.node, ""),
        "signature": operator.signature,
        "layer": operator.layer,
        "time_us": operator.time_us,
        "host_us": operator.host_us,
        "measured": time is not None and time.measured,
        "steady": time is None or time.steady,
        "bytes": operator.bytes,
        "movable": operator.movable,
        "needs": list(operator.needs),
    }


def _plan(explanation: Explanation, plan: Plan) -> dict[str, Any]:
    pairing, timings = plan.pairing, explanation.timings()
    listed = [*plan.forward, *plan.backward]
    before, after = timings if timings is not None else (None, None)
    talk = sum(operator.time_us for operator in listed if operator.kind in COMMUNICATION)
    return {
        "unsteady": list(plan.profile.unsteady) if plan.profile is not None else [],
        "policy": pairing.policy if pairing is not None else "alternating",
        "predicted_us": after.total_us if after is not None else None,
        "sequential_us": before.total_us if before is not None else None,
        "bound_us": pairing.bound_us if pairing is not None else None,
        "compute_us": sum(map(work_us, listed)),
        "communication_us": talk,
        "hidden_us": pairing.hidden_us if pairing is not None else 0.0,
        "hidden_share": pairing.hidden_share if pairing is not None else 1.0,
        "order": _places(plan.order),
        "pairs": [
            {
                "collective": _place(pair.collective),
                "behind": _places(pair.behind),
                "beside": _places(pair.beside),
                "hidden_us": pair.hidden_us,
                "exposed_us": pair.exposed_us,
            }
            for pair in (pairing.pairs if pairing is not None else ())
        ],
        "timeline": _timeline(after),
        "sequential_timeline": _timeline(before),
    }


def _timeline(timing: Timing | None) -> dict[str, list[list[Any]]] | None:
    if timing is None:
        return None
    return {"processor": list(map(_span, timing.processor)), "network": list(map(_span, timing.network))}


def _span(span: Span) -> list[Any]:
    return [*_place(span.place), str(span.kind), span.start_us, span.end_us]


def _places(places: Sequence[Place]) -> list[list[Any]]:
    return [_place(place) for place in places]


def _place(place: Place) -> list[Any]:
    return [STRANDS[place[0]], place[1]]
