"""From flight records to estimates: the same as live; a new life of a replica; the profile that planners read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helixrt import cli
from helixrt.observe.run_costs import observed, profile
from helixrt.record import JsonLinesSink
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.exchange.profile import read
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Pair
from helixrt.schedule.simulate import makespan_ms
from tests.observe.measured_world import World

TRUE = with_delays(uniform(3, 10.0, 12.0, 8.0), {(0, 1): 1.0, (1, 0): 1.0, (1, 2): 1.0, (2, 1): 1.0})
SLOW = with_delays(TRUE, {(1, 2): 40.0})


def world(seed: int = 0, one_host: bool = True) -> World:
    return World(policies.build("zb", TRUE, 8), lambda step: SLOW if step >= 10 else TRUE, seed, one_host=one_host)


def test_estimates_from_files_are_those_of_the_leader() -> None:
    (found,) = observed(world().events(14))
    live = world().estimator(14)
    measured = live.estimates()
    assert measured is not None and found.replica == 0
    assert found.measured.operations.keys() == measured.operations.keys() and found.shifts and found.stragglers
    assert found.measured.costs().forward == pytest.approx(measured.costs().forward, rel=0.05)
    (early,) = observed(world().events(14), until=9)
    assert early.measured.step == 9 and not early.shifts
    assert early.measured.links[1, 2].delay.value_ms == pytest.approx(1.0, abs=0.2)


def test_a_new_life_warms_up_again_and_numbers_its_messages_anew() -> None:
    both = world(one_host=False)
    events = both.events(8) + both.events(12, begin=9)
    (found,) = observed(events)
    assert found.measured.step == 12
    assert found.measured.links[1, 2].delay.value_ms == pytest.approx(40.0, abs=5.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run, with flight records."""
    sinks = {rank: JsonLinesSink(tmp_path / "flight" / f"{rank}.inc0.jsonl") for rank in ("r0.pp0", "r0.pp1", "r0.pp2")}
    for event in world().events(16):
        sinks[event.rank](event)
    for sink in sinks.values():
        sink.close()
    return tmp_path


def test_the_command_tells_costs_stragglers_and_changes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["observe", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "3 stages, 8 micro-batches, as of step 16" in text
    assert "straggler: link 1>2: a message takes 4" in text and "step 10: link 1>2 changed from 1.0" in text
    assert cli.main(["observe", str(folder), "--until", "9"]) == 0
    assert "no stragglers" in capsys.readouterr().out
    assert cli.main(["observe", str(folder), "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [s["place"] for s in found["stragglers"]] == ["link 1>2"] and found["placement"] == [0, 1, 2]
    assert {(o["op"], o["chunk"]) for o in found["operations"]} == {(op, chunk) for op in "FBW" for chunk in range(3)}


def test_schedule_plans_with_the_profile_of_a_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    assert cli.main(["observe", str(folder), "--profile", str(file), "-o", str(tmp_path / "text")]) == 0
    assert cli.main(["schedule", "--profile", str(file), "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    delays = ["--delay", "0:1", "--delay", "1>2:40", "--delay", "2>1:1"]
    sizes = ["--stages", "3", "--microbatches", "8", "--cost", "10,12,8"]
    assert cli.main(["schedule", *sizes, *delays, "--format", "json"]) == 0
    true = json.loads(capsys.readouterr().out)
    assert planned["makespan_ms"] == pytest.approx(true["makespan_ms"], rel=0.05)


def test_a_profile_adds_up_the_chunks_of_a_stage() -> None:
    schedule = policies.build("zbv", TRUE, 8)
    true = policies.costs_for("zbv", TRUE)
    (found,) = observed(World(schedule, lambda step: true, one_host=True).events(6))
    made = profile(found.measured)
    assert made["f"] == pytest.approx(TRUE.forward, rel=0.03) and made["stages"] == 3
    assert [ways[0] for ways in made["delay"]] == pytest.approx([1.0, 1.0], abs=0.2)


def test_a_profile_has_the_mean_factor_of_pairs_and_a_job_plans_pairs_from_it() -> None:
    true = replace(policies.costs_for("dualpipev", uniform(4, 10.0, 12.0, 8.0)), pair_factor=0.7)
    (found,) = observed(World(policies.build("dualpipev", true, 12), lambda step: true, one_host=True).events(8))
    text = json.dumps(profile(found.measured))
    assert json.loads(text)["pair_factor"] == pytest.approx(0.7, rel=0.02)
    costs = read(text, "costs", "profile.json").costs
    apart = replace(costs, pair_factor=1.0)
    planned, without = (policies.build("helix", each, 12) for each in (costs, apart))
    pairs = [entry for line in planned.entries for entry in line if isinstance(entry, Pair)]
    assert pairs and makespan_ms(planned, costs) < 0.9 * makespan_ms(without, costs)
    assert "pair_factor" not in profile(observed(world().events(14))[0].measured)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["/not/there"], "RUN_FOLDER=/not/there: must be the folder of a run"),
        (["{folder}", "--replica", "7"], "--replica=7: was not measured"),
        (["{folder}", "--until", "0"], "--until=0: must be a whole number, at least 1"),
        (["{folder}", "--until", "1"], "has no step with all stages measured"),
        (["{folder}", "--profile", "/not/there/p.json"], "--profile=/not/there/p.json: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["observe", *(each.replace("{folder}", str(folder)) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
