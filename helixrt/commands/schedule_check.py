"""`helixrt schedule check FILE`: whether an order can run, what it holds, how long it takes, and how far that is from the best.

In: an order in a file (torch.distributed.pipelining's CSV, or our JSON) and costs, as `helixrt schedule` takes them. Out: on
stdout or in a file, findings as text or JSON: deadlock, memory beside the caps, the exact time, the gap to the proven bound,
and with `--prices` what a step would save. A file that is no order is a ConfigError with line and column.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace

from helixrt.commands import order_file, output
from helixrt.commands import problem as problems
from helixrt.errors import ConfigError
from helixrt.schedule.check import check, check_microbatch_order
from helixrt.schedule.costs import Costs
from helixrt.schedule.exchange.as_json import gap
from helixrt.schedule.exchange.svg import number
from helixrt.schedule.ir import Schedule, ScheduleError
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.simulate import Comm, Delegated, simulate

FAILED = 1
_SLIP = 1e-9  # relative; memory is a sum of floats


@dataclass(frozen=True)
class Memory:
    """Of one stage, in the costs' unit; `cap` is None where there is none."""

    stage: int
    peak: float
    cap: float | None

    @property
    def fits(self) -> bool:
        return self.cap is None or self.peak <= self.cap * (1 + _SLIP)


@dataclass(frozen=True)
class Times:
    """Exact, in ms. No order is faster than `bound_ms`: within the caps if this one keeps them, else of all orders.

    `send_queue`: room for so many messages in each direction between two stages, of activations and of gradients each, is
    enough for the order not to block.
    """

    makespan_ms: float
    bound_ms: float
    gap: float
    bubble_rate: float
    send_queue: int


@dataclass(frozen=True)
class Worth:
    """What a step saves: `per_ms` for each of the first `upto_ms` that `place` takes less, `all_ms` if it took no time."""

    place: str
    now_ms: float
    per_ms: float
    upto_ms: float
    all_ms: float


@dataclass(frozen=True)
class Planned:
    """What another order saves: found, and at most. With `more` memory on a stage, beyond what an order within the caps of
    now saves; without (`stage` None), under the same costs."""

    stage: int | None
    more: float
    saved_ms: float
    most_ms: float


@dataclass(frozen=True)
class Findings:
    """For an order that cannot run, `blocked` is the reason, and the other fields are empty.

    `out_of_order`: what a chunk does out of micro-batch order; "" if nothing. Such an order runs, and its gradients differ in
    bits from those of orders that are not.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    blocked: str | None
    out_of_order: str = ""
    memory: tuple[Memory, ...] = ()
    times: Times | None = None
    worth: tuple[Worth, ...] = ()
    planned: tuple[Planned, ...] = ()

    @property
    def passed(self) -> bool:
        return self.blocked is None and all(each.fits for each in self.memory)


def run(args: argparse.Namespace) -> int:
    """Print the findings. Returns 0, or 1 for an order that blocks, is incomplete or does not fit. Raises ConfigError."""
    if args.file is None:
        raise ConfigError("helixrt schedule check", "''", "needs the order's file, before options")
    for option in ("policy", "order", "chunks", "time_limit"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')}", getattr(args, option), "does not go with check")
    if args.exact:
        raise ConfigError("--exact", True, "does not go with check")
    form, comm = output.chosen_format(args, ("text", "json")), problems.comm(args.comm)
    schedule = order_file.read("FILE", args.file)
    found = findings(schedule, order_file.costs(args, schedule), comm, prices=args.prices)
    written = json.dumps({**asdict(found), "passed": found.passed}, indent=1) + "\n" if form == "json" else text(found)
    output.put(args, written)
    return 0 if found.passed else FAILED


def findings(schedule: Schedule, costs: Costs, comm: Comm, *, prices: bool = False) -> Findings:
    """All findings about an order under costs of its own placement."""
    found = Findings(schedule.name, schedule.stages, schedule.microbatches, schedule.chunks, None)
    try:
        check(schedule)
    except ScheduleError as error:
        return replace(found, blocked=str(error))
    try:
        check_microbatch_order(schedule)
    except ScheduleError as error:
        found = replace(found, out_of_order=str(error))
    caps = [None if math.isinf(cap) else cap for cap in costs.memory]
    held = zip(range(schedule.stages), peak_memory(schedule, costs), caps, strict=True)
    found = replace(found, memory=tuple(Memory(*row) for row in held))
    timeline = simulate(schedule, costs, comm)
    bound_ms = order_file.bound_ms(schedule, costs if found.passed else replace(costs, memory=()))
    times = Times(
        timeline.makespan_ms, bound_ms, gap(timeline.makespan_ms, bound_ms), timeline.bubble_rate, _send_queue(schedule)
    )
    found = replace(found, times=times)
    return replace(found, worth=_worth(schedule, costs, comm), planned=_planned(schedule, costs, comm)) if prices else found


def _send_queue(schedule: Schedule) -> int:
    """The least room with which the order does not block: more room never makes a stage wait longer."""
    least, enough = 1, schedule.microbatches * schedule.chunks
    while least < enough:
        middle = (least + enough) // 2
        try:
            check(schedule, middle)
            enough = middle
        except ScheduleError:
            least = middle + 1
    return enough


def _worth(schedule: Schedule, costs: Costs, comm: Comm) -> tuple[Worth, ...]:
    from helixrt.schedule.planner.prices import Kind, prices  # loads the planner

    return tuple(
        Worth(price.place, price.now_ms, price.per_ms, price.holds_ms, price.saved_ms(price.now_ms))
        for price in prices(schedule, costs, comm)
        if price.kind is not Kind.OPERATION
    )


def _planned(schedule: Schedule, costs: Costs, comm: Comm) -> tuple[Planned, ...]:
    """By the planner, which plans whole steps for delegated communication: nothing for other orders."""
    if schedule.forward_only or not isinstance(comm, Delegated):
        return ()
    from helixrt.schedule.planner.prices import more_memory, replanned

    again = replanned(schedule, costs, costs)
    found = [Planned(None, 0.0, again.saved_ms, again.most_ms)]
    for stage, cap in enumerate(costs.memory):
        if math.isfinite(cap):
            more = sum(costs.activation[chunk] for chunk in schedule.held[stage])
            answer = more_memory(again.schedule, costs, more, [stage])
            found.append(Planned(stage, more, answer.saved_ms, answer.most_ms))
    return tuple(found)


def text(found: Findings) -> str:
    """The findings for a person."""
    chunks = f", {found.chunks} chunks" if found.chunks != found.stages else ""
    lines = [f"{found.name}: {found.stages} stages, {_many(found.microbatches, 'micro-batch', 'es')}{chunks}"]
    times = found.times
    if times is None:
        return "\n".join([*lines, f"cannot run: {found.blocked}"]) + "\n"
    room = f"{_many(times.send_queue, 'message', 's')} of a kind in each direction between two stages"
    lines.append(f"no deadlock; room for {room} is enough")
    if found.out_of_order:
        lines.append(f"cannot be with adapt: {found.out_of_order}")
    lines += _memory_lines(found.memory)
    under = "" if found.passed else ", of orders without caps"
    lines.append(f"step {number(times.makespan_ms)} ms exactly, idle {times.bubble_rate:.1%}")
    lines.append(f"proven bound {number(times.bound_ms)} ms{under}: gap {times.gap:.2%}")
    if found.worth:
        lines += ["", *_worth_lines(found.worth)]
    if found.planned:
        lines += ["", *map(_planned_line, found.planned)]
    return "\n".join(lines) + "\n"


def _many(count: int, what: str, ending: str) -> str:
    return f"{count} {what}{ending * (count != 1)}"


def _memory_lines(memory: tuple[Memory, ...]) -> list[str]:
    peaks = "memory per stage: " + " ".join(number(each.peak) for each in memory)
    if all(each.cap is None for each in memory):
        return [f"{peaks}, no caps"]
    caps = " ".join("-" if each.cap is None else number(each.cap) for each in memory)
    over = [
        f"does not fit: stage {each.stage} holds {number(each.peak)} of {number(each.cap or 0.0)}"
        for each in memory
        if not each.fits
    ]
    return [f"{peaks} of {caps}" + ("" if over else ", fits"), *over]


def _worth_lines(worth: tuple[Worth, ...]) -> list[str]:
    head = ("ms saved of a step", "takes ms", "per ms less", "for the first ms", "if it took none")
    rows = [(each.place, number(each.now_ms), number(each.per_ms), number(each.upto_ms), number(each.all_ms)) for each in worth]
    return output.table([head, *rows])


def _planned_line(planned: Planned) -> str:
    what = "another order" if planned.stage is None else f"{number(planned.more)} more memory on stage {planned.stage}"
    limit = "which is the most" if planned.most_ms <= planned.saved_ms + 1e-6 else f"at most {number(planned.most_ms)}"
    return f"{what} saves {number(planned.saved_ms)} ms, {limit}"
