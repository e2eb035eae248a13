"""The report of a made-up run that loses a replica: figures that must come out, and a page that stands alone."""

import dataclasses
import json
import math
import random
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helixrt.job.config import JobConfig, OutputConfig
from helixrt.job.controller import Happening, LifeEvent
from helixrt.job.description import Corpus, Description
from helixrt.job.leader_reports import Finished
from helixrt.job.metrics import StepMetrics, ValidationMetrics
from helixrt.job.output import summary_of
from helixrt.job.rank_context import flight_sink
from helixrt.job.report import RunFacts, read_flight, write_report
from helixrt.job.report_charts import loss_chart, ticks
from helixrt.job.report_inputs import run_metrics
from helixrt.job.storage_trouble import StorageTrouble
from helixrt.observe.failures import Loss, failures
from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.record import BoundedSink, Event, FlightRecord, JsonLinesSink, Kind

STEPS, LOST_IN, BACK_IN, STEP_S = 120, 20, 38, 0.5
BEGIN_S = 1_800_000_000.0
TOKENS = 16 * 128  # of a replica's batch
CORPUS = Corpus("some/text", 45 * 500, 1, "ef" * 32, 1000, 4.25)
LEFT: dict[str, Any] = dict(peer=1, rail=0, failure="path", reason="the peer's end was closed", usable=0)


class Clock:
    now = BEGIN_S

    def __call__(self) -> float:
        return self.now


class FakeRun:
    """Writes what the ranks and the driver of a run of 2 replicas x 2 stages would have written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.rng = folder, Clock(), random.Random(3)
        self.entries = [genesis("run", 2)]
        self.history: list[LifeEvent] = []
        self.metrics: list[str] = []
        self.sinks: list[JsonLinesSink] = []
        self.records = {(r, s): self.rank(r, s, 0) for r in (0, 1) for s in (0, 1)}
        for _ in range(2):  # told again by a second life
            self.records[0, 1].write(Kind.REACHED, peers=[1], transport="tcp", why="on another host")

    def rank(self, replica: int, stage: int, incarnation: int) -> FlightRecord:
        record = FlightRecord(f"r{replica}.pp{stage}", clock=self.clock)
        self.sinks.append(JsonLinesSink(self.folder / "flight" / f"{record.rank}.inc{incarnation}.jsonl"))
        record.attach(self.sinks[-1])
        record.write(Kind.RANK_START, pid=1, incarnation=incarnation)
        return record

    def at(self, seconds: float) -> None:
        self.clock.now = seconds

    def compute(self, replica: int, stage: int, begin_s: float, microbatches: int = 4) -> None:
        """1F1B of two stages: forward 20 ms, backward 40 ms."""
        record = self.records[replica, stage]
        order = "FFBFBFBB" if stage == 0 else "FBFBFBFB"
        now, count = begin_s + 0.03 * stage, {"F": 0, "B": 0}
        for op in order:
            took = (0.02 if op == "F" else 0.04) * self.rng.uniform(0.9, 1.2)
            self.at(now + took)
            record.write(Kind.OPERATION, begin_s=now, op=op, chunk=stage, microbatch=count[op])
            count[op] += 1
            tag = f"g0.s{record.step}.c1.m{count[op] - 1}.{op}"
            self.at(now + took + 0.006)
            if stage == 0:
                record.write(Kind.SEND, begin_s=now + took, tag=tag, bytes=65536)
            now += took + self.rng.uniform(0.002, 0.012)
            if stage == 1:
                record.write(Kind.RECV, begin_s=now - 0.008, tag=tag, bytes=65536, needed_s=now - 0.004)

    def step(self, step: int, begin_s: float, replicas: tuple[int, ...], members: tuple[int, ...], end_s: float) -> None:
        before = self.entries[-1]
        positions = {r: before.positions[r] + (r in replicas) for r in (0, 1)}
        record = CommitRecord(step, step, before.hash, tuple((r, 0) for r in replicas), positions, "run")
        self.entries.append(record)
        for replica in replicas:
            for stage in (0, 1):
                flight = self.records[replica, stage]
                flight.step = step
                self.at(begin_s + 0.002)
                if stage == 0:
                    flight.write(Kind.QUORUM_JOIN, begin_s=begin_s, lineage=before.hash)
                    flight.write(Kind.QUORUM, generation=step, members=members, contributors=replicas, behind=[])
                self.compute(replica, stage, begin_s + 0.004)
                for bucket in range(2):
                    self.at(end_s - 0.05 + 0.02 * bucket)
                    flight.write(
                        Kind.EXCHANGE_BUCKET, begin_s=end_s - 0.068 + 0.02 * bucket, generation=step, bucket=bucket, buckets=2,
                        bytes=1 << 20,
                    )  # fmt: skip
                self.at(end_s - 0.01)
                if stage == 0:
                    flight.write(Kind.COMMIT, generation=step, record=record.hash, contributors=replicas)
                self.at(end_s)
                flight.write(Kind.APPLY, begin_s=end_s - 0.009, record=record.hash)
            nats = (1.4 + 3.8 * math.exp(-step / 25) + self.rng.gauss(0, 0.05)) * math.log(2)
            label, seconds = f"r{replica}.pp0", end_s - begin_s
            line = StepMetrics(replica, label, step, nats, 2048, seconds, len(replicas), 0.03, 1.0, 1e-3, step)
            self.metrics.append(line.to_json())
        if step % 20 == 0:
            nats = (1.45 + 3.8 * math.exp(-step / 25)) * math.log(2)
            self.metrics.append(ValidationMetrics(0, step, nats, 8192).to_json())

    def play(self) -> RunFacts:
        now = BEGIN_S + 4
        for step in range(1, STEPS + 1):
            both = step < LOST_IN or step >= BACK_IN
            end = now + STEP_S
            if step == LOST_IN:
                end += 1.8
                self.lose(now)
                self.at(end + 0.25)
                self.records[0, 0].write(Kind.CHECKPOINT_END, lineage="", path="", after_failover=True, step=step)
            self.step(step, now, (0, 1) if both else (0,), (0,) if step == LOST_IN else (0, 1), end)
            now = end
            if step == LOST_IN:
                self.at(now + 1.5)
                self.history.append(LifeEvent(Happening.RESTARTED, 1, 1, self.clock()))
                self.records.update({(1, s): self.rank(1, s, 1) for s in (0, 1)})
        (self.folder / "metrics.jsonl").write_text("\n".join(self.metrics) + "\n")
        head = self.entries[-1]
        for sink in self.sinks:
            sink.close()
        return RunFacts(
            config=JobConfig(name="made-up"),
            description=Description("made up, 2 layers", "schedule 1f1b", TOKENS, CORPUS),
            entries=tuple(self.entries),
            finished=tuple(Finished(r, STEPS, head.hash, "ab" * 32, "cd" * 32) for r in (0, 1)),
            history=tuple(self.history),
            seconds=now - BEGIN_S,
        )

    def lose(self, begin_s: float) -> None:
        """Replica 1 is killed 100 ms into the step; replica 0 notices 1.2 s later."""
        for stage in (0, 1):
            self.records[1, stage].step = LOST_IN
            self.at(begin_s + 0.05)
            self.records[1, stage].write(Kind.OPERATION, begin_s=begin_s + 0.02, op="F", chunk=stage, microbatch=0)
        self.at(begin_s + 0.1)
        self.records[1, 0].write(Kind.FAILURE, replica=1, reason="chaos: killed at forward")
        self.history.append(LifeEvent(Happening.LOST, 1, 0, begin_s + 0.3, "signal 9"))
        self.at(begin_s + 1.3)
        self.records[0, 1].write(Kind.RAIL_LEFT, step=LOST_IN, **LEFT)
        self.records[0, 1].write(Kind.EXCHANGE_FAILED, step=LOST_IN, generation=LOST_IN, reason="peer lost")


@pytest.fixture
def facts(tmp_path: Path) -> RunFacts:
    return FakeRun(tmp_path).play()


class Page(HTMLParser):
    """Collects what a page refers to outside itself, and checks that its elements close."""

    VOID = {"meta", "link", "img", "br", "input"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.outside += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_figures_of_the_report(tmp_path: Path, facts: RunFacts) -> None:
    report = write_report(tmp_path, facts)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))
    assert report["steps"] == STEPS
    assert report["validation_bits_per_byte"] == pytest.approx(1.45 + 3.8 * math.exp(-STEPS / 25))
    assert report["corpus_order0_bits_per_byte"] == CORPUS.order0_bits_per_byte
    assert report["corpus"]["bytes"] == 45 * 500 and report["corpus"]["sha256"] == CORPUS.sha256
    away = BACK_IN - LOST_IN
    assert report["data_audit"] == {
        "batches": 2 * STEPS - away, "gaps": 0, "repeats": 0, "superseded": 0, "excluded": 0,
        "per_replica": {"0": STEPS, "1": STEPS - away}, "dealt": False, "unsure": {},
    }  # fmt: skip
    assert [r["parameters_digest"] for r in report["replicas"]] == ["ab" * 32] * 2
    (failure,) = report["failures"]
    assert (failure["replica"], failure["step"]) == (1, LOST_IN)
    assert failure["detected_after_s"] == pytest.approx(1.2, abs=1e-3)
    assert failure["survivors_stalled_s"] == pytest.approx(1.8, abs=1e-3)
    assert failure["rejoined_after_s"] == pytest.approx(1.8 + STEP_S * away - 0.1, abs=0.1)
    (left,) = report["rails_left"]
    assert left.pop("at_s") == pytest.approx(4 + STEP_S * (LOST_IN - 1) + 1.3)
    saved = dict(checkpoint_step=LOST_IN, checkpoint_after_s=pytest.approx(1.25))
    assert left == dict(rank="r0.pp1", towards="", step=LOST_IN, back_after_s=None, **saved, **LEFT)
    assert report["transports"] == [{"rank": "r0.pp1", "peer": 1, "transport": "tcp", "why": "on another host"}]
    assert report["checkpoints"] == [{"step": LOST_IN, "after_failover": True}]
    tokens = (2 * STEPS - away - 2) * TOKENS
    assert report["tokens_per_s"] == pytest.approx(tokens / (STEP_S * (STEPS - 1) + 1.8), rel=1e-3)
    assert {"python", "torch", "numpy"} <= set(report["versions"])


def test_page_stands_alone_and_shows_everything(tmp_path: Path, facts: RunFacts) -> None:
    write_report(tmp_path, facts)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.open == [] and page.outside == [] and "@import" not in text and "url(" not in text
    assert text.count("<svg") == 4, "loss, participants, an undisturbed step, the step of the loss"
    assert json.loads((tmp_path / "report.json").read_text())["failures"][0]["seen"] == "signal 9"
    for part in ("signal 9", "replica 1 lost in step 20", "1.20 s", "1.80 s", "chaos: killed at forward",
                 "order-0 entropy of the corpus",
                 "made-up: made up, 2 layers", "schedule 1f1b", CORPUS.sha256,
                 "ab" * 32, "every batch exactly once, as its loader deals them", "r0.pp1", "r1.pp0",
                 "Rails that were left", "the peer&#39;s end was closed",
                 'class="message-F"', "waiting for a message"):  # fmt: skip
        assert part in text, part
    numbers = [float(n) for n in re.findall(r' (?:x|y|x1|y1|cx|cy|width|height)="([-\d.]+)"', text)]
    assert all(-1 <= n <= 1100 for n in numbers), "everything is drawn inside"
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text.lower())


def test_a_job_that_tells_nothing_of_its_data_has_a_report_without_it(tmp_path: Path, facts: RunFacts) -> None:
    report = write_report(tmp_path, dataclasses.replace(facts, description=Description()))
    assert report["corpus"] is None and report["corpus_order0_bits_per_byte"] is None
    text = (tmp_path / "report.html").read_text()
    assert Page(text).open == [] and "Corpus" not in text and "order\u20110" not in text and "None" not in text
    assert "order-0" not in "".join(summary_of(report))


def test_run_that_was_lost_at_once_still_has_a_report(tmp_path: Path, facts: RunFacts) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    lost = LifeEvent(Happening.LOST, 0, 0, BEGIN_S, "signal 9")
    report = write_report(empty, RunFacts(facts.config, facts.description, facts.entries[:1], (), (lost,), 1.0))
    assert report["validation_bits_per_byte"] is None and report["data_audit"]["batches"] == 0
    assert report["failures"][0]["rejoined_after_s"] is None
    assert Page((empty / "report.html").read_text()).open == []


def test_what_could_not_be_written_and_what_was_lost_for_it_is_told(tmp_path: Path, facts: RunFacts) -> None:
    calm = write_report(tmp_path, facts)
    assert calm["storage"] == [] and calm["unsaved"] == "" and "Storage" not in (tmp_path / "report.html").read_text()
    clock = Clock()
    clock.now = BEGIN_S + 10
    record = FlightRecord("r0.pp0", clock=clock)
    trouble = StorageTrouble("checkpoint", record)
    trouble.failed(5, OSError(28, "No <space> left"))
    trouble.worked(6)
    with open(tmp_path / "flight" / "r0.pp0.storage.jsonl", "w") as file:
        file.writelines(event.to_json() + "\n" for event in record.events())
    lost = tuple(dataclasses.replace(f, unsaved="No <space> left") for f in facts.finished)
    report = write_report(tmp_path, dataclasses.replace(facts, finished=lost))
    assert [(each["step"], each["written"], each["failures"]) for each in report["storage"]] == [(5, False, 1), (6, True, 1)]
    text = (tmp_path / "report.html").read_text()
    assert report["unsaved"] == "No <space> left" and "LOST" in text and "No <space>" not in text
    assert Page(text).open == [] and "written after 1 failed attempts" in text


def test_names_from_outside_are_escaped(tmp_path: Path, facts: RunFacts) -> None:
    config = JobConfig(name="<script>alert(1)</script>", output=OutputConfig(root="a&b<c>"))
    write_report(tmp_path, RunFacts(config, facts.description, facts.entries, facts.finished, facts.history, 1.0))
    assert "<script>alert" not in (tmp_path / "report.html").read_text()


def test_cut_and_merged_flight_lines_are_left_out(tmp_path: Path, facts: RunFacts) -> None:
    path = tmp_path / "flight" / "r1.pp0.inc0.jsonl"
    before = write_report(tmp_path, facts)
    path.write_text(path.read_text() + '{"kind":"operat{"kind":"step_end"}\n{"kind"')
    assert write_report(tmp_path, facts) == before


@pytest.mark.parametrize(("low", "high"), [(0, 200), (1.37, 5.2), (0, 0.003), (0, 61.234), (5, 5)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert len(found) <= 8 and all(low - 1e-9 <= t <= high + 1e-9 for t in found)
    assert low == high or len(found) >= 3


def test_replica_that_is_given_up_was_lost_once_per_life(tmp_path: Path, facts: RunFacts) -> None:
    lost, given_up = Happening.LOST, Happening.GIVEN_UP
    told = [(lost, 0), (Happening.RESTARTED, 1), (lost, 1), (given_up, 1), (given_up, 2)]
    history = tuple(LifeEvent(kind, 1, life, BEGIN_S + i, "signal 9") for i, (kind, life) in enumerate(told))
    facts = RunFacts(facts.config, facts.description, facts.entries, facts.finished, history, 1.0)
    assert len(write_report(tmp_path, facts)["failures"]) == 3


def test_figures_of_a_part_of_the_run_are_shown_as_such(tmp_path: Path, facts: RunFacts) -> None:
    """Of a run that was resumed, or that another driver has begun."""
    report = write_report(tmp_path, dataclasses.replace(facts, seconds=9.0, updates=3, goodput=0.5))
    page = (tmp_path / "report.html").read_text()
    assert report["updates_in_seconds"] == 3 and "3 of them in 9 s" in page and "50%" in page
    report = write_report(tmp_path, dataclasses.replace(facts, seconds=9.0, updates=report["steps"], goodput=None))
    page = (tmp_path / "report.html").read_text()
    assert report["goodput"] is None and "unknown" in page and "of them in" not in page and "in 9 s" in page


def test_a_skipped_batch_is_named(tmp_path: Path, facts: RunFacts) -> None:
    skipped = LifeEvent(Happening.SKIPPED, 1, 1, BEGIN_S + 9, "the batch at position 12 ended <it> twice")
    facts = dataclasses.replace(facts, history=(*facts.history, skipped))
    report = write_report(tmp_path, facts)
    assert report["skipped_batches"] == [{"replica": 1, "at_s": 9.0, "reason": skipped.why}]
    page = (tmp_path / "report.html").read_text()
    assert "position 12 ended &lt;it&gt; twice" in page and Page(page).open == []


def test_a_clock_that_steps_back_in_a_run_leaves_a_report(tmp_path: Path) -> None:
    class SteppedBack(FakeRun):
        def at(self, seconds: float) -> None:
            super().at(seconds - (3600.0 if seconds > BEGIN_S + 30 else 0.0))

    report = write_report(tmp_path, SteppedBack(tmp_path).play())
    assert report["steps"] == STEPS and report["data_audit"]["gaps"] == 0
    assert Page((tmp_path / "report.html").read_text()).open == []


def test_a_change_of_the_order_is_shown_with_both_gains_and_a_step_before_and_after(tmp_path: Path) -> None:
    class ChangesOrder(FakeRun):
        def step(self, step: int, *others: Any) -> None:
            super().step(step, *others)
            leader = self.records[0, 0]
            if step == 60:
                told = dict(order="ab12", before="", why="<stage> 1 sends late", present_ms=500.0, predicted_ms=320.0)
                leader.write(Kind.ORDER, step=step, **told)  # type: ignore[arg-type]
                leader.write(Kind.ORDER_READY, step=step, order="ab12", seconds=0.25, failed="")
            elif step == 70:
                leader.write(Kind.ORDER_GAIN, step=step, order="ab12", before_ms=505.0, after_ms=331.0, predicted_ms=180.0)

    report = write_report(tmp_path, ChangesOrder(tmp_path).play())
    (change,) = report["order_changes"]
    assert (change["replica"], change["step"], change["order"], change["ready_s"]) == (0, 60, "ab12", 0.25)
    times = [change[name] for name in ("present_ms", "predicted_ms", "before_ms", "after_ms")]
    assert times == [500.0, 320.0, 505.0, 331.0]
    page = (tmp_path / "report.html").read_text()
    assert Page(page).open == [] and "&lt;stage&gt; 1 sends late" in page
    for when in ("Step 60, before", "Step 63, after"):
        assert f"{when} replica 0 changed the order of its schedule" in page
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    at = cells.index("&lt;stage&gt; 1 sends late")
    assert all(number in cells[at + 1] for number in ("500", "320")) and all(n in cells[at + 2] for n in ("505", "331"))


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_left_out_of_the_chart(worst: float) -> None:
    """A step of which nothing is applied has no loss; its figure must not cost the report."""
    losses = [3.0, worst, 2.0, 1.0]
    steps = [StepMetrics(0, "r0", n, loss, 8, 1.0, 1, 0.0, 1.0, 1e-3, n) for n, loss in enumerate(losses, start=1)]
    validations = [ValidationMetrics(0, 2, worst, 8), ValidationMetrics(0, 4, 1.5, 8)]
    chart = loss_chart(steps, validations, None, [])
    assert chart.count('class="loss"') == 2 and chart.count("validation-dot") == 1  # the line is broken there
    drawn = re.findall(r'(?:points|cx|cy|y1|y2|x)="([^"]*)"', chart)
    assert not any("nan" in text or "inf" in text for text in drawn)
    assert "no step was recorded" in loss_chart([dataclasses.replace(steps[1])], validations[:1], None, [])


def test_of_what_each_step_writes_the_newest_is_read_and_of_the_rest_all(tmp_path: Path) -> None:
    """The report of a run of months fits into memory."""
    for rank in ("r0.pp0", "r1.pp0"):
        for life in (0, 1):
            sink, record = BoundedSink(tmp_path / f"{rank}.inc{life}.jsonl", 64 << 20), FlightRecord(rank)
            record.attach(sink)
            for step in range(9_000):
                record.step = 10_000 * life + step
                record.write(Kind.STEP_BEGIN)
                record.write(Kind.SEND, tag="t")
                if step % 1000 == 0:
                    record.write(Kind.COSTS_CHANGED, what="F of chunk 1", since=step, before_ms=1.0, after_ms=2.0)
            sink.close()
    events = read_flight(tmp_path, most=20_000)
    for rank in ("r0.pp0", "r1.pp0"):
        mine = [event for event in events if event.rank == rank]
        newest = [*range(8_000, 9_000), *range(10_000, 19_000)]
        assert [event.step for event in mine if event.kind is Kind.STEP_BEGIN] == newest, "of both lives"
        assert [event.step for event in mine if event.kind is Kind.SEND] == newest
        assert len([event for event in mine if event.kind is Kind.COSTS_CHANGED]) == 18, "all"
    assert {event.rank for event in read_flight(tmp_path, most=20_000, replica=1)} == {"r1.pp0"}


def test_what_is_read_of_many_ranks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, most, read = 40, 10_000, [0]

    def counting(line: str) -> Event:
        read[0] += 1
        return from_json(line)

    from_json = Event.from_json
    for rank in range(ranks):
        sink, record = BoundedSink(tmp_path / f"r{rank}.pp0.inc0.jsonl", 64 << 20), FlightRecord(f"r{rank}.pp0")
        record.attach(sink)
        record.write(Kind.RANK_START, pid=1, incarnation=0)
        for step in range(2_000):
            record.write(Kind.COMMIT, step=step)
            record.write(Kind.OPERATION, step=step, op="F")
        sink.close()
    monkeypatch.setattr(Event, "from_json", counting)
    events = read_flight(tmp_path, most=most)
    kinds = Counter(event.kind for event in events)
    assert kinds == {Kind.RANK_START: ranks, Kind.COMMIT: most, Kind.OPERATION: most}
    assert {event.step for event in events if event.kind is Kind.COMMIT} == set(range(1_750, 2_000))
    blocks = 2 * ranks * ((1 << 16) // 90)  # what a file's last block may have beyond
    assert read[0] <= 2 * most + ranks + blocks < 2 * 2_000 * ranks


def test_lives_of_a_rank_before_the_newest_two_are_shrunk_and_their_failures_are_still_told(tmp_path: Path) -> None:
    losses = []
    for life in range(5):
        clock = Clock()
        sink, record = flight_sink(tmp_path, "r0.pp0", life, 1 << 20), FlightRecord("r0.pp0", clock=clock)
        record.attach(sink)
        clock.now = BEGIN_S + 1000.0 * life
        record.write(Kind.RANK_START, pid=1, incarnation=life)
        for step in range(4_000):
            clock.now += 0.1
            record.write(Kind.WORK_BEGIN, step=100_000 * life + step)
            record.write(Kind.OPERATION, step=100_000 * life + step, op="F")
        losses.append(Loss(0, life, clock.now + 2.0, "killed"))
        sink.close()
    pages = {path.name for path in tmp_path.iterdir()}
    assert {name for name in pages if ".detail" in name or ".old" in name} == {
        f"r0.pp0.inc{life}.{page}" for life in (3, 4) for page in ("detail.jsonl",)
    }
    for life in (0, 1, 2):
        assert (tmp_path / f"r0.pp0.inc{life}.jsonl").stat().st_size <= 16 << 10
    events = read_flight(tmp_path)
    assert [e.detail["incarnation"] for e in events if e.kind is Kind.RANK_START] == [0, 1, 2, 3, 4]
    for found, loss in zip(failures(events, losses), losses, strict=True):
        assert found.lost_s == pytest.approx(loss.seen_s - 2.0), "its last sign of life"
        assert found.step == 100_000 * loss.incarnation + 3_999


@pytest.mark.parametrize("most", [100_000, 300_000, 10**9])
def test_of_very_long_metrics_a_sample_is_read_and_the_report_says_so(tmp_path: Path, most: int) -> None:
    path = tmp_path / "metrics.jsonl"
    replicas, steps = 4, 1_000
    with open(path, "w") as file:
        for step in range(1, steps + 1):
            for replica in range(replicas):
                file.write(StepMetrics(replica, "r", step, 1.0, 8, 1.0, 4, 0.0, 1.0, 1e-3, step).to_json() + "\n")
    size, found = path.stat().st_size, run_metrics(path, most)
    assert found.bytes == size and found.read_bytes == min(most, size)
    one = size / (steps * replicas)
    assert len(found.steps) <= found.read_bytes / one + 2 * 512
    assert (found.steps[0].step, found.steps[-1].step) == (1, steps)
    between = sorted({each.step for each in found.steps})
    assert max(b - a for a, b in pairwise(between)) <= (1 if most > size else 20), "from everywhere"
    assert ("Sampled" in found.sample) == (most < size)


def test_the_driver_says_that_a_report_is_made_from_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    facts = FakeRun(tmp_path).play()
    write_report(tmp_path, facts, told.append)
    assert told == []
    monkeypatch.setattr("helixrt.job.report.LARGE_BYTES", 1000)
    write_report(tmp_path, facts, told.append)
    assert len(told) == 1 and "writes the report from 0.0 GB" in told[0]
