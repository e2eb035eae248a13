"""The restart policy: every phase against every event, and long random lives against the invariants."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helixrt.job.policies import (
    ACTIVE,
    CONFIG_EXIT,
    FATAL_EXIT,
    MISUSE_EXIT,
    RELOAD_EXIT,
    SETTLED,
    SKIP,
    Began,
    CapacityAwaited,
    Committed,
    Event,
    GiveUp,
    KillReplica,
    Options,
    Phase,
    RankEnded,
    RankStuck,
    ReplicaDone,
    ReplicaRunning,
    ReplicaState,
    RunState,
    SkipBatch,
    StartReplica,
    StopRun,
    Tick,
    TimeAsked,
    backoff_s,
    decide,
    severity,
)

OPTIONS = Options(replicas=2, ranks_per_replica=2, max_restarts=2, start_timeout_s=10.0, backoff_s=1.0, gone_s=3.0)


def ended(
    replica: int, rank: int = 0, incarnation: int = 0, code: int = -9, reason: str = "", position: int | None = None
) -> RankEnded:
    return RankEnded(replica, incarnation, f"r{replica}.pp{rank}", code, reason or f"rank {rank} of {replica} ended", position)


ONE_RANK = replace(OPTIONS, ranks_per_replica=1)


def lives(*ends: tuple[float, RankEnded | RankStuck], options: Options = ONE_RANK) -> tuple[RunState, list[object]]:
    """Both replicas run, then replica 0 has these ends; each incarnation runs before the next end."""
    state, _ = play((0.1, ReplicaRunning(0, 0)), (0.1, ReplicaRunning(1, 0)), options=options)
    made: tuple[object, ...] = ()
    for at, end in ends:
        state, _ = decide(state, ReplicaRunning(0, end.incarnation), at, options)
        state, made = decide(state, end, at, options)
        for later in (0.1, 50.0):
            if state.replicas[0].phase is Phase.LOST:
                state, more = decide(state, Tick(), at + later, options)
                made = (*made, *more)
    return state, list(made)


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
    why = "1 failure without a commit (restarts=0): out of memory at r1"
    assert made == [KillReplica(1), GiveUp(1, why)]
    assert state.replicas[1].phase is Phase.GIVEN_UP and state.stopped is None
    state, made = decide(state, ReplicaDone(0), 5, options)
    assert made == (StopRun(True, f"given up: {why}"),)


def test_the_run_fails_with_the_cause_of_the_replica_given_up_first() -> None:
    options = replace(OPTIONS, max_restarts=0)
    _, made = play((1, ended(1, reason="first")), (2, ended(0, reason="second")), options=options)
    assert made[-1] == StopRun(False, "1 failure without a commit (restarts=0): first")


def test_a_fatal_rank_gets_one_new_process_then_the_replica_is_given_up() -> None:
    options = replace(OPTIONS, max_restarts=9, fatal_restarts=1, ranks_per_replica=1)
    state, made = play((1, ended(0, code=FATAL_EXIT)), options=options)
    assert made == [KillReplica(0), StartReplica(0, 1)]
    state, made = decide(state, ended(0, incarnation=1, code=FATAL_EXIT), 2, options)
    assert made == (KillReplica(0), GiveUp(0, "2 exceptions without a commit (fatal_restarts=1): rank 0 of 0 ended"))


def test_the_budget_that_a_replica_has_exceeded_is_named() -> None:
    """Of three exceptions and another failure: by default the exceptions, three failures in all are within the other budget."""
    options = Options(replicas=2, ranks_per_replica=1)
    ends = [(400.0 * n, ended(0, incarnation=n, code=FATAL_EXIT, reason=f"error {n}")) for n in range(3)]
    assert GiveUp(0, "3 exceptions without a commit (fatal_restarts=2): error 2") in lives(*ends, options=options)[1]
    more = replace(options, fatal_restarts=5)
    state, made = lives(*ends, options=more)
    assert StartReplica(0, 3) in made
    made_ = decide(state, ended(0, incarnation=3, reason="killed"), 1200.0, more)[1]
    assert made_ == (KillReplica(0), GiveUp(0, "4 failures without a commit (restarts=3): killed"))


def test_a_config_error_stops_the_run_at_once() -> None:
    state, made = play((1, ended(0, code=CONFIG_EXIT, reason="batch=3: must be even")))
    assert made == [StopRun(False, "batch=3: must be even")]
    assert decide(state, ended(1), 2, OPTIONS) == (state, ())


@pytest.mark.parametrize("running", [False, True])
def test_a_program_that_breaks_a_rule_of_the_api_is_not_started_again(running: bool) -> None:
    events = [(0.1, ReplicaRunning(0, 0)), (0.1, ReplicaRunning(1, 0))] if running else []
    state, made = play(*events, (1, ended(0, code=MISUSE_EXIT, reason="step 1 was not committed")))  # type: ignore[arg-type]
    assert state.stopped == StopRun(False, "step 1 was not committed") and state.stopped in made
    state, _ = play(*events, (1, ended(0, incarnation=3, code=MISUSE_EXIT)))  # type: ignore[arg-type]
    assert state.stopped is None  # of an incarnation that is not there any more


@pytest.mark.parametrize("restarted", [False, True])
def test_a_config_error_later_gives_one_replica_up(restarted: bool) -> None:
    """Its NIC is missing, or a package on its node: the others train on."""
    options, reason = replace(ONE_RANK, max_restarts=9), "rails=eth7: no such NIC"
    before = [(1.0, ended(0))] if restarted else [(1.0, ReplicaRunning(1, 0))]
    state, made = play(*before, (2.0, ended(0, incarnation=int(restarted), code=CONFIG_EXIT, reason=reason)), options=options)
    why = f"this would come again: {reason}"
    assert made == [KillReplica(0), GiveUp(0, why)] and state.stopped is None
    assert decide(state, ReplicaDone(1), 3, options)[1] == (StopRun(True, f"given up: {why}"),)


def test_budgets_and_pauses_begin_again_with_a_commit() -> None:
    """A replica that is killed again and again, and contributes in between, comes back at once and is never given up."""
    state, now = decide(RunState.initial(ONE_RANK), Began(), 0.0, ONE_RANK)[0], 0.0
    for life in range(20):
        now += 20.0
        state, _ = decide(state, ReplicaRunning(0, life), now, ONE_RANK)
        if life != 10:
            state, _ = decide(state, Committed(0, life), now, ONE_RANK)
        state, made = decide(state, ended(0, incarnation=life), now, ONE_RANK)
        assert (StartReplica(0, life + 1) in made) == (life != 10), "without a commit after a pause"
        if life == 10:
            assert decide(state, Committed(0, 9), now, ONE_RANK)[0] == state, "of an earlier life"
            state, _ = decide(state, Tick(), now + 1.0, ONE_RANK)


BUG = "3fa9c2d1"


def raises(replica: int, incarnation: int = 0, error: str = BUG, host: str = "") -> RankEnded:
    host = host or f"host{replica}"
    return replace(ended(replica, 0, incarnation, FATAL_EXIT, f"a bug on {host}"), error=error, host=host)


def met(*events: Event, replicas: int = 3) -> tuple[RunState, list[object]]:
    """All replicas run when these events come, one a second; what the last one decided."""
    options = replace(ONE_RANK, replicas=replicas, fatal_restarts=9, max_restarts=9)
    running = [(0.1, ReplicaRunning(replica, 0)) for replica in range(replicas)]
    state, made = play(*running, options=options)
    for number, event in enumerate(events):
        state, made_ = decide(state, event, 10.0 * (number + 1), options)
        made = list(made_)
    return state, made


def test_an_exception_that_comes_again_on_one_host_gives_its_replica_up() -> None:
    again = "the same error again after a restart, without a commit: a bug on host0"
    assert GiveUp(0, again) in met(raises(0), raises(0, 1))[1]
    assert GiveUp(0, again) in met(raises(0), ended(0, incarnation=1), Tick(), raises(0, 2))[1], "a signal does not count"
    assert GiveUp(0, again) in met(raises(0), raises(1, host="host0"), raises(0, 1))[1], "both are on one host"
    other, unknown = (raises(0), raises(0, 1, "other")), (raises(0, 0, ""), raises(0, 1, ""))
    for events in (other, unknown, (raises(0), Committed(0, 1), raises(0, 1))):
        state, made = met(*events)
        assert StartReplica(0, 2) in made or state.replicas[0].phase is Phase.LOST


def test_an_exception_that_comes_again_and_on_two_hosts_ends_the_run() -> None:
    state, made = met(raises(0), raises(1))
    assert made == [KillReplica(1), StartReplica(1, 1)], "of three replicas two, once each: it may be what both wait for"
    state, made = met(raises(0), raises(1), raises(0, 1))
    assert made == [StopRun(False, "the same error on several hosts, and again after a restart: a bug on host0")]
    state, made = met(raises(0), raises(1), Committed(1, 1), raises(0, 1))
    assert state.stopped is None and state.replicas[0].phase is Phase.GIVEN_UP


def test_an_exception_that_all_replicas_have_met_ends_the_run_at_once() -> None:
    state, made = met(raises(0), raises(1, host="host0"), replicas=2)
    assert made == [StopRun(False, "the same error in all replicas: a bug on host0")]
    assert met(raises(0), Committed(0, 1), raises(1), replicas=2)[0].stopped is None
    state, made = met(raises(0), replicas=1)
    assert made == [KillReplica(0), StartReplica(0, 1)], "one replica alone has not met it twice"


def test_a_reload_that_the_protocol_asked_for_is_no_failure() -> None:
    options = replace(ONE_RANK, max_restarts=0, fatal_restarts=0)
    state, made = lives(*[(100.0 * n, ended(0, incarnation=n, code=RELOAD_EXIT)) for n in range(8)], options=options)
    assert StartReplica(0, 8) in made and state.replicas[0].failures == 0


@pytest.mark.parametrize("budget", [0, 1])
def test_the_failure_that_a_reload_only_followed_counts(budget: int) -> None:
    """The leader leaves because its other rank is broken, and is seen first."""
    options = replace(OPTIONS, max_restarts=budget)
    state, made = play((1, ReplicaRunning(0, 0)), (2, ended(0, 0, code=RELOAD_EXIT)), options=options)
    assert made == [KillReplica(0)]
    state, made_ = decide(state, ended(0, 1, code=FATAL_EXIT, reason="out of memory"), 2.1, options)
    why = "out of memory" if budget else "1 failure without a commit (restarts=0): out of memory"
    expected = StartReplica(0, 1) if budget else GiveUp(0, why)
    assert expected in made_ and state.replicas[0].failures == 1 and state.replicas[0].why == why


@pytest.mark.parametrize("event", [CapacityAwaited(0, 0), TimeAsked(0, 0)])
def test_waiting_for_resources_and_time_that_a_rank_has_asked_for_cost_nothing(event: Event) -> None:
    state, _ = play((1, ReplicaRunning(1, 0)))
    for now in range(2, 500):
        state, made = decide(state, event, now, OPTIONS)
        assert made == () and decide(state, Tick(), now, OPTIONS)[1] == ()
    assert state.replicas[0].phase is Phase.STARTING
    assert decide(state, Tick(), 509.5, OPTIONS)[1] == (KillReplica(0),), "from then on the start timeout counts"


def test_a_stuck_rank_has_its_replica_restarted() -> None:
    state, made = play((1, ReplicaRunning(0, 0)), (2, RankStuck(0, 0, "r0.pp1", "r0.pp1 makes no progress")))
    assert made == [KillReplica(0)] and state.replicas[0].why == "r0.pp1 makes no progress"
    state, made_ = decide(state, ended(0, 0), 2.1, OPTIONS)
    state, made_ = decide(state, ended(0, 1), 2.2, OPTIONS)
    assert made_ == (StartReplica(0, 1),)
    assert decide(state, RankStuck(0, 0, "r0.pp1", "late news"), 3, OPTIONS) == (state, ())


def test_a_batch_that_ends_its_replica_twice_stops_the_run_and_is_named() -> None:
    ends = ((1.0, ended(0, position=7, reason="core dumped")), (2.0, RankStuck(0, 1, "r0.pp0", "hangs", position=7)))
    state, made = lives(*ends)
    assert state.stopped is not None and not state.stopped.ok and made == [KillReplica(0), state.stopped]
    for part in ("position 7 of replica 0's stream", "core dumped; then: hangs", "on_poison=skip"):
        assert part in state.stopped.reason


def test_a_poison_batch_is_skipped_before_the_next_incarnation_starts() -> None:
    options = replace(ONE_RANK, on_poison=SKIP, max_restarts=9)
    ends = [(1.0, ended(0, position=7)), (2.0, ended(0, incarnation=1, position=7))]
    state, made = lives(*ends, options=options)
    assert [type(d) for d in made] == [KillReplica, SkipBatch, StartReplica] and state.stopped is None
    skip = made[1]
    assert isinstance(skip, SkipBatch) and (skip.replica, skip.position) == (0, 7)


@pytest.mark.parametrize("between", [ended(0, incarnation=1), ended(0, incarnation=1, code=RELOAD_EXIT, position=7)])
def test_ends_outside_work_on_the_batch_do_not_count_as_its_doing(between: RankEnded) -> None:
    options = replace(ONE_RANK, max_restarts=9)
    state, _ = lives((1.0, ended(0, position=7)), (2.0, between), options=options)
    assert state.stopped is None
    state, _ = lives((1.0, ended(0, position=7)), (2.0, ended(0, incarnation=1, position=8)), options=options)
    assert state.stopped is None


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


def test_the_failure_that_a_lost_link_only_followed_is_the_reason() -> None:
    options = replace(OPTIONS, max_restarts=9, fatal_restarts=0)
    state, _ = play((1, ReplicaRunning(0, 0)), (2, ended(0, 0, code=75, reason="a peer is gone")), options=options)
    state, made = decide(state, ended(0, 1, code=FATAL_EXIT, reason="out of memory"), 2.1, options)
    assert GiveUp(0, "1 exception without a commit (fatal_restarts=0): out of memory") in made
    state, _ = play((1, ReplicaRunning(0, 0)), (2, ended(0, 0, code=-9, reason="killed")), options=options)
    assert decide(state, ended(0, 1, code=FATAL_EXIT), 2.1, options)[0].replicas[0].why == "killed", "the other one followed"


def test_likely_root_causes_come_before_complaints_of_peers() -> None:
    assert sorted([1, 0, -9, FATAL_EXIT], key=severity) == [FATAL_EXIT, -9, 1, 0]


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(
    "event",
    [
        ReplicaRunning(0, 1),
        ReplicaDone(0),
        ended(0, 0, 1),
        ended(0, 0, 0),
        ended(0, 0, 1, CONFIG_EXIT),
        Tick(),
        RankStuck(0, 1, "r0.pp0", "stuck"),
        RankStuck(0, 0, "r0.pp0", "stuck"),
        CapacityAwaited(0, 1),
        TimeAsked(0, 1),
        Committed(0, 1),
    ],  # fmt: skip
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
    assert new.stopped is None


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
    stops, commits = 0, [0] * options.replicas

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
        elif choice < 0.53:
            feed(RankStuck(replica, rng.choice([0, len(starts[replica]) - 1]), f"r{replica}.pp0", "stuck"))
        elif choice < 0.54:
            feed(Committed(replica, len(starts[replica]) - 1))
            commits[replica] += 1
        elif choice < 0.56:
            feed(CapacityAwaited(replica, rng.choice([0, len(starts[replica]) - 1])))
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
        assert len(starts[replica]) <= (1 + options.max_restarts) * (1 + commits[replica])
        assert state.replicas[replica].phase in SETTLED
