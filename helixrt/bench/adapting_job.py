"""The adaptation loop in a whole job: replicas whose operations sleep, a link that becomes slow and recovers, a lost replica.

The job is `python -m helixrt.train`, with a tiny model whose F, B and W take at least so long (`chaos.slow`): what is measured
is the order of the schedule, the channels, the loop, and the life of a step. It begins with zb and may change its order; beside
it the same job keeps zb, with direct and with delegated communication. Scenarios: `slow-link`, in which a replica is killed
while the link is slow, and comes back; `flapping`, in which the link is slow in every other five steps, and the loop must do no
harm. A step's work is from when the first rank of a replica begins it to when the last one ends it; the exact simulation of the
order that the step's commit record names is beside it, and where the rest of the time went, along the step's critical path
(`_lateness`). Each run's folder, with its report, is kept with `--folder`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from helixrt.bench._arguments import add_json
from helixrt.bench._figures import write
from helixrt.bench._lateness import Lateness, lateness
from helixrt.bench.adaptation import Size
from helixrt.errors import ConfigError, Fatal
from helixrt.job.lineage_files import read_lineage
from helixrt.job.link_delays import link_delays
from helixrt.observe.estimator import place_of
from helixrt.observe.failures import replica_of
from helixrt.protocol.step.lineage import Log
from helixrt.record import Event, Kind, read_events
from helixrt.schedule.adaptation.stragglers import COMMS
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.exchange.as_json import read
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Op, Schedule
from helixrt.schedule.simulate import makespan_ms

FIRST = "zb"  # the order that every run begins with
SLOW_FROM, SLOW_TO, KILLED = 20, 60, 30
FLAP = 5
LIMIT_S = 1200.0  # of a run
WARM = 5  # the first step that is counted
STEADY = 4  # steps after which the order has followed a change
_TEXT = "the stages of a pipeline wait for each other, and a slow link makes all of them wait for it\n"

Links = Sequence[Mapping[str, Any]]  # as `chaos.link` has them


@dataclass(frozen=True)
class Step:
    """Of one replica: work as measured, the simulation of it, and the whole step from update to update; `order` by its hash;
    `late`: where the work's time went, None where the flight record lacks a part."""

    step: int
    work_ms: float
    simulated_ms: float
    whole_ms: float
    order: str
    late: Lateness | None


@dataclass(frozen=True)
class Run:
    """`steps` of replica 0; `changes` and `failures` as in report.json; `back`: for each replica that was lost, when it
    was, the first step of its new life, and its orders in the steps before and after."""

    name: str
    steps: list[Step]
    changes: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    back: list[dict[str, Any]]

    def work_ms(self, first: int, end: int) -> float:
        """The median of steps `first` to `end` - 1."""
        return median(each.work_ms for each in self.steps if first <= each.step < end)

    def late(self, first: int, end: int) -> dict[str, float]:
        """The medians of these steps."""
        return Lateness.medians([each.late for each in self.steps if first <= each.step < end and each.late is not None])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="4x12@20", help="STAGESxMICROBATCHES@MS of an operation")
    parser.add_argument("--scenario", default="slow-link", choices=["slow-link", "flapping"])
    parser.add_argument("--factor", type=float, default=6.0, help="the delay, in operations")
    parser.add_argument("--replicas", type=int, default=2, help="of slow-link; flapping has one")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--folder", type=Path, default=None, help="keep the folders of the runs here")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    size = Size.parse(args.size)
    flapping = args.scenario == "flapping"
    replicas = 1 if flapping else args.replicas
    if args.steps <= (2 * FLAP if flapping else SLOW_FROM + STEADY):
        raise ConfigError("--steps", args.steps, "must go beyond the first steps in which the link is slow")
    links = _links(size, args.factor, args.steps, flapping)
    kill = [] if flapping or replicas < 2 else [{"replica": 1, "step": KILLED, "moment": "forward"}]
    loop = ["schedule.adapt=on", f"chaos.kill={_listed(kill)}"]
    sides = {"adapting": (loop, "delegated"), "zb delegated": ([], "delegated"), "zb direct": (["pipeline.direct=2"], "direct")}
    if flapping:
        del sides["zb direct"]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) if args.folder is None else args.folder.resolve()
        runs = []
        for name, (settings, comm) in sides.items():
            folder = root / name.replace(" ", "-")
            _train(folder, size, replicas if name == "adapting" else 1, args.steps, links, settings)
            runs.append(_read(folder, name, size, links, comm))
    summary = _flapping(runs) if flapping else _slow_link(runs, args.steps)
    print(f"adapting_job: {args.scenario}, {replicas} replicas, {args.steps} steps of {size} with operations that sleep")
    for change in runs[0].changes:
        measured = "" if change["after_ms"] is None else f"; measured {change['before_ms']:.0f} -> {change['after_ms']:.0f} ms"
        predicted = f"{change['present_ms']:.0f} -> {change['predicted_ms']:.0f} ms predicted"
        print(f"  replica {change['replica']} after step {change['step']}: {predicted}{measured}; {change['why']}")
    for key, value in summary.items():
        print(f"  {key}: {value}")
    said = {name: getattr(args, name) for name in ("size", "scenario", "factor", "steps")} | {"replicas": replicas}
    write(args.json, "adapting_job", said, {}, summary=summary, runs={each.name: asdict(each) for each in runs})
    return 0


def _links(size: Size, factor: float, steps: int, flapping: bool) -> Links:
    """The middle link, both ways."""
    middle = (size.stages - 1) // 2
    ways, delay_ms = ((middle, middle + 1), (middle + 1, middle)), factor * size.operation_ms
    spells = [[a, a + FLAP] for a in range(FLAP, steps, 2 * FLAP)] if flapping else [[SLOW_FROM, SLOW_TO]]
    return [{"from": a, "to": b, "delay_ms": delay_ms, "steps": spell} for spell in spells for a, b in ways]


def _train(folder: Path, size: Size, replicas: int, steps: int, links: Links, settings: Sequence[str]) -> None:
    """The whole job, in processes of its own. Raises Fatal if it fails."""
    text = folder / "text"
    text.mkdir(parents=True)
    for name in "abcd":
        (text / name).write_text(_TEXT * 200)
    slow = [{"stage": stage, "factor": 1.0, "least_ms": size.operation_ms} for stage in range(size.stages)]
    overrides = [
        "name=adapting",
        *(f"data.path={text}", f"output.root={folder}", f"data.batch={size.microbatches}", "data.seq_len=16"),
        *(f"model.layers={size.stages}", "model.dim=16", "model.heads=2", "model.kv_heads=2", "model.ffn=32"),
        *(f"mesh.replicas={replicas}", f"mesh.pp={size.stages}", f"steps={steps}", "checkpoint.every=0"),
        *("eval.every=0", "eval.batches=1", "step_timeout_s=120", "chaos.kill=[]"),
        *(f"schedule.name={FIRST}", f"schedule.microbatches={size.microbatches}"),
        *(f"chaos.slow={_listed(slow)}", f"chaos.link={_listed(links)}", *settings),
    ]
    command = [sys.executable, "-m", "helixrt.train", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise Fatal(f"the run in {folder} failed (exit {done.returncode}): {done.stdout[-1000:]} {done.stderr[-1000:]}")


def _listed(entries: Sequence[Mapping[str, Any]]) -> str:
    """As the command line of a job takes lists of mappings."""
    return "[" + ", ".join("{" + ", ".join(f"{key}: {value}" for key, value in each.items()) + "}" for each in entries) + "]"


def _read(root: Path, name: str, size: Size, links: Links, comm: str) -> Run:
    """From the folder that the one run under `root` has left."""
    (folder,) = root.glob("[0-9]*/[0-9]*")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    chain = Log(read_lineage(folder / "lineage")).chain()
    costs = uniform(size.stages, size.operation_ms, size.operation_ms, size.operation_ms)
    first = policies.build(FIRST, costs, size.microbatches)
    orders: dict[str, Schedule] = {"": first}
    for path in folder.glob("schedules/*.json"):
        orders[path.stem] = read(path.read_text(encoding="utf-8"), path.name)
    delays = link_delays(links, size.stages)
    work, updates = _times(folder / "flight")
    told = _told(folder / "flight")
    steps = []
    for record in chain:
        key = record.orders.get(0, "")
        slowed = {(d.source, d.target): d.delay_ms for d in delays if d.first <= record.step < d.end}
        simulated_ms = makespan_ms(orders[key], with_delays(costs, slowed), COMMS[comm])
        if record.step in work and {record.step, record.step - 1} <= updates.keys():
            begin_s, end_s = work[record.step]
            whole_ms = (updates[record.step] - updates[record.step - 1]) * 1e3
            late = lateness(told[record.step], lambda rank: place_of(rank)[1], partial(_takes_ms, size), slowed)
            steps.append(Step(record.step, (end_s - begin_s) * 1e3, simulated_ms, whole_ms, key, late))
    back = []
    for replica, incarnation in sorted({c for record in chain for c in record.contributors if c[1]}):
        record = next(r for r in chain if (replica, incarnation) in r.contributors)
        before = next(r for r in reversed(chain[: chain.index(record)]) if replica in r.replicas)
        known = [r.orders.get(replica, "") for r in (before, record)]
        back.append({"replica": replica, "lost": before.step + 1, "back": record.step, "orders": known})
    return Run(name, steps, report["order_changes"], report["failures"], back)


def _times(flight: Path) -> tuple[dict[int, tuple[float, float]], dict[int, float]]:
    """Of replica 0, by step: when its first rank began to work and its last one ended, and when its leader had updated."""
    begins: dict[int, list[float]] = defaultdict(list)
    ends: dict[int, list[float]] = defaultdict(list)
    updates: dict[int, float] = {}
    for path in flight.glob("r0.*.jsonl"):
        if ".detail" in path.name:
            continue
        for event in read_events(path):
            if event.kind is Kind.WORK_BEGIN:
                begins[event.step].append(event.begin_s)
            elif event.kind is Kind.WORK_END:
                ends[event.step].append(event.end_s)
            elif event.kind is Kind.APPLY and replica_of(event.rank) == 0:
                updates[event.step] = max(updates.get(event.step, 0.0), event.end_s)
    return {step: (min(begins[step]), max(ends[step])) for step in begins if ends[step]}, updates


def _told(flight: Path) -> dict[int, list[Event]]:
    """What the ranks of replica 0 wrote, by step."""
    found: dict[int, list[Event]] = defaultdict(list)
    for path in flight.glob("r0.*.jsonl"):
        for event in read_events(path):
            found[event.step].append(event)
    return found


def _takes_ms(size: Size, op: Op) -> float:
    """A backward in one piece is a B and a W."""
    return size.operation_ms * (2 if op is Op.BW else 1)


def _slow_link(runs: Sequence[Run], steps: int) -> dict[str, Any]:
    """Medians are over the steps from `STEADY` steps after the change on, of replica 0."""
    loop, *fixed = runs
    away = [each.step for each in loop.steps if each.step >= SLOW_FROM and each.order]
    home = [each.step for each in loop.steps if each.step >= SLOW_TO and not each.order]
    slow = (SLOW_FROM + STEADY, min(SLOW_TO, steps))
    said: dict[str, Any] = {
        "slow steps before the order changed": away[0] - SLOW_FROM if away else None,
        "steps before the first order was back": home[0] - SLOW_TO if home else None,
        "slow step's work, ms": {each.name: round(each.work_ms(*slow), 1) for each in runs},
        "slow step's work, simulated, ms": {each.name: round(_simulated_ms(each, *slow), 1) for each in runs},
        "slow step / simulated": round(loop.work_ms(*slow) / _simulated_ms(loop, *slow), 3),
        "whole slow step / simulated": round(_whole_ms(loop, *slow) / _simulated_ms(loop, *slow), 3),
        "slow step / that of others": {each.name: round(loop.work_ms(*slow) / each.work_ms(*slow), 3) for each in fixed},
        "undisturbed step's work, ms": {each.name: round(each.work_ms(WARM, SLOW_FROM), 1) for each in runs},
        "undisturbed step / simulated": round(loop.work_ms(WARM, SLOW_FROM) / _simulated_ms(loop, WARM, SLOW_FROM), 3),
        "slow step's path, ms": {each.name: each.late(*slow) for each in runs},
        "undisturbed step's path, ms": {each.name: each.late(WARM, SLOW_FROM) for each in runs},
        "replicas that came back": loop.back,
    }
    if SLOW_TO + STEADY < steps:
        said["step after the delay / before it"] = round(
            loop.work_ms(SLOW_TO + STEADY, steps + 1) / loop.work_ms(WARM, SLOW_FROM), 3
        )
    return said


def _flapping(runs: Sequence[Run]) -> dict[str, Any]:
    loop, fixed = runs
    both = sorted({each.step for each in loop.steps} & {each.step for each in fixed.steps})
    totals = {run.name: sum(each.work_ms for each in run.steps if each.step in both) for run in runs}
    simulated = {run.name: sum(each.simulated_ms for each in run.steps if each.step in both) for run in runs}
    return {
        "changes of the order": len([each for each in loop.changes if not each["failed"]]),
        "steps": len(both),
        "work in all, s": {name: round(ms / 1e3, 2) for name, ms in totals.items()},
        "work in all, simulated, s": {name: round(ms / 1e3, 2) for name, ms in simulated.items()},
        "adapting / fixed": round(totals[loop.name] / totals[fixed.name], 4),
    }


def _simulated_ms(run: Run, first: int, end: int) -> float:
    return median(each.simulated_ms for each in run.steps if first <= each.step < end)


def _whole_ms(run: Run, first: int, end: int) -> float:
    return median(each.whole_ms for each in run.steps if first <= each.step < end)
