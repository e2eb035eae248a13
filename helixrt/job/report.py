"""The end of a run: its figures as `report.json` and its page as `report.html`, one file that stands alone.

In: `RunFacts` from the driver and what lies in the run's folder (`metrics.jsonl`, `flight/*.jsonl`).
Out: the two files. What is figured is figured here, once; `report_page` draws it.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from helixrt.job.config import JobConfig
from helixrt.job.controller import Happening, LifeEvent
from helixrt.job.description import Description
from helixrt.job.leader_reports import Finished
from helixrt.job.lineage_files import write_durably
from helixrt.job.metrics import StepMetrics, ValidationMetrics
from helixrt.job.report_inputs import LARGE_BYTES, inputs_bytes, run_metrics
from helixrt.job.report_inputs import read_flight as read_flight
from helixrt.job.resume import streams_dealt
from helixrt.job.step_rules import exclusion_text
from helixrt.observe.failures import Failure, Loss, births, failures, replica_of
from helixrt.observe.order_changes import OrderChange, order_changes
from helixrt.observe.rails import RailOutage, rail_outages
from helixrt.observe.run_costs import Observed, observed, profile
from helixrt.observe.run_costs import to_plain as costs_to_plain
from helixrt.observe.timeline import Timeline, timeline, typical_step
from helixrt.protocol.step.lineage import Audit, Behind, CommitRecord, Log, audit
from helixrt.record import Event, Kind
from helixrt.replica.rank_log import last_traceback

_TAKEN_UP = 3  # steps after the decision, at most, an order is worked by
_MOST_TRACEBACK = 8000  # characters of one in the report
_PACKAGES = ("helixrt", "torch", "numpy", "ray", "torchft", "torchdata", "hydra-core")


@dataclass(frozen=True)
class RunFacts:
    """What the driver knows at the end. `entries`: the run's log; `finished`: what each replica ended with."""

    config: JobConfig
    description: Description
    entries: tuple[CommitRecord, ...]
    finished: tuple[Finished, ...]
    history: tuple[LifeEvent, ...]
    seconds: float
    advance: int = 1  # batches of a stream that a step takes
    goodput: float | None = None  # see `helixrt.job.goodput`; None: not known
    behind: Behind = Behind()  # what lies behind the first of `entries`
    updates: int | None = None  # made in `seconds`; None: all


@dataclass(frozen=True)
class Figures:
    """Everything the report shows. Times in the charts count from `begin_s` (Unix time)."""

    facts: RunFacts
    steps: tuple[StepMetrics, ...]  # as `RunMetrics` has them
    validations: tuple[ValidationMetrics, ...]
    sample: str  # which part of the steps and validations that is, "" for all
    chain: tuple[CommitRecord, ...]
    superseded: int
    audit: Audit
    dealt: bool  # the session deals the items
    failures: tuple[Failure, ...]
    rails: tuple[RailOutage, ...]
    orders: tuple[OrderChange, ...]  # of schedules
    ways: tuple[tuple[str, int, str, str], ...]  # (rank, its peer's rank in the exchange, transport, why), each once
    checkpoints: tuple[Event, ...]  # that were written whole
    costs: tuple[Observed, ...]  # of replicas in stages
    storage: tuple[Event, ...]  # what could not be written, and that it was written later
    commits: tuple[tuple[float, CommitRecord], ...]  # when each record of the chain was first applied
    lives: tuple[tuple[int, float], ...]  # (replica, Unix time) of every start of a replica
    begin_s: float
    tokens_per_s: float
    timelines: tuple[tuple[str, Timeline], ...]  # (caption, step)
    tracebacks: tuple[tuple[int, int, str, str], ...]  # (replica, incarnation, log, text) of ranks that raised
    versions: dict[str, str]

    @property
    def validation_bits_per_byte(self) -> float | None:
        return self.validations[-1].bits_per_byte if self.validations else None


def write_report(folder: Path, facts: RunFacts, say: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """Write both files into the run's folder; returns what `report.json` holds. With stages, `profile.json` has the measured
    costs of the first replica that was measured, for `helixrt schedule --profile`. `say`: tells the user what takes long."""
    from helixrt.job.report_page import page

    if (size := inputs_bytes(folder)) > LARGE_BYTES:
        say(f"writes the report from {size / 1e9:.1f} GB of records")
    found = figures(folder, facts)
    report = to_plain(found)
    write_durably(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_durably(folder / "report.html", page(found, report))
    whole = [each.measured for each in found.costs if each.measured.stages > 1 and not each.measured.lacking()]
    if whole:
        write_durably(folder / "profile.json", json.dumps(profile(whole[0]), indent=1) + "\n")
    return report


def figures(folder: Path, facts: RunFacts) -> Figures:
    """Read the run's folder and work out every figure."""
    events = read_flight(folder / "flight")
    metrics = run_metrics(folder / "metrics.jsonl")
    log = Log(facts.entries, facts.behind)
    chain = tuple(log.chain()) if facts.entries else ()
    found, orders = tuple(failures(events, _losses(facts.history))), order_changes(events)
    commits = _commits(events, chain)
    first_s = min((e.begin_s for e in events), default=0.0)
    return Figures(
        facts=facts,
        steps=metrics.steps,
        validations=metrics.validations,
        sample=metrics.sample,
        chain=chain,
        superseded=log.behind.superseded + len(log.superseded()),
        audit=audit(chain, facts.advance, log.behind.audit),
        dealt=streams_dealt(folder, chain[-1].life if chain else 0),
        failures=found,
        rails=tuple(rail_outages(events)),
        orders=orders,
        ways=_ways(events),
        checkpoints=tuple(e for e in events if e.kind is Kind.CHECKPOINT_END),
        costs=tuple(each for each in observed(events) if each.measured.stages > 1),
        storage=tuple(e for e in events if e.kind in (Kind.STORAGE_FAILED, Kind.STORAGE_BACK)),
        commits=commits,
        lives=_lives(events),
        begin_s=first_s,
        tokens_per_s=_speed(commits, facts),
        timelines=_timelines(events, found, orders),
        tracebacks=tuple(_tracebacks(folder / "logs", facts.history)),
        versions=versions(),
    )


def to_plain(found: Figures) -> dict[str, Any]:
    """The content of `report.json`."""
    facts, corpus = found.facts, found.facts.description.corpus
    return {
        "validation_bits_per_byte": found.validation_bits_per_byte,
        "validation_partial": found.validations[-1].partial if found.validations else "",
        "metrics_sample": found.sample,
        "corpus_order0_bits_per_byte": None if corpus is None else corpus.order0_bits_per_byte,
        "steps": found.chain[-1].step if found.chain else 0,
        "stopped": found.chain[-1].last if found.chain else "",
        "seconds": facts.seconds,
        "updates_in_seconds": facts.updates,
        "tokens_per_s": found.tokens_per_s,
        "goodput": facts.goodput,
        "replicas": [
            {
                "replica": f.replica,
                "parameters_digest": f.parameters,
                "state_digest": f.state,
                "step": f.step,
                "lineage": f.lineage,
            }
            for f in facts.finished
        ],
        "data_audit": {
            "batches": found.audit.batches,
            "gaps": found.audit.gaps,
            "repeats": found.audit.repeats,
            "superseded": found.superseded,
            "excluded": found.audit.excluded,
            "per_replica": {str(r): n for r, n in sorted(found.audit.per_replica.items())},
            "dealt": found.dealt,
            "unsure": {str(r): n for r, n in sorted(found.chain[-1].unsure.items())} if found.chain else {},
        },
        "exclusions": [
            {"step": record.step, "applied": record.applied, "what": text}
            for record in found.chain
            if (text := exclusion_text(record)) is not None
        ],
        "failures": [
            {
                "replica": f.replica,
                "step": f.step,
                "detected_after_s": f.detected_after_s,
                "survivors_stalled_s": f.survivors_stalled_s,
                "rejoined_after_s": f.rejoined_after_s,
                "survivors_recomputed": f.survivors_recomputed,
                "reason": f.reason,
                "seen": f.seen,
            }
            for f in found.failures
        ],
        "tracebacks": [
            {"replica": replica, "incarnation": incarnation, "log": log, "text": text}
            for replica, incarnation, log, text in found.tracebacks
        ],
        "skipped_batches": [
            {"replica": e.replica, "at_s": e.at_s - found.begin_s, "reason": e.why}
            for e in facts.history
            if e.kind is Happening.SKIPPED
        ],
        "drivers_attached": [
            {"at_s": e.at_s - found.begin_s, "what": e.why} for e in facts.history if e.kind is Happening.ATTACHED
        ],
        "order_changes": [asdict(change) for change in found.orders],
        "rails_left": [
            {
                "rank": r.rank,
                "peer": r.peer,
                "towards": r.towards,
                "rail": r.rail,
                "step": r.step,
                "at_s": r.left_s - found.begin_s,
                "failure": r.failure,
                "reason": r.reason,
                "usable": r.usable,
                "back_after_s": r.back_after_s,
                "checkpoint_step": r.saved_step,
                "checkpoint_after_s": r.saved_after_s,
            }
            for r in found.rails
        ],
        "transports": [
            {"rank": rank, "peer": peer, "transport": transport, "why": why} for rank, peer, transport, why in found.ways
        ],
        "costs": [costs_to_plain(each) for each in found.costs],
        "checkpoints": [{"step": c.step, "after_failover": bool(c.detail.get("after_failover"))} for c in found.checkpoints],
        "storage": [
            {
                "rank": e.rank,
                "what": e.detail["what"],
                "step": e.step,
                "at_s": e.end_s - found.begin_s,
                "written": e.kind is Kind.STORAGE_BACK,
                "failures": e.detail["failures"],
                "reason": e.detail.get("reason", ""),
            }
            for e in found.storage
        ],
        "unsaved": next((f.unsaved for f in facts.finished), ""),
        "corpus": None
        if corpus is None
        else {
            "path": corpus.path,
            "bytes": corpus.bytes,
            "files": corpus.files,
            "sha256": corpus.sha256,
            "validation_bytes": corpus.validation_bytes,
        },
        "versions": found.versions,
        "config": facts.config.to_plain(),
    }


def versions() -> dict[str, str]:
    """Of Python, of the machine and of the packages that are installed."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _losses(history: Iterable[LifeEvent]) -> list[Loss]:
    """One per life; a replica whose last life was lost is given up at once, with no word of the loss itself."""
    first: dict[tuple[int, int], Loss] = {}
    for event in history:
        if event.kind in (Happening.LOST, Happening.GIVEN_UP):
            loss = Loss(event.replica, event.incarnation, event.at_s, event.why)
            first.setdefault((event.replica, event.incarnation), loss)
    return list(first.values())


def _tracebacks(logs: Path, history: Iterable[LifeEvent]) -> Iterator[tuple[int, int, str, str]]:
    """What the ranks of replicas that were lost or failed have raised, by their logs; of ranks on other machines only where
    logs are shared."""
    ends = (Happening.LOST, Happening.GIVEN_UP, Happening.FAILED)
    for replica, incarnation in dict.fromkeys((e.replica, e.incarnation) for e in history if e.kind in ends):
        for log in sorted(logs.glob(f"r{replica}.*.inc{incarnation}.log")):
            if text := last_traceback(log):
                yield replica, incarnation, log.name, text[-_MOST_TRACEBACK:]


def _ways(events: Sequence[Event]) -> tuple[tuple[str, int, str, str], ...]:
    reached = [e for e in events if e.kind is Kind.REACHED]
    told = [(e.rank, peer, e.detail["transport"], e.detail["why"]) for e in reached for peer in e.detail["peers"]]
    return tuple(dict.fromkeys(told))


def _commits(events: Sequence[Event], chain: Iterable[CommitRecord]) -> tuple[tuple[float, CommitRecord], ...]:
    first: dict[str, float] = {}
    for event in events:
        if event.kind in (Kind.COMMIT, Kind.APPLY):
            first.setdefault(str(event.detail.get("record")), event.end_s)
    return tuple((first[r.hash], r) for r in chain if r.hash in first)


def _lives(events: Sequence[Event]) -> tuple[tuple[int, float], ...]:
    starts: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: e.begin_s):
        if event.kind is Kind.RANK_START:
            starts[replica_of(event.rank)].append(event)
    found = ((replica, at_s) for replica, of_one in starts.items() for _, at_s in births(of_one))
    return tuple(sorted(found, key=lambda life: life[1]))


def _speed(commits: Sequence[tuple[float, CommitRecord]], facts: RunFacts) -> float:
    """Tokens that entered the parameters per second, from the first commit of this driver to the last, stalls included."""
    commits = [c for c in commits if c[0] >= commits[-1][0] - facts.seconds]  # a resumed run has older ones
    if len(commits) < 2 or commits[-1][0] <= commits[0][0]:
        return 0.0
    batches = sum(len(record.summed) for _, record in commits[1:])
    tokens = batches * facts.description.tokens_per_batch
    return tokens / (commits[-1][0] - commits[0][0])


def _timelines(
    events: Sequence[Event], found: Sequence[Failure], orders: Sequence[OrderChange]
) -> tuple[tuple[str, Timeline], ...]:
    hit = [f.step for f in found]
    drawn: list[tuple[str, Timeline]] = []
    usual = typical_step(events, avoid=hit)
    if usual is not None and (lanes := timeline(events, usual)) is not None:
        drawn.append((f"Step {usual}, an undisturbed one", lanes))
    for failure in found[:1]:
        if (lanes := timeline(events, failure.step)) is not None:
            drawn.append((f"Step {failure.step}, in which replica {failure.replica} was lost", lanes))
    if used := [change for change in orders if change.ready_s is not None and not change.failed]:
        change = max(used, key=lambda each: each.present_ms - each.predicted_ms)
        mine = [event for event in events if replica_of(event.rank) == change.replica]
        for step, when in ((change.step, "before"), (change.step + _TAKEN_UP, "after")):
            if (lanes := timeline(mine, step)) is not None:
                drawn.append((f"Step {step}, {when} replica {change.replica} changed the order of its schedule", lanes))
    return tuple(drawn)
