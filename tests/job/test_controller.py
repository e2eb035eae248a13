"""The controller with a launcher whose processes are entries of a list: what it starts, kills and tells."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest

from helixrt.errors import Cause, Retryable
from helixrt.job.controller import Controller, Happening, Terminated
from helixrt.job.draining import DrainAsked
from helixrt.job.policies import FATAL_EXIT, LEFT_EXIT, RETRY_EXIT, Options, Phase, ReplicaState, RunState, StopRun
from helixrt.job.step_rules import skipped_positions
from helixrt.replica.contracts import Coordinate, Launcher, RankExit, RankSpec
from helixrt.replica.progress import ProgressReport, ThreadReport
from helixrt.replica.run_keys import (
    EXIT_KEY,
    cause_key,
    done_key,
    ended_key,
    leave_key,
    poison_key,
    progress_key,
    ready_key,
    running_key,
    working_key,
)
from helixrt.timeouts import derive
from tests.replica.stand_ins import MoodyStore


class ListedLauncher(Launcher):
    """Ranks that live until told otherwise; keeps account of what was asked of it."""

    def __init__(self) -> None:
        self.alive: dict[Coordinate, int] = {}
        self.starts: list[tuple[str, int]] = []
        self.unreported: list[RankExit] = []
        self.without_resources: set[int] = set()
        self.closed = self.none_starts = False

    def leaving(self) -> None:
        self.none_starts = True

    def start(self, spec: RankSpec) -> None:
        assert spec.coordinate not in self.alive
        self.alive[spec.coordinate] = spec.incarnation
        self.starts.append((str(spec.coordinate), spec.incarnation))

    def end(self, replica: int, pp: int, code: int, reason: str = "ended") -> None:
        coordinate = Coordinate(replica, pp)
        self.unreported.append(RankExit(coordinate, self.alive.pop(coordinate), code, reason))

    def poll(self) -> list[RankExit]:
        ended, self.unreported = self.unreported, []
        return ended

    def waiting(self, replica: int) -> bool:
        return replica in self.without_resources

    def kill(self, replica: int) -> None:
        for coordinate in [c for c in self.alive if c.replica == replica]:
            self.end(replica, coordinate.pp, -9, "killed")

    def close(self) -> None:
        for replica in {c.replica for c in self.alive}:
            self.kill(replica)
        self.closed = True


TIMEOUTS = derive(5.0)


class World:
    """A controller over two replicas of two ranks; `script[n]` is done in round n."""

    def __init__(self, **options: object) -> None:
        self.launcher, self.store = ListedLauncher(), MoodyStore("connection refused")
        self.now = 0.0
        self.told: list[str] = []
        self.controller = Controller(
            self.launcher,
            self.store,
            self.specs,
            Options(2, 2, **options),  # type: ignore[arg-type]
            on_event=lambda e: self.told.append(f"{e.kind.value} {e.replica}.{e.incarnation}"),
            clock=lambda: self.now,
            timeouts=TIMEOUTS,
        )

    def specs(self, replica: int, incarnation: int) -> list[RankSpec]:
        return [RankSpec("run", Coordinate(replica, pp), incarnation, "s", "l", "out", "x", 0.0, {}) for pp in range(2)]

    def run(self, *script: object) -> StopRun:
        steps = iter(script)

        def tick() -> None:
            self.now += 0.1
            step = next(steps, None)
            if callable(step):
                step()
            assert self.now < 1000, "the run does not end"

        return self.controller.run(poll_s=0, tick=tick)

    def finish(self, replica: int) -> None:
        self.store.values[done_key(replica)] = "{}"

    def running(self, replica: int, incarnation: int = 0) -> None:
        self.store.values[running_key(replica, incarnation)] = "1"

    def reports(self, rank: str, sequence: int, *threads: ThreadReport, incarnation: int = 0, committed: bool = True) -> None:
        """What a rank says of its progress; it has been through a step, unless `committed` is False."""
        report = ProgressReport(sequence, committed, threads)
        self.store.values[progress_key(f"{rank}.dp0.cp0.tp0", incarnation)] = report.to_json()

    def exit_all(self) -> None:
        assert self.store.values.get(EXIT_KEY), "ranks may not exit yet"
        for coordinate in list(self.launcher.alive):
            self.launcher.end(coordinate.replica, coordinate.pp, 0)


def test_a_run_without_trouble_lets_the_ranks_go_when_all_are_done() -> None:
    world = World()
    outcome = world.run(
        lambda: world.running(0),
        lambda: world.running(1),
        lambda: world.finish(0),
        lambda: world.store.values.get(EXIT_KEY) and pytest.fail("let go too early"),
        lambda: world.finish(1),
        None,
        world.exit_all,
    )
    assert outcome == StopRun(True, "") and world.launcher.closed and not world.launcher.alive
    assert [c for c in world.told if c.startswith(("finished", "stopped"))] == ["finished 0.0", "finished 1.0", "stopped -1.0"]
    assert [e.at_s for e in world.controller.history] == sorted(e.at_s for e in world.controller.history)


def test_a_rank_that_fails_because_of_another_one_is_told_with_that_ones_error() -> None:
    world = World()
    reason = "ValueError: a bad record at r1.pp1"
    cause = json.dumps({"code": FATAL_EXIT, "reason": reason, "error": "1a"})
    world.run(
        lambda: (world.running(0), world.running(1)),
        lambda: (world.store.put_if_absent(cause_key(1, 0), cause), world.launcher.end(1, 0, RETRY_EXIT, "stage 1 is gone")),
        None,
        None,
        lambda: (world.running(1, 1), world.finish(0)),
        lambda: world.finish(1),
        None,
        world.exit_all,
    )
    (lost,) = [e for e in world.controller.history if e.kind is Happening.LOST]
    assert lost.why == reason and world.controller.state.replicas[1].error == "1a"


def test_a_killed_rank_takes_its_replica_down_and_a_new_incarnation_comes() -> None:
    world = World()
    world.run(
        lambda: (world.running(0), world.running(1)),
        lambda: world.launcher.end(1, 0, -9, "killed by SIGKILL at r1.pp0"),
        None,
        None,
        lambda: (world.running(1, 1), world.finish(0)),
        lambda: world.finish(1),
        None,
        world.exit_all,
    )
    assert world.launcher.starts[-2:] == [("r1.pp0.dp0.cp0.tp0", 1), ("r1.pp1.dp0.cp0.tp0", 1)]
    of_replica_1 = [(e.kind, e.incarnation) for e in world.controller.history if e.replica == 1]
    assert of_replica_1 == [
        (Happening.STARTED, 0),
        (Happening.RUNNING, 0),
        (Happening.LOST, 0),
        (Happening.RESTARTED, 1),
        (Happening.RUNNING, 1),
        (Happening.FINISHED, 1),
    ]
    lost = next(e for e in world.controller.history if e.kind is Happening.LOST)
    assert lost.why == "killed by SIGKILL at r1.pp0"
    said = [ended_key(*life) for life in ((0, 0), (1, 0), (1, 1)) if ended_key(*life) in world.store.values]
    assert said == [ended_key(1, 0)]


def test_a_done_replica_that_exits_in_the_same_round_is_finished_not_lost() -> None:
    world = World()
    world.run(
        lambda: (world.finish(0), world.finish(1), world.launcher.end(0, 0, 0), world.launcher.end(0, 1, 0)),
        None,
        world.exit_all,
    )
    assert not any(e.kind is Happening.LOST for e in world.controller.history)


def test_of_exits_seen_together_the_likeliest_root_cause_is_named() -> None:
    world = World(max_restarts=0)
    outcome = world.run(
        lambda: (world.launcher.end(0, 0, 1, "peer reset"), world.launcher.end(0, 1, FATAL_EXIT, "loss is NaN at r0.pp1")),
        lambda: world.launcher.end(1, 0, 1, "no peers"),
    )
    assert outcome == StopRun(False, "1 failure without a commit (restarts=0): loss is NaN at r0.pp1")
    assert world.launcher.closed and not world.launcher.alive and EXIT_KEY not in world.store.values


def test_a_rank_that_fails_behind_the_loop_has_the_run_fail_with_the_root_cause() -> None:
    world = World()
    outcome = world.run(
        lambda: (world.finish(0), world.finish(1)),
        lambda: (world.launcher.end(0, 0, 75, "a peer is gone"), world.launcher.end(0, 1, FATAL_EXIT, "cannot write")),
        world.exit_all,
    )
    assert outcome == StopRun(False, "after the last step, cannot write")
    assert world.told[-2:] == ["failed 0.0", "failed 0.0"]


def test_a_replica_that_is_given_up_is_not_waited_for_by_the_first_quorum() -> None:
    world = World(max_restarts=0)
    world.run(
        lambda: world.launcher.end(0, 0, 1),
        None,
        lambda: ready_key(0) in world.store.values or pytest.fail("the others wait for it"),
        lambda: world.finish(1),
    )


def test_ranks_that_stay_after_success_are_ended_after_the_grace() -> None:
    world = World()
    assert world.run(lambda: (world.finish(0), world.finish(1))).ok
    assert world.launcher.closed and not world.launcher.alive


def test_the_store_may_be_away_for_a_while_but_not_for_ever() -> None:
    world = World()
    world.run(
        lambda: setattr(world.store, "away", True),
        *[None] * 50,
        lambda: setattr(world.store, "away", False),
        lambda: (world.finish(0), world.finish(1)),
    )
    assert world.launcher.starts == [(f"r{r}.pp{p}.dp0.cp0.tp0", 0) for r in (0, 1) for p in (0, 1)]
    lost = World()
    with pytest.raises(Retryable, match="store did not answer for 30 s: connection refused") as raised:
        lost.run(lambda: setattr(lost.store, "away", True))
    assert raised.value.cause == Cause("the run's store did not answer for 30 s: connection refused", "driver")
    assert lost.launcher.closed and not lost.launcher.alive


def test_ranks_that_outlive_their_driver_go_on_when_that_loses_the_store() -> None:
    world = World()
    world.launcher.outlives_driver = True
    with pytest.raises(Retryable, match="store did not answer for 30 s"):
        world.run(lambda: setattr(world.store, "away", True))
    assert not world.launcher.closed and len(world.launcher.alive) == 4


def test_a_tick_that_does_not_reach_the_store_ends_nothing() -> None:
    world = World()

    def away() -> None:
        raise Retryable("connection refused")

    assert world.run(*[away] * 20, lambda: (world.finish(0), world.finish(1))).ok


def test_what_is_not_urgent_is_looked_at_less_often_and_exits_in_each_round() -> None:
    world, reads, polls, ticks = World(), list[float](), list[float](), list[float]()
    get, poll = world.store.get, world.launcher.poll

    def note_get(key: str) -> str | None:
        if key == done_key(0):
            reads.append(world.now)
        return get(key)

    def note_poll() -> list[RankExit]:
        world.now += 0.1
        polls.append(world.now)
        if world.now > 100.0:
            world.finish(0), world.finish(1)
        return poll()

    def tick() -> None:
        ticks.append(world.now)

    world.store.get, world.launcher.poll = note_get, note_poll  # type: ignore[method-assign]
    world.running(0), world.running(1)
    assert world.controller.run(poll_s=0, tick=tick, look_s=1.0).ok
    running = [at for at in reads if 1.0 < at < 100.0]
    assert len(polls) >= 1000 and 90 <= len(running) <= 101 and 90 <= len([at for at in ticks if at < 100.0]) <= 101


def test_a_rank_that_has_ended_in_good_order_is_known_to_be_done_however_seldom_the_store_is_read() -> None:
    world = World()

    def all_exit() -> None:
        for replica in range(2):
            world.finish(replica)
            for pp in range(2):
                world.launcher.end(replica, pp, 0)

    world.running(0), world.running(1)
    polled = world.launcher.poll

    def poll() -> list[RankExit]:
        world.now += 0.1
        if 5.0 < world.now < 5.15:
            all_exit()
        return polled()

    world.launcher.poll = poll  # type: ignore[method-assign]
    assert world.controller.run(poll_s=0, look_s=1000.0).ok
    assert not any(line.startswith("lost") for line in world.told)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def send(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def leaves(world: World, replica: int, after_s: float = 0.0, why: str = "SIGTERM to the driver") -> None:
    """It was asked to, and does, after a checkpoint."""
    assert world.store.values[leave_key(replica, 0)] == why and replica in alive(world)
    world.now += after_s
    for pp in (0, 1):
        world.launcher.end(replica, pp, LEFT_EXIT, "left")


def alive(world: World) -> set[int]:
    return {coordinate.replica for coordinate in world.launcher.alive}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_every_rank_and_is_raised_again(number: signal.Signals) -> None:
    before, world = [signal.getsignal(each) for each in SIGNALS], World()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated) as raised:
        world.run(None, lambda: send(number))
    assert world.launcher.closed and not world.launcher.alive
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert not isinstance(raised.value, SystemExit) or raised.value.code == 128 + number


def test_after_a_signal_the_replicas_that_run_leave_within_the_grace() -> None:
    world = World()
    both_run = lambda: (world.running(0), world.running(1))  # noqa: E731
    with pytest.raises(Terminated):
        world.run(both_run, send, None, lambda: leaves(world, 1), None, lambda: leaves(world, 0, 20.0))
    assert world.told[-5:-1] == ["left 1.0", "drained 1.0", "left 0.0", "drained 0.0"]
    assert world.controller.asked_by == "SIGTERM"
    slow = World()
    with pytest.raises(Terminated):
        slow.run(lambda: slow.running(0), send, None, lambda: setattr(slow, "now", 26.0))
    assert slow.launcher.closed and not slow.launcher.alive and slow.controller.asked_by == "SIGTERM"


def test_a_second_signal_ends_at_once() -> None:
    world = World()
    with pytest.raises(KeyboardInterrupt):
        world.run(lambda: world.running(0), send, None, lambda: send(signal.SIGINT))
    assert world.now < 1.0 and world.launcher.closed and world.controller.at_once


def test_a_closed_terminal_that_sends_sighup_twice_leaves_the_replicas_their_time() -> None:
    world = World()
    with pytest.raises(Terminated):
        again = [lambda: send(signal.SIGHUP)] * 2
        world.run(lambda: world.running(0), *again, lambda: leaves(world, 0, why="SIGHUP to the driver"))
    assert "left 0.0" in world.told and not world.controller.at_once


def test_a_signal_to_the_process_that_has_the_ranks_is_one_to_the_driver() -> None:
    world = World()

    def told() -> None:
        world.launcher.told_to_end = True

    with pytest.raises(Terminated) as raised:
        world.run(lambda: world.running(0), told, lambda: leaves(world, 0, why="SIGTERM to the keeper of the run"))
    assert raised.value.code == 143 and world.launcher.none_starts and world.launcher.closed


def test_ranks_that_outlive_the_driver_may_leave_after_its_grace() -> None:
    world = World()
    world.launcher.outlives_driver = True
    with pytest.raises(Terminated):
        world.run(lambda: world.running(0), send)
    assert world.controller.lets_leave and world.launcher.none_starts and not world.launcher.closed


def test_the_users_own_handler_is_called_and_ignored_signals_are_ignored() -> None:
    world, called = World(), list[int]()

    def own(number: int, frame: object) -> None:
        called.append(number)
        raise SystemExit(7)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        signal.signal(signal.SIGTERM, own)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with pytest.raises(SystemExit) as raised:
            world.run(lambda: send(signal.SIGHUP), lambda: world.running(0), lambda: called.append(0), send)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert called == [0, signal.SIGTERM] and raised.value.code == 7 and not world.launcher.alive


def test_an_error_of_the_drivers_tick_ends_every_rank() -> None:
    world = World()
    with pytest.raises(ZeroDivisionError):
        world.run(None, lambda: 1 // 0)
    assert world.launcher.closed and not world.launcher.alive


def test_it_runs_outside_the_main_thread_too() -> None:
    world, outcomes = World(), []
    thread = threading.Thread(
        target=lambda: outcomes.append(world.run(lambda: (world.finish(0), world.finish(1)), None, world.exit_all))
    )
    thread.start()
    thread.join(30)
    assert outcomes == [StopRun(True, "")]


RANKS = ("r0.pp0", "r0.pp1", "r1.pp0", "r1.pp1")


def talk(world: World, sequence: int, *but: str, incarnation: int = 0) -> None:
    """All ranks say that they live and wait for orders, but these."""
    for rank in set(RANKS) - set(but):
        world.reports(rank, sequence, incarnation=incarnation if rank.startswith("r1") else 0)


def test_a_rank_that_hangs_is_named_and_its_replica_started_again() -> None:
    """The leader goes on: its other rank hangs in work, which only its own report tells."""
    world = World()
    hangs = ThreadReport("main", "work", 7, where="job:loss, line 3")

    def hang(sequence: int) -> None:
        talk(world, sequence, "r1.pp1")
        if world.controller.state.replicas[1].incarnation == 0:
            world.reports("r1.pp1", sequence, hangs)

    world.run(
        lambda: (world.running(0), world.running(1)),
        *[lambda n=n: hang(n) for n in range(55)],
        lambda: (world.running(1, 1), world.finish(0), world.finish(1)),
        None,
        world.exit_all,
    )
    (lost,) = [e for e in world.controller.history if e.kind is Happening.LOST]
    assert (lost.replica, lost.incarnation) == (1, 0)
    assert "r1.pp1.dp0.cp0.tp0 incarnation 0 has made no progress for 5 s" in lost.why and "job:loss, line 3" in lost.why
    assert world.launcher.starts[-2:] == [("r1.pp0.dp0.cp0.tp0", 1), ("r1.pp1.dp0.cp0.tp0", 1)]
    assert ended_key(1, 0) in world.store.values
    assert progress_key("r1.pp1.dp0.cp0.tp0", 0) not in world.store.values, "what it said is deleted"


def test_a_rank_that_gave_up_waiting_names_the_one_that_hangs() -> None:
    world = World()

    def hang(sequence: int) -> None:
        talk(world, sequence, "r1.pp1")
        world.reports("r1.pp1", sequence, ThreadReport("main", "work", 7))

    world.run(
        lambda: (world.running(0), world.running(1)),
        *[lambda n=n: hang(n) for n in range(40)],
        lambda: world.launcher.end(1, 0, 75, "stage 1 cannot be reached"),
        None,
        lambda: (world.finish(0), world.finish(1)),
        None,
        world.exit_all,
    )
    (lost,) = [e for e in world.controller.history if e.kind is Happening.LOST]
    assert lost.why.startswith("stage 1 cannot be reached; r1.pp1.dp0.cp0.tp0 has made no progress for ")


def test_a_stopped_rank_falls_silent_and_a_stopped_driver_blames_nobody() -> None:
    world = World()
    world.run(
        lambda: (world.running(0), world.running(1)),
        *[lambda n=n: talk(world, n) for n in range(5)],
        lambda: setattr(world, "now", world.now + 500.0),  # the driver's process was stopped, nobody reported meanwhile
        *[None] * 20,
        lambda: pytest.fail("somebody was blamed") if "lost" in str(world.told) else None,
        *[lambda n=n: talk(world, 100 + n, "r0.pp0") for n in range(40)],
        lambda: (world.finish(0), world.finish(1)),
        None,
        world.exit_all,
    )
    (lost,) = [e for e in world.controller.history if e.kind is Happening.LOST]
    assert lost.replica == 0 and "r0.pp0.dp0.cp0.tp0 incarnation 0 has not reported for 5 s" in lost.why


@pytest.mark.parametrize("on_poison", ["stop", "skip"])
def test_a_batch_that_ends_a_replica_twice(on_poison: str) -> None:
    world = World(on_poison=on_poison)

    def end(incarnation: int) -> None:
        world.running(1, incarnation)
        world.store.values[working_key("r1.pp0.dp0.cp0.tp0", incarnation)] = "12"
        world.launcher.end(1, 0, -11, f"killed by SIGSEGV in life {incarnation}")

    def begun_again() -> None:
        assert poison_key(1, 0) in world.store.values or ("r1.pp0.dp0.cp0.tp0", 2) not in world.launcher.starts

    outcome = world.run(
        lambda: (world.running(0), world.running(1)),
        lambda: end(0),
        *[None] * 20,
        lambda: end(1),
        *[begun_again] * 20,
        lambda: (world.finish(0), world.finish(1)),
        None,
        world.exit_all,
    )
    said = [e for e in world.controller.history if e.kind is Happening.SKIPPED]
    if on_poison == "skip":
        assert outcome.ok and len(said) == 1 and ("r1.pp0.dp0.cp0.tp0", 2) in world.launcher.starts
        assert skipped_positions(world.store, 1) == {12} and skipped_positions(world.store, 0) == set()
        assert "position 12 of replica 1's stream" in said[0].why
    else:
        assert not outcome.ok and not said and poison_key(1, 0) not in world.store.values
        assert "position 12 of replica 1's stream" in outcome.reason and "life 0; then: killed" in outcome.reason


def test_ranks_without_resources_are_waited_for() -> None:
    world = World(max_restarts=0, start_timeout_s=2.0)
    world.launcher.without_resources = {1}
    outcome = world.run(
        lambda: world.running(0),
        *[None] * 200,
        lambda: setattr(world.launcher, "without_resources", set()),
        lambda: (world.running(1), world.finish(0), world.finish(1)),
        None,
        world.exit_all,
    )
    assert outcome == StopRun(True, "") and world.told.count("waiting 1.0") == 1


@pytest.mark.parametrize("thread", ["main", "coordination"])
def test_a_start_takes_as_long_as_a_rank_has_asked_for(thread: str) -> None:
    """A compilation before the loop, or the check of a checkpoint: no step completes during it, and then the rank hangs."""
    world, lost_s = World(max_restarts=0, start_timeout_s=2.0), list[float]()

    def busy(sequence: int) -> None:
        if "given_up 1.0" in world.told:
            lost_s.append(world.now)
            return
        for rank in ("r1.pp0", "r1.pp1"):
            asked = (ThreadReport(thread, "compiles", 7, limit_s=60.0),) if rank == "r1.pp1" else ()
            world.reports(rank, sequence, *asked, committed=False)

    outcome = world.run(
        lambda: world.running(0),
        *[lambda n=n: busy(n) for n in range(700)],
        lambda: world.finish(0),
        None,
        world.exit_all,
    )
    assert outcome.ok and "did not run 2 s after its start" in outcome.reason and 60 <= min(lost_s) < 65


def test_a_short_time_that_a_rank_asks_for_late_in_its_start_counts_too() -> None:
    """It ends 3 s after the start timeout."""
    world, asked = World(max_restarts=0, start_timeout_s=10.0), ThreadReport("main", "compiles", 7, limit_s=5.0)
    outcome = world.run(
        lambda: world.running(0),
        *[None] * 80,
        *[lambda n=n: world.reports("r1.pp0", n, asked, committed=False) for n in range(49)],
        lambda: (world.reports("r1.pp0", 99, committed=False), world.running(1)),
        lambda: (world.finish(0), world.finish(1)),
        None,
        world.exit_all,
    )
    assert outcome == StopRun(True, "")


def test_a_drained_replica_is_asked_to_leave_and_comes_back_when_the_user_says_so() -> None:
    world = World()

    def leaves() -> None:
        assert world.store.values[leave_key(1, 0)] == "drained by the user" and ended_key(1, 0) not in world.store.values
        world.launcher.end(1, 0, LEFT_EXIT, "left")
        world.launcher.end(1, 1, LEFT_EXIT, "left")

    outcome = world.run(
        lambda: (world.running(0), world.running(1)),
        None,
        lambda: world.controller.drain(DrainAsked(1)),
        leaves,
        None,
        lambda: world.controller.drain(DrainAsked(0)),
        lambda: world.controller.drain(DrainAsked(1, back=True)),
        None,
        lambda: world.running(1, 1),
        lambda: (world.finish(0), world.finish(1)),
        None,
        world.exit_all,
    )
    assert outcome.ok and ended_key(1, 0) in world.store.values
    assert world.launcher.starts[4:] == [("r1.pp0.dp0.cp0.tp0", 1), ("r1.pp1.dp0.cp0.tp0", 1)]
    expected = ["left 1.0", "drained 1.0", "refused 0.0", "restarted 1.1", "running 1.1", "finished 1.1"]
    assert [line for line in world.told if line in expected] == expected


def test_a_controller_that_takes_over_begins_nothing_again_and_ends_what_was_half_lost() -> None:
    """Replica 0 trains; of replica 1 one rank has ended, and the other was not killed yet."""
    world = World()
    first, second, other = Coordinate(0, 0), Coordinate(0, 1), Coordinate(1, 1)
    world.launcher.alive = {first: 0, second: 0, other: 2}
    world.running(0)
    lost = ReplicaState(Phase.LOST, 0.0, "its disk is full", 2, frozenset({str(Coordinate(1, 0))}))
    state = RunState((ReplicaState(Phase.RUNNING), lost), has_run=True)
    alive = frozenset({(0, str(first)), (0, str(second)), (2, str(other))})
    world.controller.take_over(state, alive, "12 s without a driver")
    assert world.told == ["attached -1.0"] and world.store.values[ended_key(1, 2)] == "yes"
    stopped = world.run(
        lambda: None,
        lambda: world.running(1, 3),
        lambda: (world.finish(0), world.finish(1)),
        lambda: [world.launcher.end(at.replica, at.pp, 0) for at in list(world.launcher.alive)],
    )
    assert stopped.ok and world.launcher.closed
    assert world.launcher.starts == [(str(Coordinate(1, 0)), 3), (str(other), 3)], "replica 0 was not started"
    assert "restarted 1.3" in world.told
