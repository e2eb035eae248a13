"""`helixrt observe RUN`: what the operations and links of a run's pipelines cost, which of them are stragglers, and why.

In: a run's folder, also while it runs. Out: on stdout or in a file, the estimates as text or JSON; with `--profile`, the costs
of a replica as the file that `helixrt schedule --profile` reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helixrt.commands import output
from helixrt.commands import problem as problems
from helixrt.errors import ConfigError
from helixrt.observe.estimates import Estimate, LinkEstimate
from helixrt.observe.run_costs import Observed, cost_key, observed, profile, to_plain
from helixrt.schedule.ir import Op

FORMATS = ("text", "json")
_OPERATIONS = (Op.F, Op.B, Op.W, Op.BW)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "run", nargs="?", default="outputs/latest", metavar="RUN_FOLDER", help="folder of the run (default: %(default)s)"
    )
    parser.add_argument("--replica", metavar="R", help="show only this replica")
    parser.add_argument("--until", metavar="STEP", help="use only measurements up to this step (default: the last one)")
    parser.add_argument(
        "--profile", metavar="FILE.json", help="write the costs of the first replica, or of --replica, for helixrt schedule"
    )
    output.add_arguments(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say. Returns 0; raises ConfigError for what they get wrong."""
    form = output.chosen_format(args, FORMATS)
    found = _found(args)
    if args.profile is not None:
        try:
            Path(args.profile).write_text(json.dumps(profile(found[0].measured), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("--profile", args.profile, f"cannot be written: {error.strerror}") from None
    plain = [to_plain(each) for each in found]
    output.put(args, json.dumps(plain, indent=1) + "\n" if form == "json" else "\n".join(map(_text, found)))
    return 0


def _found(args: argparse.Namespace) -> list[Observed]:
    from helixrt.job.report import read_flight

    flight = Path(args.run, "flight")
    if not flight.is_dir():
        raise ConfigError("RUN_FOLDER", args.run, "must be the folder of a run, with its flight records in `flight`")
    replica = problems.whole("--replica", args.replica, least=0)
    found = observed(read_flight(flight, replica=replica), problems.whole("--until", args.until))
    if replica is not None and not found:
        raise ConfigError("--replica", replica, "was not measured in this run")
    if not found:
        raise ConfigError("RUN_FOLDER", args.run, "has no step with all stages measured: a pipeline's second step is the first")
    return found


def _text(found: Observed) -> str:
    measured = found.measured
    title = f"replica {found.replica}: {measured.stages} stages, {measured.microbatches} micro-batches"
    lines = [f"{title}, as of step {measured.step}; medians in ms with their uncertainty", ""]
    lines += [*output.table(list(_operations(found))), ""]
    if measured.pairs:
        rows = [("woven pair", "ms", "since step")]
        for key, estimate in sorted(measured.pairs.items()):
            rows.append((cost_key(key), _value(estimate), _since(found, key)))
        lines += [*output.table(rows), ""]
    if measured.links:
        lines += [*output.table(list(_links(found))), ""]
    lines += [f"straggler: {each.place}: {each.why}" for each in found.stragglers] or ["no stragglers"]
    for shift in found.shifts:
        change = shift.change
        became = f"changed from {change.before_ms:.3f} to {change.after_ms:.3f} ms"
        lines.append(f"step {change.step}: {cost_key(shift.key)} {became}")
    return "\n".join(lines) + "\n"


def _operations(found: Observed) -> Iterator[tuple[str, ...]]:
    measured = found.measured
    shown = [op for op in _OPERATIONS if any(key[0] is op for key in measured.operations)]
    yield ("stage", "chunk", *(op.value for op in shown), "samples", "since step")
    for chunk, stage in sorted(enumerate(measured.placement), key=lambda home: (home[1], home[0])):
        estimates = [measured.operations.get((op, chunk)) for op in shown]
        samples = sum(each.samples for each in estimates if each is not None)
        since = max((measured.since.get((op, chunk), 0) for op in shown), default=0)
        cells = ["-" if each is None else _value(each) for each in estimates]
        yield (str(stage), str(chunk), *cells, str(samples), str(since or "-"))


def _links(found: Observed) -> Iterator[tuple[str, ...]]:
    yield ("link", "delay", "wire", "Mbit/s", "clock offset", "samples", "since step", "")
    for way, link in sorted(found.measured.links.items()):
        wire = _value(link.wire) if link.wire.samples else "-"
        rate = "-" if link.rate_mbit is None else f"{link.rate_mbit:.1f}"
        samples, offset = str(link.delay.samples), f"{link.offset_ms:.3f}"
        yield (f"{way[0]}>{way[1]}", _delay(link), wire, rate, offset, samples, _since(found, way), _note(link))


def _delay(link: LinkEstimate) -> str:
    return f"<= {link.delay.value_ms:.3f}" if link.upper_bound else _value(link.delay)


def _note(link: LinkEstimate) -> str:
    return "no receiver waited" if link.upper_bound else ""


def _value(estimate: Estimate) -> str:
    return f"{estimate.value_ms:.3f} +- {estimate.uncertainty_ms:.3f}"


def _since(found: Observed, key: Any) -> str:
    return str(found.measured.since.get(key, "-"))
