"""`report.html`: one file that needs nothing else, light and dark, readable without a script.

In: the `Figures` of a run and its `report.json` content. Out: the page's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from helixrt.job import page as html
from helixrt.job.controller import Happening
from helixrt.job.report_charts import loss_chart, participants_chart, replica_colour, timeline_chart
from helixrt.job.step_rules import SHOWN_EXCLUSIONS, audit_text
from helixrt.observe.failures import Failure
from helixrt.observe.timeline import Timeline

if TYPE_CHECKING:
    from helixrt.job.report import Figures

_LOSS_LEAD = "Bits per byte of every replica's own batches, and of the held-out files."
_SHOWN_CHANGES = 20  # of a replica's costs; report.json has all


def page(found: Figures, report: dict[str, Any]) -> str:
    """The whole page."""
    config = found.facts.config
    mesh = config.mesh
    sections: list[html.Section] = [
        *([("Loss", _loss_lead(found), _loss(found, report))] if found.steps or found.validations else []),
        (
            "Replicas over time",
            "Whose gradients were in the updates.",
            html.legend([("var(--train)", "training"), ("var(--lost)", "lost"), ("var(--back)", "coming back")])
            + Markup(participants_chart(found.commits, found.lives, found.failures, mesh.replicas, found.begin_s)),
        ),
        ("Failures", "", _failures(found.failures) + _tracebacks(report) + _skipped(report)),
        *([("Rails that were left", "NICs or networks that links went on without.", _rails(report))] if found.rails else []),
        *([("Changes of the schedule's order", _orders_lead(), _orders(report))] if found.orders else []),
        *((f"Measured costs, replica {each['replica']}", _costs_lead(each), _costs(each)) for each in report["costs"]),
        *([("Storage", "What could not be written at once.", _storage(report))] if found.storage else []),
        *(
            (caption, _what_it_shows() if i == 0 else "", _timeline_legend(shown) + Markup(timeline_chart(shown)))
            for i, (caption, shown) in enumerate(found.timelines)
        ),
        ("Exactly once", "Followed along the lineage of the final parameters, record by record.", _audit(report)),
        ("Final state", "", _replicas(report)),
        *([("Corpus", "", html.pairs(_corpus(report)))] if report["corpus"] is not None else []),
        ("Versions", "", html.pairs(report["versions"].items())),
        ("Settings", "", html.folded("all of them, as JSON", json.dumps(report["config"], indent=2))),
    ]
    described = found.facts.description
    title = f"{config.name}: {described.model}" if described.model else config.name
    axes = [_count(mesh.pp, "stage")] if mesh.pp > 1 or mesh.dp_shard == 1 else []
    others = ((mesh.dp_shard, "shard"), (mesh.cp, "context rank"), (mesh.tp, "tensor rank"))
    axes += [_count(size, what) for size, what in others if size > 1]
    size = " x ".join([_count(mesh.replicas, "replica"), *axes])
    subtitle = f"{size}, {described.work}" if described.work else size
    return html.page(title, subtitle, _tiles(found, report), sections)


def _loss_lead(found: Figures) -> str:
    return f"{_LOSS_LEAD} {found.sample}".rstrip()


def _loss(found: Figures, report: dict[str, Any]) -> Markup:
    replicas = [(replica_colour(r), f"replica {r}") for r in range(found.facts.config.mesh.replicas)]
    chart = loss_chart(found.steps, found.validations, report["corpus_order0_bits_per_byte"], found.failures)
    return html.legend([*replicas, ("var(--ink)", "validation")]) + Markup(chart)


def _tiles(found: Figures, report: dict[str, Any]) -> list[html.Tile]:
    reached, order0 = report["validation_bits_per_byte"], report["corpus_order0_bits_per_byte"]
    audit = report["data_audit"]
    clean = audit["gaps"] == 0 and audit["repeats"] == 0
    hashes = {r["parameters_digest"] for r in report["replicas"]}
    newest = {event.replica: event.kind for event in found.facts.history if event.replica >= 0}
    away = sum(kind is Happening.DRAINED for kind in newest.values())
    alike = len(hashes) == 1 and len(report["replicas"]) + away == found.facts.config.mesh.replicas
    text = bool(found.steps) or reached is not None or order0 is not None  # a model over text has these figures
    bits = "bits per byte" + ("" if order0 is None else f"; order\u20110 is {order0:.3f}")
    partial = report["validation_partial"]
    bits += f"; {partial}" if partial else ""
    return [
        *([("checkpoint", "LOST", f"of the last step: {report['unsaved']}", "bad")] if report["unsaved"] else []),
        *([("validation", "–" if reached is None else f"{reached:.3f}", bits, "bad" if partial else "")] if text else []),
        ("updates", f"{report['steps']:,}", _updates(report), ""),
        *([("speed", f"{report['tokens_per_s']:,.0f}", "bytes trained on per second, stalls included", "")] if text else []),
        ("goodput", _share(report["goodput"]), "of the replicas' time went into committed steps", ""),
        ("failures", str(len(found.failures)), _back(found.failures), ""),
        ("batches", f"{audit['batches']:,}", audit_text(audit), "ok" if clean and not audit["unsure"] else "bad"),
        ("replicas", "equal" if alike else "differ", "final parameters, bit for bit", "ok" if alike else "bad"),
    ]


def _share(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"


def _updates(report: dict[str, Any]) -> str:
    """A run that was resumed, or that another driver has begun, made the others earlier."""
    some = report["updates_in_seconds"]
    made = "" if some is None or some == report["steps"] else f"{some:,} of them "
    return f"{made}in {report['seconds']:.0f} s"


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _back(failures: Sequence[Failure]) -> str:
    if not failures:
        return "no replica was lost"
    returned = sum(f.rejoined_after_s is not None for f in failures)
    return "all lost replicas came back" if returned == len(failures) else f"{returned} of {len(failures)} came back"


def _failures(failures: Sequence[Failure]) -> Markup:
    if not failures:
        return html.paragraph("No replica was lost.", "nothing")
    head = ("replica", "lost in step", "detected after", "survivors stalled for", "rejoined after", "why", "seen by the driver")
    rows = [
        (
            str(f.replica),
            str(f.step),
            _seconds(f.detected_after_s),
            _seconds(f.survivors_stalled_s),
            _seconds(f.rejoined_after_s),
            f.reason,
            f.seen if f.seen != f.reason else "",
        )
        for f in failures
    ]
    return html.table(head, rows)


def _tracebacks(report: dict[str, Any]) -> Markup:
    """What ranks of lost replicas have raised."""
    return Markup().join(
        html.folded(f"replica {each['replica']} (incarnation {each['incarnation']}): traceback, {each['log']}", each["text"])
        for each in report["tracebacks"]
    )


def _skipped(report: dict[str, Any]) -> Markup:
    """Batches that were left out because they ended their replica twice."""
    return Markup().join(html.paragraph(f"Skipped: {skipped['reason']}") for skipped in report["skipped_batches"])


def _rails(report: dict[str, Any]) -> Markup:
    head = ("rank", "towards", "rail", "in step", "after", "class", "why", "went on", "back after", "checkpoint of step")
    rows = [
        (
            r["rank"],
            r["towards"] or f"rank {r['peer']}",
            str(r["rail"]),
            str(r["step"]),
            _seconds(r["at_s"]),
            r["failure"] or "slow",
            r["reason"],
            str(r["usable"]),
            _seconds(r["back_after_s"]),
            "–" if r["checkpoint_step"] is None else str(r["checkpoint_step"]),
        )
        for r in report["rails_left"]
    ]
    return html.table(head, rows)


def _orders_lead() -> str:
    return "Predicted by simulation under the costs measured then; measured: medians of the steps before and after."


def _orders(report: dict[str, Any]) -> Markup:
    def times(first: float | None, second: float | None) -> str:
        if first is None or second is None:
            return ""
        share = f" {second / first - 1:+.0%}".replace("-", "\u2212") if first else ""
        return f"{first:.1f} → {second:.1f} ms".replace(" ", "\u00a0") + share

    rows = [
        (
            str(each["step"]),
            str(each["replica"]),
            html.code(each["order"]),
            f"not used: {each['failed']}" if each["failed"] else each["why"],
            times(each["present_ms"], each["predicted_ms"]),
            times(each["before_ms"], each["after_ms"]),
            "" if each["ready_s"] is None else f"{each['ready_s']:.2f} s",
        )
        for each in report["order_changes"]
    ]
    return html.table(("after step", "replica", "order", "why", "predicted step", "measured step", "made ready in"), rows)


def _costs_lead(found: dict[str, Any]) -> str:
    return f"Medians with their uncertainty, as of step {found['step']}, {found['microbatches']} micro-batches a step."


def _costs(found: dict[str, Any]) -> Markup:
    """Of operations and links, with what made them stragglers."""

    def shown(of: dict[str, Any]) -> str:
        return f"{of['ms']:.3f} ± {of['uncertainty_ms']:.3f} ms"

    operations = [
        (f"{each['op']} of chunk {each['chunk']}", f"stage {each['stage']}", shown(each), "", str(each["samples"]))
        for each in sorted(found["operations"], key=lambda each: (each["chunk"], "FBW".index(each["op"][0])))
    ]
    pairs = [
        (
            f"F of chunk {each['forward']}",
            f"woven with {each['op']} of chunk {each['backward']}",
            shown(each),
            "",
            str(each["samples"]),
        )
        for each in found["pairs"]
    ]
    links = [
        (
            "one-way delay",
            f"link {each['from']} to {each['to']}",
            f"at most {each['delay']['ms']:.3f} ms" if each["upper_bound"] else shown(each["delay"]),
            "" if each["rate_mbit"] is None else f"{each['rate_mbit']:.1f} Mbit/s",
            str(each["delay"]["samples"]),
        )
        for each in found["links"]
    ]
    told = [f"Straggler: {each['place']}: {each['why']}." for each in found["stragglers"]]
    changes = [
        f"step {each['step']:5}: {each['what']} from {each['before_ms']:.3f} to {each['after_ms']:.3f} ms"
        for each in found["changes"][:_SHOWN_CHANGES]
    ]
    lead = Markup().join(map(html.paragraph, told))
    if changes:
        count = _count(len(found["changes"]), "change of a cost", "changes of costs")
        lead += html.folded(f"{count} during the run", "\n".join(changes))
    head = ("what", "where", "time", "rate", "samples")
    return lead + html.table(head, [*operations, *pairs, *links])


def _storage(report: dict[str, Any]) -> Markup:
    rows = [
        (
            each["rank"],
            each["what"],
            str(each["step"]),
            _seconds(each["at_s"]),
            f"written after {each['failures']} failed attempts" if each["written"] else f"failed: {each['reason']}",
        )
        for each in report["storage"]
    ]
    return html.table(("rank", "what", "step", "after", "outcome"), rows)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _what_it_shows() -> str:
    return (
        "Above: what each rank computed (F forward, B backward, W its part for weights where that"
        " runs by itself; the number is the micro-batch), a forward over the backward it is woven with."
        " Below: exchanges with other replicas, time spent waiting for a message or a quorum. Lines: activations and"
        " gradients, from sent to taken. Triangles: quorum and commit; red ones: failures. Pale: the step before or after."
    )


def _timeline_legend(shown: Timeline) -> Markup:
    names = {
        "F": "forward",
        "B": "backward",
        "W": "weights",
        "apply": "update",
        "message": "message",
        "exchange": "exchange between replicas",
        "awaited": "waiting for a message",
        "quorum": "waiting for a quorum",
        "fetch": "fetch of state",
    }
    there = {bar.what for lane in shown.lanes for bar in lane.bars} | ({"message"} if shown.messages else set())
    return html.legend([(f"var(--{key.lower()})", name) for key, name in names.items() if key in there])


def _audit(report: dict[str, Any]) -> Markup:
    audit = report["data_audit"]
    rows = [
        ("batches in the final parameters", f"{audit['batches']:,}"),
        ("gaps", str(audit["gaps"])),
        ("repeats", str(audit["repeats"])),
        ("records superseded", str(audit["superseded"])),
        ("batches excluded", str(audit["excluded"])),
        *((f"step {e['step']}", e["what"]) for e in report["exclusions"][:SHOWN_EXCLUSIONS]),
        *((f"position of replica {r}'s stream", f"{n:,}") for r, n in audit["per_replica"].items()),
    ]
    return html.pairs(rows)


def _replicas(report: dict[str, Any]) -> Markup:
    if not report["replicas"]:
        return html.paragraph("No replica reached the end.", "nothing")
    rows = [
        (str(r["replica"]), str(r["step"]), html.code(r["parameters_digest"]), html.code(r["lineage"]))
        for r in report["replicas"]
    ]
    return html.table(("replica", "step", "SHA-256 of the parameters", "lineage"), rows)


def _corpus(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    corpus = report["corpus"]
    yield "path", corpus["path"]
    yield "bytes", f"{corpus['bytes']:,} in {corpus['files']:,} files, {corpus['validation_bytes']:,} of them held out"
    yield "SHA-256", corpus["sha256"]
    yield "order-0 entropy", f"{report['corpus_order0_bits_per_byte']:.4f} bits per byte"
