"""Validation that all replicas share: what is dealt, how parts are joined, and whole runs against one process."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.errors import ConfigError, MisuseError
from helixrt.job.evaluation import Part, PartSums, part_of
from helixrt.job.evaluation_orders import EvaluationOrders, parts_of
from helixrt.job.metrics import Logged, ValidationPart, read_metrics_line
from helixrt.job.shared_validation import LATE_S, SharedValidations
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Exclusion, Log, genesis
from helixrt.replica.commands import Evaluate, decode, encode
from tests import programs
from tests.job.lineage_oracle import chain, follow
from tests.job.session_world import LocalHost, batches, ready, summed, worked

FIRST = genesis("run", 4)


def after(parent: CommitRecord, *replicas: int, step: int = 0, **more: Any) -> CommitRecord:
    contributors = tuple((replica, 0) for replica in replicas)
    return CommitRecord(step or parent.step + 1, parent.generation + 1, parent.hash, contributors, {}, "run", **more)


# ---------------------------------------------------------------- who evaluates what


def test_parts_are_dealt_over_those_that_hold_the_agreed_state() -> None:
    record = after(FIRST, 0, 3, step=10, excluded={2: Exclusion(0, 1)})  # 1 is behind
    orders = [EvaluationOrders(replica, 5, True, 100).behind(p.Apply(record), Log([FIRST])) for replica in range(4)]
    assert orders[1] is None, "a replica that was behind has no part"
    assert [None if order is None else order.of for order in orders] == [0, None, 2, 3]
    assert {order.among for order in orders if order is not None} == {(0, 2, 3)}
    parts = [part_of(order) for order in orders if order is not None]
    assert sorted(item for part in parts for item in part.of(41)) == list(range(41))
    assert orders[0] is not None and decode(encode(orders[0])) == orders[0], "it travels to the other ranks"


@pytest.mark.parametrize("command", ["apply", "replay", "load"])
def test_whatever_brings_the_state_is_followed_by_the_evaluation(command: str) -> None:
    record = after(FIRST, 0, 1, step=4)
    log = Log([FIRST, record])
    sent = {"apply": p.Apply(record), "replay": p.Replay(record), "load": p.Load(record.hash)}[command]
    shared, alone = EvaluationOrders(1, 2, True, 9), EvaluationOrders(0, 2, False, 9)
    assert shared.behind(sent, log) == Evaluate(4, record.hash, 1, (0, 1))
    repaired = "a committer whose own exchange broke replays its record, and nobody else evaluates it"
    assert alone.behind(sent, log) == (None if command == "load" else Evaluate(4, record.hash, 0, (0,))), repaired
    assert EvaluationOrders(1, 2, False, 9).behind(sent, log) is None, "of one replica alone"
    assert EvaluationOrders(1, 3, True, 9).behind(sent, log) is None, "the step is not due"
    assert EvaluationOrders(1, 2, True, 4).behind(sent, log) is None, "the last state is evaluated when all rest"
    assert EvaluationOrders(1, 0, True, 9).behind(sent, log) is None


@pytest.mark.parametrize("shared", [True, False])
def test_at_the_end_those_that_are_done_take_the_parts_of_those_that_are_not(shared: bool) -> None:
    generator = random.Random(5)
    for _ in range(200):
        committers = sorted(generator.sample(range(6), generator.randint(1, 6)))
        done = sorted(generator.sample(range(6), generator.randint(1, 6)))
        record = after(FIRST, *committers, step=8)
        orders = [EvaluationOrders(replica, 2, shared, 8) for replica in range(6)]
        own = [order for each in orders if each.replica in done and (order := each.at_the_end(record)) is not None]
        left = [order for each in orders if each.replica in done for order in each.left(record, done)]
        assert committers == list(parts_of(record))
        assert sorted(order.of for order in own + left) == (committers if shared else committers[:1])


def test_a_validation_before_the_first_step_is_asked_for_and_dealt_over_all_replicas() -> None:
    assert EvaluationOrders(1, 2, True, 8, replicas=2).before("g") is None
    assert EvaluationOrders(1, 2, True, 8, True, 2).before("g") == Evaluate(0, "g", 1, (0, 1))
    assert [EvaluationOrders(r, 2, False, 8, True, 2).before("g") for r in (0, 1)] == [Evaluate(0, "g", 0, (0,)), None]


# ---------------------------------------------------------------- how parts are joined


def part(record: CommitRecord, of: int, loss: float = 1.0, weight: float = 1.0, replica: int | None = None) -> ValidationPart:
    by, among = of if replica is None else replica, list(parts_of(record))
    line = ValidationPart(by, f"r{by}", record.step, record.hash, of, among, {"loss": loss}, weight)
    read = read_metrics_line(line.to_json())
    assert read == line and isinstance(read, ValidationPart)
    return read


def test_the_mean_is_that_over_all_items_whatever_the_parts_and_their_order() -> None:
    generator = random.Random(3)
    for _ in range(100):
        record = after(FIRST, *range(generator.randint(1, 9)), step=4)
        items = [[generator.gauss(2, 1) for _ in range(generator.randint(0, 5))] for _ in parts_of(record)]
        parts = [part(record, of, math.fsum(mine), len(mine)) for of, mine in enumerate(items)]
        generator.shuffle(parts)
        validations, told = SharedValidations(), list[Logged]()
        for each in parts + parts:  # the second time as if another replica had evaluated it again
            validations.add(each)
            told += validations.due(Log([FIRST, record]), 0.0)
        (line,), flat = told, [item for mine in items for item in mine]
        assert (line.step, line.weight, line.partial, line.parts) == (4, len(flat), "", len(parts))
        mean = sum(flat) / len(flat) if flat else math.nan
        assert line.values["loss"] == pytest.approx(mean, rel=1e-12, nan_ok=True)
        assert not list(validations.rest(Log([FIRST, record])))


def test_a_figure_without_a_lost_part_says_so_once_later_steps_were_committed() -> None:
    record = after(FIRST, 0, 1, 2, step=4)
    validations, log = SharedValidations(), Log([FIRST, record])
    validations.add(part(record, 0, 2.0, 1))
    validations.add(part(record, 2, 4.0, 2))
    assert not list(validations.due(log, 1e6)), "it may be evaluating still"
    log.append(after(record, 0, 2))
    assert not list(validations.due(log, 1e6)) and not list(validations.due(log, 1e6 + LATE_S - 1))
    (line,) = validations.due(log, 1e6 + LATE_S)
    assert line.values == {"loss": 2.0} and line.partial == "over 2 of 3 parts, without that of r1" and line.rank == "r0,r2"
    validations.add(part(record, 1, 100.0))
    assert not list(validations.due(log, 2e6)) and not list(validations.rest(log)), "a late part changes nothing"


def test_a_part_that_comes_in_time_makes_the_figure_whole() -> None:
    record = after(FIRST, 0, 1, step=4)
    validations, log = SharedValidations(), Log([FIRST, record, after(record, 0)])
    validations.add(part(record, 0, 2.0))
    assert not list(validations.due(log, 0.0))
    validations.add(part(record, 1, 4.0, replica=0))
    (line,) = validations.due(log, 1.0)
    assert line.values == {"loss": 3.0} and not line.partial and line.rank == "r0"


def test_of_a_superseded_record_nothing_partial_is_told() -> None:
    lost = after(FIRST, 0, 1, step=1)
    stands = replace(after(FIRST, 1, step=1), generation=9)
    validations, log = SharedValidations(), Log([FIRST, lost, stands])
    validations.add(part(lost, 0))
    validations.add(part(stands, 1, 7.0))
    told = [*validations.due(log, 0.0), *validations.due(log, LATE_S), *validations.rest(log)]
    assert [line.values["loss"] for line in told] == [7.0]


# ---------------------------------------------------------------- the session


def test_a_shared_evaluation_in_a_session() -> None:
    host, found = LocalHost(), list[Part]()
    session, model = ready(host)

    def measure(part: Part) -> PartSums:
        assert not torch.is_grad_enabled()
        found.append(part)
        return PartSums({"loss": summed(model, *batches()[0])}, 5)

    with pytest.raises(ConfigError, match="every=0: must be at least 1"):
        session.evaluate_shared(measure, every=0)
    session.evaluate_shared(measure, every=2)
    for step in worked(session, model, until=5):
        step.commit()
    assert found == [Part(0, 1)] * 2 and [step for step, _ in host.validated] == [2, 4]
    with pytest.raises(MisuseError, match="was called after"):
        session.evaluate_shared(measure, every=2)


@pytest.mark.parametrize(("result", "said"), [({"loss": 1.0}, "returned a dict"), (PartSums({}, -1), "weight=-1")])
def test_a_shared_evaluation_needs_sums_with_a_weight(result: Any, said: str) -> None:
    session, model = ready()
    session.evaluate_shared(lambda part: result, every=1)
    with pytest.raises(MisuseError, match=said):
        for step in worked(session, model, until=2):
            step.commit()


# ---------------------------------------------------------------- whole runs

SCRIPT = Path(__file__).with_name("shared_evaluation_script.py")
STEPS, EVERY, ITEMS = 24, 4, 50  # as in the script


def launch(case: str, folder: Path) -> list[dict[str, Any]]:
    """The validations of a run."""
    done = programs.succeeded(SCRIPT, case, folder, timeout=450)
    lines = [json.loads(line) for line in (newest(folder) / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["what"] == "validation"]
    for line in told:
        shown = f"{line['rank']}  step {line['step']}  validation  loss {line['values']['loss']:.6g}  doubled "
        assert shown in done.stdout and line["partial"] in done.stdout
    return told


def newest(folder: Path) -> Path:
    return (folder / "runs" / "latest").resolve()


def losses(folder: Path, told: list[dict[str, Any]]) -> list[float]:
    """What one process that follows the lineage finds over the same parts."""
    sys.argv[1:], before = ["calm", str(folder)], sys.argv[1:]
    try:
        from tests.job import shared_evaluation_script as script
    finally:
        sys.argv[1:] = before
    from helixrt.job.sampler import StreamSampler

    records, items, held_out = chain(newest(folder)), script.data(3, 96), script.data(5, ITEMS)
    model = script.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    wanted = {line["step"]: line for line in told}
    found: dict[int, float] = {}
    steps = iter(record.step for record in records[1:])

    def batch_at(replica: int, position: int) -> Any:
        sampler = StreamSampler(96, 3, replica, shuffle=True, seed=1)
        epoch, place = divmod(position, 8)
        sampler.set_epoch(epoch)
        return items[list(sampler.order()[4 * place : 4 * place + 4])]

    def loss(module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        return script.errors(module, *batch), len(batch[0])

    def update() -> None:
        optimizer.step()
        step = next(steps)
        if step in wanted:
            among = parts_of(records[step])
            missing = [among.index(int(r[1:])) for r in wanted[step]["partial"].partition("that of ")[2].split(", ") if r]
            mine = [item for item in range(ITEMS) if item % len(among) not in missing]
            assert wanted[step]["weight"] == len(mine) and wanted[step]["parts"] == len(among)
            with torch.no_grad():
                found[step] = float(script.errors(model, *held_out[mine]) / len(mine))

    follow(records, model, batch_at, lambda replica, position: None, loss, update)
    return [found[line["step"]] for line in told]


def check(folder: Path, told: list[dict[str, Any]]) -> None:
    assert sorted(line["step"] for line in told) == list(range(EVERY, STEPS + 1, EVERY)), "each agreed state once"
    assert [line["values"]["loss"] for line in told] == pytest.approx(losses(folder, told), rel=1e-9)
    assert all(line["values"]["doubled"] == pytest.approx(2 * line["values"]["loss"], rel=1e-12) for line in told)


@pytest.mark.slow  # a driver and three processes that import torch
@pytest.mark.timeout(480)
def test_a_replica_that_is_killed_in_a_validation(tmp_path: Path) -> None:
    """Of step 4 its part is missing, and the figure says so. While it is away the others share all. Of the last step it
    evaluates its part when it is back."""
    told = launch("killed", tmp_path)
    assert (tmp_path / "killed1").exists() and (tmp_path / "killed2").exists()
    check(tmp_path, told)
    by_step = {line["step"]: line for line in told}
    assert by_step[4]["partial"] == "over 2 of 3 parts, without that of r1" and by_step[4]["rank"] == "r0,r2"
    behind = [line for line in told if line["parts"] == 2]
    assert behind and {line["weight"] for line in behind} == {ITEMS}, "a replica that is behind has no part"
    lost = by_step[STEPS - EVERY]["partial"]  # what replica 2 told of the state before may be lost with it
    assert lost in ("", "over 2 of 3 parts, without that of r2")
    assert not any(line["partial"] for line in told if line["step"] not in (4, STEPS - EVERY))
    assert by_step[STEPS]["parts"] == 3, "it came back, and takes part again"


@pytest.mark.slow  # a driver and three processes that import torch
@pytest.mark.timeout(480)
def test_the_part_of_a_replica_that_is_given_up_is_evaluated_by_another(tmp_path: Path) -> None:
    told = launch("given up", tmp_path)
    check(tmp_path, told)
    (last,) = [line for line in told if line["step"] == STEPS]  # what it told of the state before may be lost with it
    assert not last["partial"] and last["rank"] == "r0,r2" and last["parts"] == 3
