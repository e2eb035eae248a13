"""Each moment of a step is recognised in the flight record, and a kill happens once, in its own life."""

from pathlib import Path

import pytest

from helixrt.errors import Fatal
from helixrt.record import FlightRecord, Kind
from helixrt.train.chaos import DRIVER, MOMENTS, ChaosSink, driver_is_due, kill_of
from helixrt.train.config import ChaosConfig, CommandConfig, KillConfig


def play(record: FlightRecord, step: int, buckets: int = 3, due_checkpoint: bool = True) -> None:
    """One step as a rank records it."""
    record.step = step
    record.write(Kind.STEP_BEGIN, position=step)
    record.write(Kind.QUORUM_JOIN, lineage="")
    record.write(Kind.QUORUM, generation=step, members=[0, 1], contributors=[0, 1], behind=[])
    for op in "FFBB":
        record.write(Kind.OPERATION, op=op, chunk=0, microbatch=0)
    for bucket in reversed(range(buckets)):
        record.write(Kind.EXCHANGE_BUCKET, generation=step, bucket=bucket, buckets=buckets, bytes=8)
    record.write(Kind.VOTE, generation=step)
    record.write(Kind.COMMIT, generation=step, record="", contributors=[0, 1])
    record.write(Kind.APPLY, record="")
    if due_checkpoint:
        record.write(Kind.CHECKPOINT_BEGIN, lineage="")


def killed_after(kills: tuple[KillConfig, ...], replica: int = 1, incarnation: int = 0, **how: int) -> list[tuple[int, Kind]]:
    record = FlightRecord("r1.pp0")
    seen: list[tuple[int, Kind]] = []
    sink = ChaosSink(ChaosConfig(kills), replica, incarnation, lambda: seen.append((record.step, record.events()[-1].kind)))
    record.attach(sink)
    for step in range(1, 6):
        play(record, step, **how)
    return seen


@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        ("before_quorum", Kind.QUORUM_JOIN),
        ("forward", Kind.OPERATION),
        ("exchange_early", Kind.EXCHANGE_BUCKET),
        ("exchange_late", Kind.EXCHANGE_BUCKET),
        ("before_commit", Kind.VOTE),
        ("after_record", Kind.COMMIT),
        ("checkpoint", Kind.CHECKPOINT_BEGIN),
    ],
)
def test_every_moment_kills_once_in_its_step(moment: str, kind: Kind) -> None:
    assert moment in MOMENTS
    assert killed_after((KillConfig(1, 3, moment),)) == [(3, kind)]
    assert killed_after((KillConfig(1, 3, moment),), incarnation=1) == [], "a restarted replica is left alone"
    assert killed_after((KillConfig(1, 3, moment),), replica=0) == [], "and so is another one"


def test_early_and_late_are_the_first_and_the_last_bucket() -> None:
    for moment, bucket in (("exchange_early", 2), ("exchange_late", 0)):
        record = FlightRecord("r0.pp0")
        at: list[int] = []
        config = ChaosConfig((KillConfig(0, 2, moment),))
        sink = ChaosSink(config, 0, 0, lambda: at.append(record.events()[-1].detail["bucket"]))  # noqa: B023
        record.attach(sink)
        play(record, 1)
        play(record, 2)
        assert at == [bucket]


def test_exchange_begun_again_in_a_new_generation_counts_its_buckets_anew() -> None:
    record = FlightRecord("r0.pp0")
    at: list[int] = []
    record.attach(ChaosSink(ChaosConfig((KillConfig(0, 1, "exchange_late"),)), 0, 0, lambda: at.append(len(record.events()))))
    record.step = 1
    for generation, buckets in ((7, 1), (8, 2)):
        for bucket in range(buckets):
            record.write(Kind.EXCHANGE_BUCKET, generation=generation, bucket=bucket, buckets=2, bytes=1)
    assert at == [3]


def test_moment_that_its_step_does_not_have_comes_later() -> None:
    assert killed_after((KillConfig(1, 3, "checkpoint"),), due_checkpoint=False) == []
    record = FlightRecord("r1.pp0")
    at: list[int] = []
    record.attach(ChaosSink(ChaosConfig((KillConfig(1, 3, "checkpoint"),)), 1, 0, lambda: at.append(record.step)))
    for step in range(1, 9):
        play(record, step, due_checkpoint=step % 5 == 0)
    assert at == [5]


def test_lives_take_their_kills_in_order_and_fetch_waits_for_the_second() -> None:
    config = ChaosConfig((KillConfig(1, 9), KillConfig(1, 4), KillConfig(0, 1, "fetch"), KillConfig(DRIVER, 6, "driver")))
    assert [kill_of(config, 1, life) for life in range(3)] == [KillConfig(1, 4), KillConfig(1, 9), None]
    assert [kill_of(config, 0, life) for life in range(3)] == [None, KillConfig(0, 1, "fetch"), None]
    twice = ChaosConfig((KillConfig(1, 4), KillConfig(1, 4, "fetch")))
    assert [kill_of(twice, 1, life) for life in range(2)] == [KillConfig(1, 4), KillConfig(1, 4, "fetch")]
    assert [driver_is_due(config, step) for step in (5, 6, 7)] == [False, True, True]


def test_fetch_kills_at_the_first_shard_of_the_next_life() -> None:
    record = FlightRecord("r1.pp0")
    at: list[str] = []
    config = ChaosConfig((KillConfig(1, 4, "fetch"),))
    record.attach(ChaosSink(config, 1, 1, lambda: at.append(record.events()[-1].detail["shard"])))
    record.step = 1
    for shard in ("a", "b"):
        record.write(Kind.FETCH_SHARD, shard=shard, donor="x", bytes=1, ok=True)
    assert at == ["a"]


def test_the_kill_is_noted_before_it_happens() -> None:
    record = FlightRecord("r1.pp0")
    noted: list[Kind] = []
    config = ChaosConfig((KillConfig(1, 2, "forward"),))
    record.attach(ChaosSink(config, 1, 0, lambda: noted.extend(e.kind for e in record.events()), record))
    play(record, 1)
    play(record, 2)
    assert noted[-2:] == [Kind.OPERATION, Kind.FAILURE]
    failures = [e for e in record.events() if e.kind is Kind.FAILURE]
    assert [(e.step, e.detail) for e in failures] == [(2, {"replica": 1, "reason": "chaos: killed at forward"})]


def test_a_command_runs_once_at_its_moment_by_whoever_claims_it_first(tmp_path: Path) -> None:
    said = tmp_path / "said"
    commands = tuple(
        CommandConfig(f"sh -c 'echo {word} >> {said}'", replica, step, moment)
        for word, replica, step, moment in (
            ("up", 1, 4, "exchange_late"), ("down", 1, 2, "exchange_early"), ("other", 0, 2, "forward")
        )
    )
    claimed: list[int] = []

    def claim(index: int) -> bool:
        claimed.append(index)
        return claimed.count(index) == 1

    for life in (0, 1):
        record = FlightRecord("r1.pp0")
        record.attach(ChaosSink(ChaosConfig(run=commands), 1, life, lambda: None, record, claim))
        for step in range(1, 6):
            play(record, step)
        ran = [(e.step, e.detail["command"]) for e in record.events() if e.kind is Kind.CHAOS]
        assert ran == ([] if life else [(2, commands[1].command), (4, commands[0].command)])
    assert said.read_text() == "down\nup\n" and claimed == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("command", "message"),
    [("sh -c 'echo no such cable >&2; exit 3'", "ended with 3: no such cable"), ("no-such-program-here", "No such file")],
)
def test_a_command_that_fails_is_no_secret(command: str, message: str) -> None:
    record = FlightRecord("r0.pp0")
    record.attach(ChaosSink(ChaosConfig(run=(CommandConfig(command, 0, 1, "forward"),)), 0, 0, lambda: None, record))
    with pytest.raises(Fatal, match=message):
        play(record, 1)
