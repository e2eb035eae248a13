"""`report.html`: one file that needs nothing else, light and dark, readable without a script.

In: the `Figures` of a run and its `report.json` content. Out: the page's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from helixrt.job.controller import Happening
from helixrt.job.report_charts import loss_chart, participants_chart, replica_colour, timeline_chart
from helixrt.job.step_rules import SHOWN_EXCLUSIONS
from helixrt.observe.failures import Failure
from helixrt.observe.timeline import Timeline

if TYPE_CHECKING:
    from helixrt.job.report import Figures

_SHOWN_CHANGES = 20  # of a replica's costs; report.json has all


def page(found: Figures, report: dict[str, Any]) -> str:
    """The whole page."""
    config = found.facts.config
    mesh = config.mesh
    sections = [
        _tiles(found, report),
        _section(
            "Loss",
            "Bits per byte of every replica's own batches, and of the held-out files.",
            _legend(
                [(replica_colour(r), f"replica {r}") for r in range(mesh.replicas)] + [("var(--ink)", "validation")],
            )
            + loss_chart(found.steps, found.validations, report["corpus_order0_bits_per_byte"], found.failures),
        ),
        _section(
            "Replicas over time",
            "Whose gradients were in the updates.",
            _legend([("var(--train)", "training"), ("var(--lost)", "lost"), ("var(--back)", "coming back")])
            + participants_chart(found.commits, found.lives, found.failures, mesh.replicas, found.begin_s),
        ),
        _section("Failures", "", _failures(found.failures) + _tracebacks(report) + _skipped(report)),
        *(
            [_section("Rails that were left", "NICs or networks that links went on without.", _rails(report))]
            if found.rails
            else []
        ),
        *([_section("Changes of the schedule's order", _orders_lead(), _orders(report))] if found.orders else []),
        *(_section(f"Measured costs, replica {each['replica']}", _costs_lead(each), _costs(each)) for each in report["costs"]),
        *([_section("Storage", "What could not be written at once.", _storage(report))] if found.storage else []),
        *(
            _section(caption, _what_it_shows() if i == 0 else "", _timeline_legend(shown) + timeline_chart(shown))
            for i, (caption, shown) in enumerate(found.timelines)
        ),
        _section("Exactly once", "Followed along the lineage of the final parameters, record by record.", _audit(report)),
        _section("Final state", "", _replicas(report)),
        *([_section("Corpus", "", _table_of(_corpus(report)))] if report["corpus"] is not None else []),
        _section("Versions", "", _table_of(report["versions"].items())),
        _section("Settings", "", f"<details><summary>all of them, as JSON</summary><pre>{_settings(report)}</pre></details>"),
    ]
    described = found.facts.description
    title = f"{config.name}: {described.model}" if described.model else config.name
    axes = [_count(mesh.pp, "stage")] if mesh.pp > 1 or mesh.dp_shard == 1 else []
    others = ((mesh.dp_shard, "shard"), (mesh.cp, "context rank"), (mesh.tp, "tensor rank"))
    axes += [_count(size, what) for size, what in others if size > 1]
    size = " x ".join([_count(mesh.replicas, "replica"), *axes])
    subtitle = f"{size}, {described.work}" if described.work else size
    return _PAGE.format(title=escape(title), subtitle=escape(subtitle), style=_STYLE, body="\n".join(sections), script=_SCRIPT)


def _tiles(found: Figures, report: dict[str, Any]) -> str:
    reached, order0 = report["validation_bits_per_byte"], report["corpus_order0_bits_per_byte"]
    audit = report["data_audit"]
    clean = audit["gaps"] == 0 and audit["repeats"] == 0
    hashes = {r["parameters_sha256"] for r in report["replicas"]}
    newest = {event.replica: event.kind for event in found.facts.history if event.replica >= 0}
    away = sum(kind is Happening.DRAINED for kind in newest.values())
    alike = len(hashes) == 1 and len(report["replicas"]) + away == found.facts.config.mesh.replicas
    bits = "bits per byte" + ("" if order0 is None else f"; order\u20110 is {order0:.3f}")
    tiles = [
        *([("checkpoint", "LOST", f"of the last step: {report['unsaved']}", "bad")] if report["unsaved"] else []),
        ("validation", "&ndash;" if reached is None else f"{reached:.3f}", bits, ""),
        ("updates", f"{report['steps']:,}", f"in {report['seconds']:.0f} s", ""),
        ("speed", f"{report['tokens_per_s']:,.0f}", "bytes trained on per second, stalls included", ""),
        ("goodput", f"{report['goodput']:.0%}", "of the replicas' time went into committed steps", ""),
        ("failures", str(len(found.failures)), _back(found.failures), ""),
        ("batches", f"{audit['batches']:,}", f"{'' if clean else 'NOT '}each exactly once", "ok" if clean else "bad"),
        ("replicas", "equal" if alike else "differ", "final parameters, bit for bit", "ok" if alike else "bad"),
    ]
    drawn = "".join(
        f'<div class="tile {state}"><h3>{name}</h3><b>{value}</b><span>{escape(more)}</span></div>'
        for name, value, more, state in tiles
    )
    return f'<div class="tiles">{drawn}</div>'


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _back(failures: Sequence[Failure]) -> str:
    if not failures:
        return "no replica was lost"
    returned = sum(f.rejoined_after_s is not None for f in failures)
    return "all lost replicas came back" if returned == len(failures) else f"{returned} of {len(failures)} came back"


def _failures(failures: Sequence[Failure]) -> str:
    if not failures:
        return '<p class="nothing">No replica was lost.</p>'
    head = ("replica", "lost in step", "detected after", "survivors stalled for", "rejoined after", "why", "seen by the driver")
    rows = [
        (
            str(f.replica),
            str(f.step),
            _seconds(f.detected_after_s),
            _seconds(f.survivors_stalled_s),
            _seconds(f.rejoined_after_s),
            escape(f.reason),
            escape(f.seen if f.seen != f.reason else ""),
        )
        for f in failures
    ]
    return _table(head, rows)


def _tracebacks(report: dict[str, Any]) -> str:
    """What ranks of lost replicas have raised."""
    return "".join(
        f"<details><summary>replica {each['replica']} (incarnation {each['incarnation']}): traceback, {escape(each['log'])}"
        f"</summary><pre>{escape(each['text'])}</pre></details>"
        for each in report["tracebacks"]
    )


def _skipped(report: dict[str, Any]) -> str:
    """Batches that were left out because they ended their replica twice."""
    return "".join(f"<p>Skipped: {escape(skipped['reason'])}</p>" for skipped in report["skipped_batches"])


def _rails(report: dict[str, Any]) -> str:
    head = ("rank", "towards", "rail", "in step", "after", "class", "why", "went on", "back after", "checkpoint of step")
    rows = [
        (
            escape(r["rank"]),
            escape(r["towards"] or f"rank {r['peer']}"),
            str(r["rail"]),
            str(r["step"]),
            _seconds(r["at_s"]),
            escape(r["failure"] or "slow"),
            escape(r["reason"]),
            str(r["usable"]),
            _seconds(r["back_after_s"]),
            "&ndash;" if r["checkpoint_step"] is None else str(r["checkpoint_step"]),
        )
        for r in report["rails_left"]
    ]
    return _table(head, rows)


def _orders_lead() -> str:
    return "Predicted by simulation under the costs measured then; measured: medians of the steps before and after."


def _orders(report: dict[str, Any]) -> str:
    def times(first: float | None, second: float | None) -> str:
        if first is None or second is None:
            return ""
        share = f"{second / first - 1:+.0%}".replace("-", "&minus;") if first else ""
        return f'<span class="whole">{first:.1f} &rarr; {second:.1f} ms</span> <span class="whole">{share}</span>'

    rows = [
        (
            str(each["step"]),
            str(each["replica"]),
            f"<code>{escape(each['order'])}</code>",
            escape(f"not used: {each['failed']}" if each["failed"] else each["why"]),
            times(each["present_ms"], each["predicted_ms"]),
            times(each["before_ms"], each["after_ms"]),
            "" if each["ready_s"] is None else f"{each['ready_s']:.2f} s",
        )
        for each in report["order_changes"]
    ]
    return _table(("after step", "replica", "order", "why", "predicted step", "measured step", "made ready in"), rows)


def _costs_lead(found: dict[str, Any]) -> str:
    return f"Medians with their uncertainty, as of step {found['step']}, {found['microbatches']} micro-batches a step."


def _costs(found: dict[str, Any]) -> str:
    """Of operations and links, with what made them stragglers."""

    def shown(of: dict[str, Any]) -> str:
        return f"{of['ms']:.3f} &plusmn; {of['uncertainty_ms']:.3f} ms"

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
    told = [f"<p>Straggler: {escape(each['place'])}: {escape(each['why'])}.</p>" for each in found["stragglers"]]
    changes = [
        (str(each["step"]), escape(each["what"]), f"{each['before_ms']:.3f} ms", f"{each['after_ms']:.3f} ms")
        for each in found["changes"][:_SHOWN_CHANGES]
    ]
    if changes:
        count = _count(len(found["changes"]), "change of a cost", "changes of costs")
        shown_table = _table(("from step", "what", "before", "after"), changes)
        told.append(f"<details><summary>{count} during the run</summary>{shown_table}</details>")
    return "".join(told) + _table(("what", "where", "time", "rate", "samples"), [*operations, *pairs, *links])


def _storage(report: dict[str, Any]) -> str:
    rows = [
        (
            escape(each["rank"]),
            escape(each["what"]),
            str(each["step"]),
            _seconds(each["at_s"]),
            f"written after {each['failures']} failed attempts" if each["written"] else f"failed: {escape(each['reason'])}",
        )
        for each in report["storage"]
    ]
    return _table(("rank", "what", "step", "after", "outcome"), rows)


def _seconds(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:.2f} s"


def _what_it_shows() -> str:
    return (
        "Above: what each rank computed (F forward, B backward, W its part for weights where that"
        " runs by itself; the number is the micro-batch), a forward over the backward it is woven with."
        " Below: exchanges with other replicas, time spent waiting for a message or a quorum. Lines: activations and"
        " gradients, from sent to taken. Triangles: quorum and commit; red ones: failures. Pale: the step before or after."
    )


def _timeline_legend(shown: Timeline) -> str:
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
    return _legend([(f"var(--{key.lower()})", name) for key, name in names.items() if key in there])


def _audit(report: dict[str, Any]) -> str:
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
    return _table_of(rows)


def _replicas(report: dict[str, Any]) -> str:
    if not report["replicas"]:
        return '<p class="nothing">No replica reached the end.</p>'
    rows = [
        (str(r["replica"]), str(r["step"]), f"<code>{r['parameters_sha256']}</code>", f"<code>{r['lineage']}</code>")
        for r in report["replicas"]
    ]
    return _table(("replica", "step", "SHA-256 of the parameters", "lineage"), rows)


def _corpus(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    corpus = report["corpus"]
    yield "path", corpus["path"]
    yield "bytes", f"{corpus['bytes']:,} in {corpus['files']:,} files, {corpus['validation_bytes']:,} of them held out"
    yield "SHA-256", corpus["sha256"]
    yield "order-0 entropy", f"{report['corpus_order0_bits_per_byte']:.4f} bits per byte"


def _settings(report: dict[str, Any]) -> str:
    return escape(json.dumps(report["config"], indent=2))


def _section(title: str, lead: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(lead)}</p>' if lead else ''}{body}</section>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in entries)
    return f'<div class="legend">{items}</div>'


def _table_of(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in pairs)
    return f'<div class="scroll"><table class="pairs">{rows}</table></div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` hold markup."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<main>
{body}
</main>
<div id="tip" hidden></div>
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --page:#f5f6f8; --card:#fff; --ink:#1b2330; --soft:#5d6878; --line:#e3e6eb;
  --r0:#2f6fde; --r1:#e07b22; --r2:#2f9e63; --r3:#a155c9; --r4:#c94f6d; --r5:#2a9aa8;
  --f:#4b86e8; --b:#35a06c; --w:#8cc6a5; --apply:#c08a2d; --message:#5d6878; --awaited:#b3bcc8; --quorum:#e08aa8;
  --exchange:#9a5fd0; --fetch:#d9662b; --train:#4b86e8; --lost:#d64545; --back:#e6b450; --idle:#eceff3;
  --ok:#1f8a55; --bad:#d64545 }
@media (prefers-color-scheme: dark) { :root { --page:#12161c; --card:#1a2029; --ink:#e6eaf0; --soft:#98a3b3; --line:#2b333f;
  --r0:#6da0ff; --r1:#f2a057; --r2:#5cc88e; --r3:#c58be6; --r4:#ee7f9a; --r5:#5cc4d0;
  --f:#5b92ee; --b:#41ad78; --w:#2f7453; --apply:#d19b3d; --message:#b4bfcd; --awaited:#566172; --quorum:#c9708f;
  --exchange:#b07be2; --idle:#232b36; --ok:#4fc58b; --bad:#f07070; --lost:#e05a5a } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
header, main { max-width:1120px; margin:0 auto; padding:0 20px }
header { padding-top:32px; padding-bottom:8px }
h1 { font-size:26px; margin:0; letter-spacing:-.01em }
header p, section > p { color:var(--soft); margin:4px 0 12px }
section { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:18px 20px 14px; margin:16px 0 }
h2 { font-size:17px; margin:0 0 4px }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(132px,1fr)); gap:12px; margin:12px 0 16px }
.tile { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:14px 16px }
.tile h3 { margin:0; font-size:12px; font-weight:600; color:var(--soft); text-transform:uppercase; letter-spacing:.06em }
.tile b { display:block; font-size:27px; line-height:1.25; font-weight:650; font-variant-numeric:tabular-nums }
.tile span { color:var(--soft); font-size:13px; line-height:1.3; display:block }
.tile.ok b { color:var(--ok) } .tile.bad b { color:var(--bad) }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; font-size:13px; color:var(--soft); margin:4px 0 6px }
.legend i { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:6px; vertical-align:-1px }
section { overflow-x:auto }
svg { display:block; width:100%; min-width:720px; height:auto; font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
.grid, .lane { stroke:var(--line); stroke-width:1 }
.tick, .axis, .note { fill:var(--soft) } .lane-name { fill:var(--ink) }
.value { fill:var(--ink); font-weight:650; font-size:13px }
.order0 { stroke:var(--soft); stroke-width:1.3; stroke-dasharray:2 4 }
.loss { fill:none; stroke-width:1.6; stroke-linejoin:round; opacity:.85 }
.validation { fill:none; stroke:var(--ink); stroke-width:1.2; stroke-dasharray:5 4 }
.validation-dot { fill:var(--ink); stroke:var(--card); stroke-width:2 }
.kill { stroke:var(--lost); stroke-width:1.6; stroke-dasharray:5 3 } .kill-text { fill:var(--lost); font-weight:600 }
.note, .value, .kill-text { paint-order:stroke; stroke:var(--card); stroke-width:4px; stroke-linejoin:round }
.column rect { fill:transparent } .column rect:hover { fill:var(--soft); fill-opacity:.16 }
.idle { fill:var(--idle) } .training { fill:var(--train) } .lost { fill:var(--lost) } .coming-back { fill:var(--back) }
.op-F { fill:var(--f) } .op-B { fill:var(--b) } .op-W { fill:var(--w) } .op-apply { fill:var(--apply) }
.op-awaited { fill:var(--awaited) } .op-quorum { fill:var(--quorum) } .op-exchange { fill:var(--exchange) }
.other-step { opacity:.35 } [class^=message] line { stroke:var(--message); stroke-width:1.3 }
[class^=message] circle { fill:var(--message) } [class^=message] .reach { stroke-width:9; stroke:transparent }
.op-fetch, .op-snapshot { fill:var(--fetch) }
.op-text { fill:#fff; font-size:11px; font-weight:600; pointer-events:none }
.mark-good { fill:var(--soft) } .mark-bad { fill:var(--lost) }
[data-tip]:hover { filter:brightness(1.12) }
.scroll { overflow-x:auto }
table { border-collapse:collapse; width:100%; font-size:14px; font-variant-numeric:tabular-nums }
th { text-align:left; color:var(--soft); font-weight:600 }
th, td { padding:7px 14px 7px 0; border-bottom:1px solid var(--line) }
tr:last-child > * { border-bottom:0 } table.pairs th { width:260px; font-weight:500 } td { overflow-wrap:anywhere }
td code, .whole { white-space:nowrap }
code { font:12.5px ui-monospace,SFMono-Regular,Menlo,monospace } pre { font-size:12.5px; overflow-x:auto }
summary { cursor:pointer; color:var(--soft) } .nothing { color:var(--soft); margin:6px 0 }
#tip { position:fixed; pointer-events:none; background:var(--ink); color:var(--page); padding:7px 10px; border-radius:7px;
  font-size:12.5px; line-height:1.4; white-space:pre; z-index:9; max-width:90vw; overflow:hidden; text-overflow:ellipsis }
"""

_SCRIPT = """
const tip = document.getElementById('tip');
document.addEventListener('pointermove', e => {
  const on = e.target.closest && e.target.closest('[data-tip]');
  tip.hidden = !on;
  if (!on) return;
  tip.textContent = on.dataset.tip;
  const w = tip.offsetWidth, h = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - w - 6)) + 'px';
  tip.style.top = (e.clientY + 18 + h > innerHeight ? e.clientY - h - 10 : e.clientY + 18) + 'px';
});
"""
