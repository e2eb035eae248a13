"""Whole runs of the main job in local processes, with a kill or another fault at every moment of a step: each ends
consistent, none leaves a process.

A kill and three of the faults run on every commit, all of them with `make test-slow`: those of a kind in one run, one after the
other.
"""

import random
import re
import signal
import time
from typing import Any

import pytest

from helixrt.job.chaos import FAULTS, LEADER_MOMENTS, MOMENTS, SLOW, fault_moments
from helixrt.job.checkpoint import Checkpoint, step_folders
from helixrt.protocol.step.lineage import Log
from tests.train.jobs import (
    EVERY,
    HASTY_JOB,
    Job,
    assert_consistent,
    finish,
    kills,
    kills_driver,
    waits_for_checkpoint,
)

pytestmark = [
    pytest.mark.timeout(300),
]


STEP_MOMENTS = [moment for moment in MOMENTS if moment not in ("checkpoint", "fetch", "driver")]
APART = 15  # steps between two faults of a run: the replica that was lost before has rejoined


def check_killed(run: Job, failure: dict[str, Any], replica: int, step: int, moment: str) -> None:
    assert (failure["replica"], failure["step"]) == (replica, step) and moment in failure["reason"]
    assert failure["detected_after_s"] is not None and failure["survivors_stalled_s"] is not None
    assert failure["rejoined_after_s"] is not None
    assert failure["survivors_recomputed"] == 0, "a broken exchange is tried again with the gradients that were kept"
    chain = run.log().chain()
    alone = [r.step for r in chain if r.replicas == (1 - replica,) and step <= r.step < step + APART]
    assert alone, "the survivor went on alone"
    assert chain[-1].replicas == (0, 1), "and not to the end"


@pytest.mark.system
@pytest.mark.parametrize("transport", ["auto", "native"])
def test_replica_killed_in_a_step_comes_back(make_job: Any, seed: int, transport: str) -> None:
    choice = random.Random(seed)
    replica, step = choice.randrange(2), choice.randint(3, 16)
    run = make_job(kills((replica, step, "exchange_late")), f"transport.kind={transport}", patient=True)
    report = assert_consistent(run, run.run(), lost=[replica])
    check_killed(run, report["failures"][0], replica, step, "exchange_late")


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_replicas_killed_in_turn_at_every_moment_of_a_step_come_back(make_job: Any, seed: int) -> None:
    moments = random.Random(seed).sample(STEP_MOMENTS, len(STEP_MOMENTS))
    chosen = [(number % 2, 5 + APART * number, moment) for number, moment in enumerate(moments)]
    steps = chosen[-1][1] + 2 * APART
    run = make_job(kills(*chosen), f"steps={steps}", "restarts=20", patient=True)
    report = assert_consistent(run, run.run(deadline_s=440.0), [replica for replica, _, _ in chosen], steps)
    for failure, kill in zip(report["failures"], chosen, strict=True):
        check_killed(run, failure, *kill)


@pytest.mark.slow
def test_restarted_replica_killed_again_while_it_fetches(make_job: Any, seed: int) -> None:
    choice = random.Random(seed)
    replica, step = choice.randrange(2), choice.randint(3, 12)
    run = make_job(kills((replica, step, "forward"), (replica, step + 1, "fetch")), patient=True)
    report = assert_consistent(run, run.run(), lost=[replica, replica])
    assert ["fetch" in f["reason"] for f in report["failures"]] == [False, True]


def assert_resumed_from(run: Job, saved: Checkpoint, before: Log) -> None:
    """What came after the log `before` goes on from this checkpoint, positions included, and supersedes the rest."""
    log = run.log()
    assert [e.hash for e in log.entries[: len(before)]] == [e.hash for e in before.entries]
    first = log.entries[len(before)]
    assert (first.parent, first.step) == (saved.record.hash, saved.record.step + 1)
    expected = {r: n + (r in first.replicas) for r, n in saved.record.positions.items()}
    assert first.positions == expected
    assert all(e.step > saved.record.step for e in log.superseded())


@pytest.mark.system
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_driver_killed_then_resumed(stages: int, make_job: Any, seed: int) -> None:
    step = random.Random(seed).randint(22, 39)
    run = make_job("steps=60", f"mesh.pp={stages}")
    run.overrides += kills_driver(run, step)
    died = run.run()
    assert died.code == -signal.SIGKILL, run.why(died)
    assert not (run.folder / "report.json").exists()
    saved, before = run.newest_checkpoint(), run.log()
    # The ranks may be ahead of the driver, and the records of the last moments not on disk; those up to the checkpoint are.
    assert saved.record.step >= EVERY and before.on_chain(saved.record.hash)
    assert_consistent(run, run.run("resume=true"), steps=60)
    assert_resumed_from(run, saved, before)


@pytest.mark.slow
def test_all_replicas_lost_then_resumed_from_the_whole_checkpoint(make_job: Any) -> None:
    """The newest checkpoint is left half-written, so the one before it is used."""
    half, whole = 3 * EVERY, 2 * EVERY
    run = make_job(kills((0, half, "checkpoint"), (1, half + 1, "forward")), "restarts=0", "steps=60")
    run.overrides += (waits_for_checkpoint(run, half - 1, whole),)
    failed = run.run()
    assert failed.code == 1, run.why(failed)
    assert "1 failure without a commit (restarts=0): killed by SIGKILL" in failed.err and "Traceback" not in failed.err
    saved, before = run.newest_checkpoint(), run.log()
    assert saved.record.step == whole
    newest = step_folders(run.folder / "checkpoints")[0]
    assert newest.name.startswith(f"step_{half:08d}") and not (newest / "complete.json").exists()
    assert any(newest.glob("rank_*/*")), "some of it was written"
    assert_consistent(run, run.run("resume=true", "restarts=3"), steps=60)
    assert_resumed_from(run, saved, before)


FAULTS_EVERY_COMMIT = [("stop", "exchange_early"), ("exception", "before_commit"), ("slow", "forward")]
FAULTS_ALONE = [
    *FAULTS_EVERY_COMMIT,
    *(
        pytest.param(kind, "checkpoint", marks=[pytest.mark.slow, pytest.mark.grid])
        for kind in FAULTS
        if "checkpoint" in fault_moments(kind)
    ),
]
SEEN = {  # by the driver; a rank that waits for a stuck one may give up first, and then names it
    "stop": r"has not reported for \d+ s: it is stopped",
    "hang_lock": r"has not reported for \d+ s: it is stopped, or its interpreter lock is held",
    "hang": r"has made no progress for \d+ s: \w+ thread in",
    "exception": "chaos: exception at",
    "oom": "DefaultCPUAllocator",
}


def faults(*chosen: tuple[str, int, int, int, str]) -> str:
    """The override for these faults: (kind, replica, rank, step, moment)."""
    each = (f"{{kind: {k}, replica: {r}, rank: {n}, step: {s}, moment: {m}, seconds: 2}}" for k, r, n, s, m in chosen)
    return f"chaos.fault=[{', '.join(each)}]"


def check_failed(failure: dict[str, Any], kind: str, replica: int, rank: int, step: int, moment: str) -> None:
    assert failure["reason"] == f"chaos: {kind} at {moment} on rank {rank}" and failure["step"] >= step
    assert f"r{replica}.pp{rank}." in failure["seen"] and re.search(SEEN[kind], failure["seen"])
    assert failure["rejoined_after_s"] is not None


HALVES = {"exception": 2, "oom": 2}  # a replica that blames itself three times is given up: three of six faults in a run
IN_TURN = [(kind, part) for kind in FAULTS for part in range(HALVES.get(kind, 1))]


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("kind", "part"), IN_TURN)
def test_ranks_that_fail_in_turn_at_every_moment_of_a_step_are_named_and_replaced(
    kind: str, part: int, make_job: Any, seed: int
) -> None:
    choice = random.Random(seed)
    moments = choice.sample(STEP_MOMENTS[part :: HALVES.get(kind, 1)], len(STEP_MOMENTS) // HALVES.get(kind, 1))
    ranks = [0 if moment in LEADER_MOMENTS else choice.randrange(2) for moment in moments]
    chosen = [(kind, n % 2, ranks[n], 5 + APART * n, moment) for n, moment in enumerate(moments)]
    steps = chosen[-1][3] + 2 * APART
    lost = [] if kind == SLOW else chosen
    run = make_job(faults(*chosen), "step_timeout_s=10", f"steps={steps}", "restarts=20", patient=kind != SLOW)
    report = assert_consistent(run, run.run(deadline_s=440.0), [replica for _, replica, *_ in lost], steps)
    for failure, fault in zip(report["failures"], lost, strict=True):
        check_failed(failure, *fault)


@pytest.mark.system
@pytest.mark.parametrize(("kind", "moment"), FAULTS_ALONE)
def test_rank_that_fails_otherwise_than_by_a_kill_is_named_and_replaced(
    kind: str, moment: str, make_job: Any, seed: int
) -> None:
    choice = random.Random(seed)
    step = EVERY if moment == "checkpoint" else choice.randint(3, 12)
    replica = 0 if moment == "checkpoint" else choice.randrange(2)  # the lowest contributor writes
    rank = 0 if moment in LEADER_MOMENTS else choice.randrange(2)
    # An error while a checkpoint is written costs the checkpoint alone.
    survives = kind == SLOW or (moment == "checkpoint" and kind in ("exception", "oom"))
    run = make_job(faults((kind, replica, rank, step, moment)), "step_timeout_s=20", patient=not survives)
    report = assert_consistent(run, run.run(), lost=[] if survives else [replica])
    if not survives:
        (failure,) = report["failures"]
        check_failed(failure, kind, replica, rank, step, moment)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.timeout(480)
@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != SLOW])
def test_restarted_replica_that_fails_otherwise_while_it_fetches(kind: str, make_job: Any, seed: int) -> None:
    """It has not been through a step yet, so one that hangs has the time of a start, two minutes. A fetch that hangs alone may
    be replaced by a newer one before anybody is stuck."""
    choice = random.Random(seed)
    replica, rank, step = choice.randrange(2), choice.randrange(2), choice.randint(3, 12)
    fault = faults((kind, replica, rank, step + 1, "fetch"))
    run = make_job(kills((replica, step, "forward")), fault, "step_timeout_s=10", patient=True)
    ended = run.run(deadline_s=420.0)
    replaced = kind == "hang" and ended.code == 0 and len(run.report()["failures"]) == 1
    report = assert_consistent(run, ended, lost=[replica] if replaced else [replica, replica])
    reasons = ["chaos: killed at forward", f"chaos: {kind} at fetch on rank {rank}"]
    assert [f["reason"] for f in report["failures"]] == (reasons[:1] if replaced else reasons)
    assert replaced or f"r{replica}.pp{rank}." in report["failures"][1]["seen"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
    ids=["Ctrl-C", "SIGTERM"],
)
@pytest.mark.parametrize(
    "when",
    ["in a step", pytest.param("at the start", marks=pytest.mark.slow), pytest.param("at the imports", marks=pytest.mark.slow)],
)
def test_asked_to_end_it_ends_everything(number: signal.Signals, code: int, when: str, make_job: Any) -> None:
    run = make_job("steps=100000", "checkpoint.every=0")
    driver = run.start()
    deadline, at_work = time.monotonic() + 120, False
    while not at_work and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        at_work = {
            "in a step": lambda: len(run.entries()) > 3,
            "at the start": lambda: len(run.processes()) >= 6,  # driver, forerunner, four ranks
            "at the imports": lambda: any(run.root.glob("*/*/run.json")),  # the driver waits for the forerunner
        }[when]()
    assert at_work, "it did not begin"
    driver.send_signal(number)
    ended = finish(driver, 60.0)
    assert ended.code == code, run.why(ended)
    said = [line for line in ended.err.splitlines() if not line.startswith("[W")]  # torch warns of a slow name look-up
    assert said == [{130: "interrupted", 143: "terminated"}[code]], ended.err


# The weights of the last step. 12 steps with a checkpoint every 5: the last one is due by no multiple.

LAST = ("steps=12", "checkpoint.every=5")


def commands_at(*chosen: tuple[int, str, str]) -> str:
    """The override for commands: (step, moment, command), all of replica 0."""
    each = (f"{{command: '{command}', replica: 0, step: {step}, moment: {moment}}}" for step, moment, command in chosen)
    return f"chaos.run=[{', '.join(each)}]"


@pytest.mark.system
def test_the_last_weights_are_saved_however_slow_the_disk_and_hasty_the_driver(make_job: Any) -> None:
    """The writer's disk takes longer than `step_timeout_s` and than any time that the driver gives a rank to leave."""
    run = make_job(*LAST, "step_timeout_s=15", commands_at((12, "checkpoint", "sleep 20")))
    run.program = HASTY_JOB
    assert_consistent(run, run.run(), steps=12)
    assert run.newest_checkpoint().record == run.log().head
    assert run.report()["unsaved"] == ""


@pytest.mark.system
def test_weights_that_cannot_be_saved_fail_the_run_and_say_so(make_job: Any) -> None:
    run = make_job(*LAST, "checkpoint.retry_s=1", "mesh.pp=1")
    run.overrides += (commands_at((2, "forward", f"touch {run.root / 'latest' / 'checkpoints'}")),)
    ended = run.run()
    assert ended.code == 1, run.why(ended)
    assert "the weights of step 12 are lost: their checkpoint could not be written" in ended.err
    assert "Not a directory" in ended.err and "Traceback" not in ended.err
    report = run.report()
    assert "Not a directory" in report["unsaved"] and len(report["replicas"]) == 2 and report["failures"] == []
