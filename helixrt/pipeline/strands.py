"""The graphs of a stage that is trained alone: F, whole backward, and both woven.

In: a captured joint part, how many strands, how to profile. Out: a `Strands` ready to run (`single_stage`), with what
was decided on the way. All ranks of all groups that the graphs communicate in come here at the same time; before
anything runs they are shown to launch the same collectives in the same order.

Without communication there is nothing to hide, so nothing is profiled and both strands progress evenly. Where both strands
draw random numbers the backward runs before the forward: which numbers each gets may not depend on measured times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from helixrt.passes import nodes
from helixrt.passes.agree import agree
from helixrt.passes.classify import strand
from helixrt.passes.early import early
from helixrt.passes.estimate import Supposed
from helixrt.passes.executable import Executable
from helixrt.passes.flat import Memory, flat, slack_of
from helixrt.passes.fuse import fuse
from helixrt.passes.group_private import group_named
from helixrt.passes.groups import group_name, transport
from helixrt.passes.inductor_private import compiled
from helixrt.passes.operators import Operator
from helixrt.passes.pair import Pairing, Rules, baseline, pair, retimed
from helixrt.passes.parts import Part, Split
from helixrt.passes.profile import Mode, Profile, planning_group, profile
from helixrt.passes.split import split, whole_backward
from helixrt.passes.timing import BACKWARD, FORWARD, Place
from helixrt.passes.weave import alternating, weave
from helixrt.pipeline.shared_plan import planned_by_first

PUBLISHED = "eq2"  # the search of DHelix's paper

Saved = Mapping[str, Memory]


@dataclass(frozen=True)
class Plan:
    """How two strands are woven: the issue order, and from what; `pairing` is None where there was nothing to choose."""

    order: tuple[Place, ...]
    pairing: Pairing | None = None
    profile: Profile | None = None
    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()


@dataclass(frozen=True)
class Strands:
    """A stage's graphs; `woven` and `plan` are None with a single strand."""

    split: Split
    forward: Executable
    backward: Executable
    woven: Executable | None = None
    plan: Plan | None = None


def build(
    joint: Part,
    *,
    strands: int = 2,
    mode: Mode | str = Mode.AUTO,
    rules: Rules | None = None,
    codegen: str = "eager",
    supposed: Mapping[str, Supposed] | None = None,
) -> Strands:
    """The graphs of a captured stage. `strands` is 1 or 2; `mode` and `rules` are for the pairing.

    With `supposed` (see `profile`) this process plans for ranks that do not exist, and no agreement is needed.

    Raises VerifyError when a pass breaks a graph, DisagreementError when ranks would launch other collectives,
    CompileError when `codegen` is "inductor" and that fails.
    """
    halves = split(joint)
    forward, backward = halves.forward, early(whole_backward(halves))
    if codegen == "inductor":
        forward, backward = fuse(forward, compiled), fuse(backward, compiled)
    parts = [forward, backward]
    plan = None
    if strands == 2:
        if supposed is None:
            agree_among_ranks(parts)  # profiling runs the collectives, and would hang as training would
        plan = planned(forward, backward, mode, rules, supposed)
        parts.append(weave(forward, backward, plan.order))
    if supposed is None:
        agree_among_ranks(parts)
    runnable = [Executable(part) for part in parts]
    return Strands(halves, runnable[0], runnable[1], runnable[2] if plan else None, plan)


def planned(
    forward: Part,
    backward: Part,
    mode: Mode | str = Mode.AUTO,
    rules: Rules | None = None,
    supposed: Mapping[str, Supposed] | None = None,
    saved: Saved | None = None,
    group: Any = None,
) -> Plan:
    """The order to weave in: the fastest found, kept to the memory of one strand.

    `group` are the ranks that make the same plan; see `profile` for its default.
    `saved` is where what the backward takes in lies (`flat.lying_in`), if its own forward is not `forward`.
    """
    if all(any(map(nodes.is_random, part.graph.nodes)) for part in (forward, backward)):
        listed = [(which, len(strand(part))) for which, part in ((BACKWARD, backward), (FORWARD, forward))]
        return Plan(tuple((which, index) for which, count in listed for index in range(count)))
    if not any(nodes.communicates(node) for part in (forward, backward) for node in part.graph.nodes):
        return Plan(tuple(flat(forward, backward, alternating(forward, backward), saved=saved)))
    measured = profile([forward, backward], group, mode=mode, supposed=supposed)
    strands = tuple(measured.operators(forward)), tuple(measured.operators(backward))
    planners = None if supposed is not None else group if group is not None else planning_group(measured.groups)
    pairing = planned_by_first(planners, lambda: paired(forward, backward, measured, rules, saved), strands, measured.overlap)
    return Plan(pairing.order, pairing, measured, *strands)


def paired(forward: Part, backward: Part, measured: Profile, rules: Rules | None = None, saved: Saved | None = None) -> Pairing:
    """The fastest order found that keeps to the memory rule; `saved` as in `planned`."""
    strands = measured.operators(forward), measured.operators(backward)
    pairing = flattened(forward, backward, pair(*strands, measured.overlap, rules), measured, saved)
    if pairing.policy != PUBLISHED:  # putting off what does not fit can cost a tight order more than a loose one
        other = baseline(PUBLISHED, *strands, measured.overlap, rules)
        pairing = min(pairing, flattened(forward, backward, other, measured, saved), key=lambda found: found.predicted_us)
    return pairing


def flattened(forward: Part, backward: Part, pairing: Pairing, measured: Profile, saved: Saved | None = None) -> Pairing:
    """A pairing of the two parts, kept to `flat.slack_of` the memory of one strand; `saved` as in `planned`."""
    order = flat(forward, backward, pairing.order, slack_of(forward), saved)
    if tuple(order) == pairing.order:
        return pairing
    return retimed(pairing, measured.operators(forward), measured.operators(backward), order, measured.overlap)


def group_names(parts: Iterable[Part]) -> list[str]:
    """The groups that the parts communicate in, in the order they are first used."""
    names = [group_name(node) for part in parts for node in part.graph.nodes if nodes.communicates(node)]
    return list(dict.fromkeys(names))


def agree_among_ranks(parts: list[Part]) -> None:
    """`agree` in every group that the parts communicate in, in the order they are first used."""
    for name in group_names(parts):
        group = group_named(name)
        agree(parts, group, device=transport(group)[1])
