"""Each moment of a step is recognised in the flight record, and a kill or a fault happens once, in its own life."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helixrt.errors import Fatal
from helixrt.job.chaos import DRIVER, FAULTS, MOMENTS, ChaosSink, driver_is_due, due_in, fault_moments
from helixrt.job.chaos_actions import InjectedFault, ReplicaKiller, host_identity, inflict
from helixrt.job.config import ChaosConfig, CommandConfig, FaultConfig, KillConfig
from helixrt.record import FlightRecord, Kind
from helixrt.replica.store import MemoryRunStore


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


def test_a_model_without_recorded_operations_is_killed_after_its_backwards() -> None:
    record = FlightRecord("r1.pp0")
    killed: list[tuple[int, Kind]] = []
    sink = ChaosSink(ChaosConfig((KillConfig(1, 2),)), 1, 0, lambda: killed.append((record.step, record.events()[-1].kind)))
    record.attach(sink)
    for step in (1, 2, 3):
        record.step = step
        for kind in (Kind.WORK_BEGIN, Kind.WORK_END):
            record.write(kind, position=step)
    assert killed == [(2, Kind.WORK_END)]


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
    assert [due_in(config, 1, life) for life in range(3)] == [KillConfig(1, 4), KillConfig(1, 9), None]
    assert [due_in(config, 0, life) for life in range(3)] == [None, KillConfig(0, 1, "fetch"), None]
    twice = ChaosConfig((KillConfig(1, 4), KillConfig(1, 4, "fetch")))
    assert [due_in(twice, 1, life) for life in range(2)] == [KillConfig(1, 4), KillConfig(1, 4, "fetch")]
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
            ("up", 1, 4, "exchange_late"),
            ("down", 1, 2, "exchange_early"),
            ("other", 0, 2, "forward"),
        )
    )
    claimed: list[str] = []

    def claim(name: str) -> bool:
        claimed.append(name)
        return claimed.count(name) == 1

    for life in (0, 1):
        record = FlightRecord("r1.pp0")
        record.attach(ChaosSink(ChaosConfig(run=commands), 1, life, lambda: None, record, claim))
        for step in range(1, 6):
            play(record, step)
        ran = [(e.step, e.detail["command"]) for e in record.events() if e.kind is Kind.CHAOS]
        assert ran == ([] if life else [(2, commands[1].command), (4, commands[0].command)])
    assert said.read_text() == "down\nup\n" and claimed == ["run/1", "run/0"] * 2


@pytest.mark.parametrize(
    ("command", "message"),
    [("sh -c 'echo no such cable >&2; exit 3'", "ended with 3: no such cable"), ("no-such-program-here", "No such file")],
)
def test_a_command_that_fails_is_no_secret(command: str, message: str) -> None:
    record = FlightRecord("r0.pp0")
    record.attach(ChaosSink(ChaosConfig(run=(CommandConfig(command, 0, 1, "forward"),)), 0, 0, lambda: None, record))
    with pytest.raises(Fatal, match=message):
        play(record, 1)


def test_kills_and_faults_of_a_replica_take_lives_in_order_and_slow_takes_none() -> None:
    stop, oom, slow = FaultConfig("stop", 1, 1, 9), FaultConfig("oom", 1, 0, 2), FaultConfig("slow", 1, 0, 1)
    config = ChaosConfig((KillConfig(1, 4),), (), (stop, slow, oom, FaultConfig("hang", 0, 0, 3, "fetch")))
    assert [due_in(config, 1, life) for life in range(4)] == [oom, KillConfig(1, 4), stop, None]
    assert [due_in(config, 0, life) for life in range(2)] == [None, FaultConfig("hang", 0, 0, 3, "fetch")]


@pytest.mark.parametrize("kind", ["exception", "oom"])
def test_a_fault_strikes_the_rank_it_names_and_is_noted_first(kind: str) -> None:
    config = ChaosConfig(fault=(FaultConfig(kind, 1, 1, 3, "exchange_late"),))
    for rank, life in ((0, 0), (1, 1), (1, 0)):
        record = FlightRecord(f"r1.pp{rank}")
        record.attach(ChaosSink(config, 1, life, lambda: None, record, rank=rank))
        play(record, 2)
        if (rank, life) == (1, 0):
            with pytest.raises(RuntimeError, match="chaos: exception" if kind == "exception" else "memory"):
                play(record, 3)
        play(record, 4)
        noted = [(e.step, e.detail["reason"]) for e in record.events() if e.kind is Kind.FAILURE]
        assert noted == ([(3, f"chaos: {kind} at exchange_late on rank 1")] if (rank, life) == (1, 0) else [])


def test_a_slow_moment_happens_once_in_a_run_and_ends_no_life() -> None:
    config = ChaosConfig((KillConfig(1, 4),), fault=(FaultConfig("slow", 1, 0, 3, "before_commit", seconds=1e-6),))
    claimed: list[str] = []

    def claim(name: str) -> bool:
        claimed.append(name)
        return claimed.count(name) == 1

    told = []
    for life in (0, 1):
        killed: list[int] = []
        record = FlightRecord("r1.pp0")
        record.attach(ChaosSink(config, 1, life, lambda: killed.append(record.step), record, claim))  # noqa: B023
        for step in range(1, 6):
            play(record, step)
        told += [(life, e.step, e.detail["command"]) for e in record.events() if e.kind is Kind.CHAOS]
        assert killed == ([] if life else [4])
    assert told == [(0, 3, "1e-06 s slower at before_commit on rank 0")] and claimed == ["fault/0"] * 2


def test_every_kind_has_its_moments() -> None:
    assert all(set(fault_moments(kind)) <= set(MOMENTS) - {"driver"} for kind in FAULTS)
    assert "checkpoint" in fault_moments("stop") and "checkpoint" not in fault_moments("hang")


def test_an_injected_exception_is_no_error_of_helixrt() -> None:
    """As of a user's code: nothing of the library expects it."""
    with pytest.raises(InjectedFault):
        inflict(FaultConfig("exception"))


HOLD_THE_LOCK = """
import os, threading, time
from helixrt.job.chaos_actions import inflict
from helixrt.job.config import FaultConfig

def count():
    while True:
        os.write(1, b".")
        time.sleep(0.001)

threading.Thread(target=count, daemon=True).start()
time.sleep(0.2)
os.write(1, b"!")
inflict(FaultConfig("{kind}"))
"""


@pytest.mark.system
@pytest.mark.parametrize("kind", ["stop", "hang", "hang_lock"])
def test_a_process_that_hangs_in_its_way(kind: str) -> None:
    """Another thread of it goes on only if the interpreter lock is free and the process is not stopped."""
    process = subprocess.Popen([sys.executable, "-c", HOLD_THE_LOCK.format(kind=kind)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.read(1) == b".", "the other thread runs"
        while (said := process.stdout.read(1)) != b"!":
            assert said == b".", "it ended before the fault"
        state = Path(f"/proc/{process.pid}/stat")

        def stopped() -> bool:
            return state.read_text().rpartition(")")[2].split()[0] == "T" if state.exists() else kind == "stop"

        os.set_blocking(process.stdout.fileno(), False)
        begin_s = quiet_since_s = time.monotonic()
        goes_on = 0
        hangs, stops = kind == "hang", kind == "stop"
        while goes_on < 300 if hangs else time.monotonic() - quiet_since_s < 1.0 or stopped() != stops:
            if said := process.stdout.read():
                goes_on, quiet_since_s = goes_on + len(said), time.monotonic()
            assert time.monotonic() - begin_s < 100.0, (goes_on, stopped())
            time.sleep(0.01)
        assert stopped() == stops
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(60)


# ---------------------------------------------------------------- whom a kill reaches


def test_a_kill_signals_processes_of_its_own_host_alone() -> None:
    store = MemoryRunStore()
    here = ReplicaKiller(store, "1/0", 0, 3, obeys=False)
    store.put_if_absent("pid/1/0/1", f"{host_identity()} 41")
    store.put_if_absent("pid/1/0/2", "another-machine/boot/pid:[1] 42")
    assert here.of_this_host() == [os.getpid(), 41]
    assert " " not in host_identity()


def _rank_elsewhere(store_address: str, rank: int, host: str, kills: bool) -> None:
    from helixrt.replica.store import TcpRunStore

    killer = ReplicaKiller(TcpRunStore(store_address), "1/0", rank, 2, obeys=True, host=host)
    if kills:
        TcpRunStore(store_address).wait("pid/1/0/1", 60)
        killer.kill()
    time.sleep(600)


@pytest.mark.system
def test_a_peer_on_another_host_is_asked_to_kill_itself() -> None:
    from helixrt.replica.store import TcpRunStore, host_store

    server, address = host_store()
    context = multiprocessing.get_context("spawn")
    bystander = context.Process(target=time.sleep, args=(600,))
    bystander.start()
    ranks = [context.Process(target=_rank_elsewhere, args=(address, rank, f"host{rank}", rank == 0)) for rank in range(2)]
    # Another process of this machine has the recorded number on the other host: it must not be signalled.
    TcpRunStore(address).put_if_absent("pid/1/0/1", f"host1 {bystander.pid}")
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
            assert process.exitcode == -signal.SIGKILL
        assert bystander.is_alive()
    finally:
        for process in (*ranks, bystander):
            process.kill()
            process.join(60)
        del server
