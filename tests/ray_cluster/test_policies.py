"""The restart policy: every phase against every event, and long random lives against the invariants."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helixrt.ray_cluster.policies import (
    ACTIVE,
    CONFIG_EXIT,
    FATAL_EXIT,
    SETTLED,
    Began,
    Event,
    GiveUp,
    KillReplica,
    Options,
    Phase,
    RankEnded,
    ReplicaDone,
    ReplicaRunning,
    ReplicaState,
    RunState,
    StartReplica,
    StopRun,
    Tick,
    backoff_s,
    decide,
    severity,
)

OPTIONS = Options(replicas=2, ranks_per_replica=2, max_restarts=2, start_timeout_s=10.0, backoff_s=1.0, gone_s=3.0)


def ended(replica: int, rank: int = 0, incarnation: int = 0, code: int = -9, reason: str = "") -> RankEnded:
    return RankEnded(replica, incarnation, f"r{replica}.pp{rank}", code, reason or f"rank {rank} of {replica} ended")


def play(*timed: tuple[float, Event], options: Options = OPTIONS) -> tuple[RunState, list[object]]:
    """Begin at time 0 and feed the events; returns the state and what the last event decided."""
    state, made = decide(RunState.initial(options), Began(), 0.0, options)
    for now, event in timed:
        state, made = decide(state, event, now, options)
    return state, list(made)


def test_begin_starts_every_replica_once() -> None:
    state, made = play()
    assert made == [StartReplica(0, 0), StartReplica(1, 0)]
    assert all(r.phase is Phase.STARTING for r in state.replicas)


def test_a_lost_rank_kills_its_replica_alone_and_starts_it_again_when_all_its_ranks_are_gone() -> None:
    state, made = play((1, ReplicaRunning(1, 0)), (2, ended(1, 0)))
    assert made == [KillReplica(1)] and state.replicas[1].phase is Phase.LOST and state.replicas[0].phase is Phase.STARTING
    state, made = decide(state, ended(1, 1), 2.1, OPTIONS)
    assert made == (StartReplica(1, 1),) and state.replicas[1].phase is Phase.RESTARTING


def test_a_rank_that_never_reports_its_end_delays_the_restart_by_gone_s_only() -> None:
    state, made = play((2, ended(1, 0)), (4.9, Tick()))
    assert made == []
    assert decide(state, Tick(), 5.0, OPTIONS)[1] == (StartReplica(1, 1),)


def test_the_second_restart_waits_for_the_backoff() -> None:
    first = [(1.0, ended(0, 0)), (1.0, ended(0, 1)), (2.0, ended(0, 0, 1)), (2.0, ended(0, 1, 1))]
    state, made = play(*first)
    assert made == [] and state.replicas[0].phase is Phase.LOST
    assert decide(state, Tick(), 2.9, OPTIONS)[1] == ()
    assert decide(state, Tick(), 3.0, OPTIONS)[1] == (StartReplica(0, 2),)


def test_backoff_is_zero_then_doubles_to_its_maximum() -> None:
    assert [backoff_s(n, replace(OPTIONS, backoff_max_s=5.0)) for n in (0, 1, 2, 3, 4, 10_000)] == [0, 1, 2, 4, 5, 5]


def test_restarts_are_counted_and_then_the_replica_is_given_up_and_the_other_goes_on() -> None:
    options = replace(OPTIONS, max_restarts=0)
    state, made = play((1, ended(1, 0, reason="out of memory at r1")), options=options)
    assert made == [KillReplica(1), GiveUp(1, "out of memory at r1")]
    assert state.replicas[1].phase is Phase.GIVEN_UP and state.stopped is None
    state, made = decide(state, ReplicaDone(0), 5, options)
    assert made == (StopRun(True, "given up: out of memory at r1"),)


def test_the_run_fails_with_the_cause_of_the_replica_given_up_first() -> None:
    options = replace(OPTIONS, max_restarts=0)
    _, made = play((1, ended(1, reason="first")), (2, ended(0, reason="second")), options=options)
    assert made[-1] == StopRun(False, "first")


def test_a_fatal_rank_gets_one_new_process_then_the_replica_is_given_up() -> None:
    options = replace(OPTIONS, max_restarts=9, fatal_restarts=1, ranks_per_replica=1)
    state, made = play((1, ended(0, code=FATAL_EXIT)), options=options)
    assert made == [KillReplica(0), StartReplica(0, 1)]
    state, made = decide(state, ended(0, incarnation=1, code=FATAL_EXIT), 2, options)
    assert made == (KillReplica(0), GiveUp(0, "rank 0 of 0 ended"))


def test_a_config_error_stops_the_run_at_once() -> None:
    state, made = play((1, ended(0, code=CONFIG_EXIT, reason="batch=3: must be even")))
    assert made == [StopRun(False, "batch=3: must be even")]
    assert decide(state, ended(1), 2, OPTIONS) == (state, ())


def test_a_replica_that_does_not_join_in_time_is_lost_and_a_running_one_is_not() -> None:
    state, made = play((9, ReplicaRunning(0, 0)), (10, Tick()))
    assert made == [KillReplica(1)] and state.replicas[0].phase is Phase.RUNNING
    assert "did not run 10 s after its start" in state.replicas[1].why


def test_a_clean_exit_before_the_replica_is_done_is_a_loss() -> None:
    _, made = play((1, ReplicaRunning(0, 0)), (2, ended(0, code=0)))
    assert made == [KillReplica(0)]


def test_what_happens_to_a_finished_replica_does_not_matter() -> None:
    state, _ = play((1, ReplicaDone(0)))
    assert decide(state, ended(0, code=1), 2, OPTIONS) == (
        replace(state, replicas=(replace(state.replicas[0], ended=frozenset({"r0.pp0"})), state.replicas[1])),
        (),
    )


def test_news_of_an_older_incarnation_is_ignored() -> None:
    state, _ = play((1, ended(0, 0)), (1, ended(0, 1)))
    for late in (ended(0, 0), ended(0, 1), ReplicaRunning(0, 0), ended(0, 0, code=CONFIG_EXIT)):
        assert decide(state, late, 2, OPTIONS) == (state, ())


def test_the_same_exit_twice_counts_once() -> None:
    state, made = play((1, ended(0, 0)), (1, ended(0, 0)))
    assert made == [] and state.replicas[0].phase is Phase.LOST


def test_done_while_lost_finishes_the_replica_without_a_restart() -> None:
    state, _ = play((1, ended(0, 0)), (1.1, ReplicaDone(0)), (1.2, ended(0, 1)), (9, Tick()))
    assert state.replicas[0].phase is Phase.FINISHED


def test_likely_root_causes_come_before_complaints_of_peers() -> None:
    assert sorted([1, 0, -9, FATAL_EXIT], key=severity) == [FATAL_EXIT, -9, 1, 0]


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(
    "event",
    [ReplicaRunning(0, 1), ReplicaDone(0), ended(0, 0, 1), ended(0, 0, 0), ended(0, 0, 1, CONFIG_EXIT), Tick()],
    ids=repr,
)
def test_every_phase_meets_every_event(phase: Phase, event: Event) -> None:
    """The whole table: a settled replica never moves, a decision fits the phase it was made in."""
    other = ReplicaState(Phase.RUNNING)
    state = RunState((ReplicaState(phase, since_s=100.0, incarnation=1), other))
    new, made = decide(state, event, 100.5, OPTIONS)
    assert new.replicas[1] == other and not any(getattr(d, "replica", 0) == 1 for d in made)
    if phase in SETTLED:
        assert new.replicas[0].phase is phase
    if any(isinstance(d, KillReplica) for d in made):
        assert phase in ACTIVE and new.replicas[0].phase in (Phase.LOST, Phase.GIVEN_UP)
    if isinstance(event, ReplicaDone) and phase not in SETTLED:
        assert new.replicas[0].phase is Phase.FINISHED
    if isinstance(event, ReplicaRunning):
        expected = Phase.RUNNING if phase in (Phase.STARTING, Phase.RESTARTING) else phase
        assert new.replicas[0].phase is expected
    stopped = isinstance(event, RankEnded) and event.code == CONFIG_EXIT and event.incarnation == 1
    assert (new.stopped is not None) == stopped


def test_random_lives_keep_the_invariants(seed: int) -> None:
    """A small world of processes obeys the decisions; whatever it does, the policy's promises hold."""
    for one in range(seed, seed + 2000):
        try:
            _live(one)
        except AssertionError as broken:
            raise AssertionError(f"replay with _live({one})") from broken


def _live(seed: int) -> None:
    rng = random.Random(seed)
    options = Options(
        replicas=rng.randint(1, 4),
        ranks_per_replica=rng.randint(1, 3),
        max_restarts=rng.randint(0, 4),
        fatal_restarts=rng.randint(0, 2),
        start_timeout_s=rng.uniform(1, 20),
        backoff_s=rng.uniform(0, 3),
        gone_s=100.0,  # nothing gets lost in this world, so old ranks are always gone before new ones start
    )
    state, now = RunState.initial(options), 0.0
    alive: dict[int, dict[str, int]] = {r: {} for r in range(options.replicas)}  # replica -> rank -> incarnation
    unreported: list[RankEnded] = []
    starts: dict[int, list[int]] = {r: [] for r in range(options.replicas)}
    stops = 0

    def feed(event: Event) -> None:
        nonlocal state, stops
        was_stopped = state.stopped is not None
        state, made = decide(state, event, now, options)
        assert not (was_stopped and made)
        for decision in made:
            if isinstance(decision, StartReplica):
                assert not alive[decision.replica], "two incarnations at once"
                assert decision.incarnation == len(starts[decision.replica]), "an incarnation skipped or repeated"
                starts[decision.replica].append(decision.incarnation)
                ranks = (f"r{decision.replica}.pp{i}" for i in range(options.ranks_per_replica))
                alive[decision.replica] = dict.fromkeys(ranks, decision.incarnation)
            elif isinstance(decision, KillReplica):
                for rank, incarnation in alive[decision.replica].items():
                    unreported.append(RankEnded(decision.replica, incarnation, rank, -9, "killed"))
                alive[decision.replica] = {}
            elif isinstance(decision, StopRun):
                stops += 1
                assert decision.ok == any(r.phase is Phase.FINISHED for r in state.replicas)

    feed(Began())
    for _ in range(400):
        now += rng.expovariate(2.0)
        replica = rng.randrange(options.replicas)
        choice = rng.random()
        if choice < 0.15 and alive[replica]:
            rank = rng.choice(sorted(alive[replica]))
            code = rng.choice([-9, 0, 1, FATAL_EXIT])
            unreported.append(RankEnded(replica, alive[replica].pop(rank), rank, code, f"{rank} ended"))
        elif choice < 0.4 and unreported:
            feed(unreported.pop(rng.randrange(len(unreported))))
        elif choice < 0.5:
            feed(ReplicaRunning(replica, rng.choice([0, len(starts[replica]) - 1])))
        elif choice < 0.51:
            feed(ReplicaDone(replica))
        else:
            feed(Tick())
    # From here on nothing breaks by itself: the run must come to its end, for every replica is done or given up.
    for _ in range(50):
        now += 200.0
        while unreported:
            feed(unreported.pop())
        for replica in range(options.replicas):
            if state.replicas[replica].phase in ACTIVE:
                feed(ReplicaDone(replica))
        feed(Tick())
    assert state.stopped is not None and stops == 1
    for replica in range(options.replicas):
        assert len(starts[replica]) <= 1 + options.max_restarts
        assert state.replicas[replica].phase in SETTLED
