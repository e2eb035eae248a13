"""Which rank is found stuck, from made-up reports; and what a rank's own threads report."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.job.stuck import Limits, RankWatch, Stuck, Suspicion, complaint, excused, most_likely_stuck, observe
from helixrt.job.watch import ProgressWatch
from helixrt.record import FlightRecord, Kind
from helixrt.replica.progress import COMPILE_S, COMPILES, EXCHANGE, LEADER, LOOP, MAIN, Progress, ProgressReport, ThreadReport
from helixrt.replica.run_keys import progress_key, working_key
from helixrt.replica.store import MemoryRunStore
from helixrt.replica.work_page import NOT_WORKING, WorkPage, WorkWord, word_if_possible
from tests.replica.stand_ins import MoodyStore
from tests.waiting import until

LIMITS = Limits(step_s=10.0, start_s=100.0, look_s=1.0)
DEADLINE_S = 60.0


def thread(
    completed: int = 1, name: str = MAIN, doing: str = "work", limit_s: float = 0.0, waits: bool = False, where: str = ""
) -> ThreadReport:
    return ThreadReport(name, doing, completed, limit_s, where, waits)


class Rank:
    """A rank as the driver sees it: says what it is told to say, at each look."""

    def __init__(self, committed: bool = True) -> None:
        self.committed, self.sequence = committed, 0
        self.watch: RankWatch | None = None

    def looks(self, seconds: float, *threads: ThreadReport, reports: bool = True, elapsed_s: float = 1.0) -> None:
        """So many seconds of looks, one a second."""
        for _ in range(int(seconds)):
            self.sequence += reports
            report = ProgressReport(self.sequence, self.committed, threads)
            self.watch = observe(self.watch, report, elapsed_s, LIMITS)

    @property
    def stuck(self) -> Stuck | None:
        assert self.watch is not None
        return most_likely_stuck({"r1.pp0": self.watch}, LIMITS)


def test_the_same_command_without_completing_anything_is_stuck_after_the_limit() -> None:
    rank = Rank()
    rank.looks(10, thread(7, where="job:loss, line 3"))
    assert rank.stuck is None
    rank.looks(1, thread(7, where="job:loss, line 3"))
    assert rank.stuck == Stuck(
        "r1.pp0", Suspicion.COMPUTING, "has made no progress for 10 s: main thread in work at job:loss, line 3"
    )


def test_completing_a_part_of_a_long_command_is_progress() -> None:
    rank = Rank()
    for completed in range(12):
        rank.looks(9, thread(completed))
        assert rank.stuck is None


def test_waiting_for_orders_is_never_stuck() -> None:
    rank = Rank()
    rank.looks(500)
    assert rank.stuck is None


def test_a_loop_between_two_steps_is_not_stuck_as_long_as_nobody_waits_for_it() -> None:
    rank = Rank()
    rank.looks(500, thread(doing=LOOP))
    assert rank.stuck is None
    busy = Rank()
    busy.looks(11, thread(doing=f"{LOOP}/evaluate", limit_s=5.0))
    assert busy.stuck is not None, "it asked for so much time, and has had it"


@pytest.mark.parametrize("exchanges", [False, True], ids=["one_replica", "several"])
@pytest.mark.parametrize("hangs", ["r1.pp0", "r1.pp1"])
def test_a_loop_that_hangs_between_two_steps_is_named_and_not_the_stage_that_waits_for_it(hangs: str, exchanges: bool) -> None:
    ranks = {"r1.pp0": Rank(), "r1.pp1": Rank()}
    exchange = (thread(3, EXCHANGE, "exchange"),) if exchanges else ()
    for name, rank in ranks.items():
        main = thread(doing=LOOP, where="train:save, line 7") if name == hangs else thread(waits=True)
        rank.looks(12, main, *exchange)
    stuck = most_likely_stuck({name: rank.watch for name, rank in ranks.items() if rank.watch is not None}, LIMITS)
    assert stuck is not None and stuck.rank == hangs
    assert stuck.reason == f"has made no progress for 11 s: main thread in {LOOP} at train:save, line 7"


def test_no_report_is_stuck_whatever_it_did_last() -> None:
    for threads in ((), (thread(),)):
        rank = Rank()
        rank.looks(1, *threads)
        rank.looks(9, *threads, reports=False)
        assert rank.stuck is None
        rank.looks(1, *threads, reports=False)
        assert rank.stuck is not None and rank.stuck.suspicion is Suspicion.SILENT
        assert "has not reported for 10 s: it is stopped" in rank.stuck.reason


def test_a_rank_that_never_reported_is_not_judged() -> None:
    assert observe(None, None, 1.0, LIMITS) is None and most_likely_stuck({}, LIMITS) is None


def test_before_its_first_update_it_has_the_time_of_a_start() -> None:
    rank = Rank(committed=False)
    rank.looks(99, thread())
    assert rank.stuck is None
    rank.looks(2, thread())
    assert rank.stuck is not None
    silent = Rank(committed=False)
    silent.looks(1)
    silent.looks(99, reports=False)
    assert silent.stuck is None


def test_a_thread_that_asked_for_more_time_gets_it_and_no_less_than_the_usual() -> None:
    for limit_s, allowed in ((50.0, 50), (2.0, 10)):
        rank = Rank()
        rank.looks(allowed, thread(doing="evaluate", limit_s=limit_s))
        assert rank.stuck is None
        rank.looks(1, thread(doing="evaluate", limit_s=limit_s))
        assert rank.stuck is not None
        silent = Rank()
        silent.looks(1, thread(doing="evaluate", limit_s=limit_s))
        silent.looks(allowed - 1, reports=False)
        assert silent.stuck is None
        silent.looks(1, reports=False)
        assert silent.stuck is not None


def test_an_exchange_that_waits_for_a_main_thread_with_time_left_is_not_stuck() -> None:
    """`session.busy` in the loop, while the next exchange waits for gradients."""
    rank = Rank()
    busy, waiting = thread(doing="busy", limit_s=50.0), thread(1, EXCHANGE, "exchange")
    rank.looks(50, busy, waiting)
    assert rank.stuck is None
    rank.looks(1, busy, waiting)
    assert rank.stuck is not None and "main thread in busy" in rank.stuck.reason


def test_an_exchange_that_waits_for_gradients_is_not_stuck_while_they_are_computed() -> None:
    rank = Rank()
    for completed in range(30):
        rank.looks(1, thread(completed), thread(1, EXCHANGE, "exchange"))
    rank.looks(10, thread(1, EXCHANGE, "exchange"))
    assert rank.stuck is None, "the main thread has just ended its work"
    rank.looks(1, thread(1, EXCHANGE, "exchange"))
    assert rank.stuck is not None and "exchange thread in exchange" in rank.stuck.reason


def test_main_that_hangs_is_found_though_exchanges_are_tried_again_and_again() -> None:
    rank = Rank()
    for completed in range(12):
        rank.looks(1, thread(3), thread(completed, EXCHANGE, "exchange"))
    assert rank.stuck is not None and "main thread in work" in rank.stuck.reason


def test_a_leader_that_hangs_is_found_while_main_waits_for_orders() -> None:
    rank = Rank()
    rank.looks(11, thread(5, LEADER, "decide"))
    assert rank.stuck is not None


def test_a_driver_that_was_stopped_accuses_nobody() -> None:
    rank = Rank()
    rank.looks(1, thread())
    rank.looks(1, thread(), reports=False, elapsed_s=10_000.0)
    assert rank.stuck is None
    rank.looks(1, thread(), elapsed_s=10_000.0)
    assert rank.stuck is None
    rank.looks(7, thread())
    assert rank.stuck is None


def test_of_several_stuck_ranks_the_likeliest_cause_is_named() -> None:
    waiting, computing, silent, fine = Rank(), Rank(), Rank(), Rank()
    for second in range(11):
        waiting.looks(1, thread(waits=True))
        computing.looks(1, thread())
        silent.looks(1, reports=second == 0)
        fine.looks(1, thread(second))
    watches = {"a": waiting.watch, "b": computing.watch, "c": silent.watch, "d": fine.watch}
    known = {rank: watch for rank, watch in watches.items() if watch is not None}
    for expected in ("c", "b", "a"):
        found = most_likely_stuck(known, LIMITS)
        assert found is not None and found.rank == expected
        del known[expected]
    assert most_likely_stuck(known, LIMITS) is None


def test_a_rank_that_waits_for_a_busy_one_is_not_stuck() -> None:
    waiting, busy = Rank(), Rank()
    for second in range(70):
        waiting.looks(1, thread(waits=True))
        busy.looks(1, thread(doing="evaluate", limit_s=50.0))
        assert waiting.watch is not None and busy.watch is not None
        found = most_likely_stuck({"a": waiting.watch, "b": busy.watch}, LIMITS)
        assert (found is not None) == (second >= 50)
        assert found is None or found.rank == "b"


class Replica:
    """Two ranks, looked at once a second as the driver does."""

    def __init__(self) -> None:
        self.ranks = {"a": Rank(), "b": Rank()}

    def looks(self, seconds: int, *of_a: ThreadReport, **of_b: Callable[[int], ThreadReport]) -> list[Stuck]:
        """Who is found in each second; `b(second)` is what the main thread of the other rank reports."""
        found = []
        for second in range(seconds):
            self.ranks["a"].looks(1, *of_a)
            self.ranks["b"].looks(1, of_b["b"](second))
            watches = excused({name: rank.watch for name, rank in self.ranks.items() if rank.watch is not None}, LIMITS)
            for name, watch in watches.items():
                self.ranks[name].watch = watch
            if (stuck := most_likely_stuck(watches, LIMITS)) is not None:
                found.append(stuck)
        return found


@pytest.mark.parametrize("exchanges", [False, True])
def test_a_rank_that_waited_for_a_busy_one_has_the_whole_limit_again_when_that_goes_on(exchanges: bool) -> None:
    replica = Replica()
    waiting = [thread(waits=True)] + [thread(name=EXCHANGE, doing="exchange")] * exchanges
    assert not replica.looks(40, *waiting, b=lambda second: thread(doing="work/export", limit_s=50.0))
    assert not replica.looks(9, *waiting, b=lambda second: thread(2 + second)), "it computes what is waited for"
    (found,) = replica.looks(1, *waiting, b=lambda second: thread(20))
    assert found.rank == "a" and "no progress for 10 s" in found.reason


def test_ranks_that_wait_for_each_other_are_found_although_both_have_asked_for_more_time() -> None:
    replica, waiting = Replica(), thread(doing="evaluate", limit_s=50.0, waits=True)
    assert not replica.looks(50, waiting, b=lambda second: waiting)
    (found,) = replica.looks(1, waiting, b=lambda second: waiting)
    assert found.suspicion is Suspicion.WAITING


@pytest.mark.parametrize("earlier", [0, 1, 5])
def test_a_rank_that_waited_before_its_neighbour_stopped_is_not_named_for_it(earlier: int) -> None:
    """A stage waits for the next one, which computes for a while and is stopped then."""
    waiting, stopped, named = Rank(), Rank(), []
    for second in range(12):
        waiting.looks(1, thread(waits=True))
        stopped.looks(1, thread(second), reports=second <= earlier)
        assert waiting.watch is not None and stopped.watch is not None
        found = most_likely_stuck({"a": waiting.watch, "b": stopped.watch}, LIMITS)
        named += [] if found is None else [(second, found.rank, found.suspicion)]
    assert named[0][0] == 10, "the replica is started again at the limit"
    assert {(rank, suspicion) for _, rank, suspicion in named} == {("b", Suspicion.SILENT)}


def test_a_rank_that_gave_up_waiting_says_for_whom() -> None:
    """Its link to a stage that hangs may fail before the limit."""
    waiting, hangs = Rank(), Rank()
    waiting.looks(7, thread(waits=True))
    hangs.looks(4, thread())
    assert waiting.watch is not None and hangs.watch is not None
    assert complaint({"a": waiting.watch, "b": hangs.watch}, "a", LIMITS) is None
    hangs.looks(3, thread())
    found = complaint({"a": waiting.watch, "b": hangs.watch}, "a", LIMITS)
    assert found is not None and found.rank == "b" and "no progress for 6 s" in found.reason
    assert complaint({"a": waiting.watch, "b": hangs.watch}, "b", LIMITS) is None, "it waits itself"


@pytest.mark.parametrize("seed", range(20))
def test_random_ranks_are_found_exactly_when_they_stand_still(seed: int) -> None:
    """Against the definition: some rank's longest time without progress, in observed seconds, reached the limit."""
    rng = random.Random(seed)
    rank, completed, still_s, silent_s, observed_s = Rank(), 0, 0.0, 0.0, 0.0
    rank.looks(1, thread(completed))
    for _ in range(300):
        elapsed_s = rng.choice([0.3, 1.0, 7.0])
        reports, moves = rng.random() < 0.7, rng.random() < 0.15
        completed += moves
        observed_s += min(elapsed_s, LIMITS.look_s)
        if reports:
            still_s = 0.0 if rank.watch and rank.watch.report.threads[0].completed != completed else observed_s
            observed_s, silent_s = still_s, 0.0
        else:
            silent_s += min(elapsed_s, LIMITS.look_s)
        rank.looks(1, thread(completed), reports=reports, elapsed_s=elapsed_s)
        found = rank.stuck is not None
        assert found == (silent_s >= 10.0 or still_s >= 10.0 - 1e-9), (rank.watch, still_s, silent_s)


# ---------------------------------------------------------------- what a rank reports


def test_a_report_survives_the_way_through_the_store() -> None:
    report = ProgressReport(3, True, (thread(where="a:b, line 1"), thread(2, EXCHANGE, limit_s=3.5, waits=True)))
    assert ProgressReport.from_json(report.to_json()) == report


def test_threads_report_what_they_do_and_what_they_complete() -> None:
    progress, record = Progress(), FlightRecord("r0.pp0")
    record.attach(progress)
    assert progress.report().threads == ()
    with progress.doing("work"):
        (one,) = progress.report().threads
        record.write(Kind.OPERATION, op="F")
        with progress.busy("evaluate", limit_s=30.0):
            (two,) = progress.report().threads
    assert (one.thread, one.doing, one.limit_s, two.doing, two.limit_s) == (MAIN, "work", 0.0, "work/evaluate", 30.0)
    assert two.completed > one.completed
    assert progress.report() == ProgressReport(4)


def test_the_position_stays_in_the_store_when_work_ended_with_an_error() -> None:
    store = MemoryRunStore()
    progress, key = Progress(store, "r0.pp0", 2, period_s=1000.0), working_key("r0.pp0", 2)
    with progress.doing("work", position=5):
        assert store.get(key) == "5"
    assert store.get(key) == NOT_WORKING
    with pytest.raises(ZeroDivisionError), progress.doing("work", position=6):
        raise ZeroDivisionError
    assert store.get(key) == "6"
    progress.close()


def test_the_position_is_said_in_the_page_of_memory_that_the_rank_was_given_and_not_in_the_store() -> None:
    store, page, now = MemoryRunStore(), WorkPage(), [0.0]
    progress = Progress(store, "r0.pp0", 2, period_s=1000.0, work=WorkWord(page.path))
    watch = ProgressWatch(store, Limits(10.0, 20.0, 5.0), 1.0, lambda: now[0], lambda rank, incarnation: page.said())
    watch.began(0, 2, ["r0.pp0"])
    assert page.said() is None and watch.position(0, 2, "r0.pp0") is None
    with progress.doing("work", position=5):
        assert page.said() == "5" and watch.position(0, 2, "r0.pp0") == 5
    assert page.said() == NOT_WORKING and watch.position(0, 2, "r0.pp0") is None
    with pytest.raises(ZeroDivisionError), progress.doing("work", position=10**12):
        raise ZeroDivisionError
    assert watch.position(0, 2, "r0.pp0") == 10**12 and watch.position(0, 1, "r0.pp0") is None
    assert store.get(working_key("r0.pp0", 2)) is None
    progress.close()
    page.close()
    page.close()


def test_a_descriptor_that_is_another_file_by_now_is_not_written_to(tmp_path: Path) -> None:
    page = WorkPage()
    path = page.path
    number = int(path.rpartition("/")[2])
    page.close()
    other = tmp_path / "other"
    other.write_bytes(bytes(64))
    taken = os.open(other, os.O_RDWR)
    if taken != number:
        os.dup2(taken, number)
        os.close(taken)
    try:
        with pytest.raises(OSError, match="is no page"):
            WorkWord(path)
        assert word_if_possible(path) is None and word_if_possible("") is None
    finally:
        os.close(number)
    assert other.read_bytes() == bytes(64)


def test_what_a_rank_without_a_page_has_said_in_the_store_counts() -> None:
    store, now = MemoryRunStore(), [0.0]
    watch = ProgressWatch(store, Limits(10.0, 20.0, 5.0), 1.0, lambda: now[0])
    watch.began(0, 2, ["r0.pp0"])
    store.set(working_key("r0.pp0", 2), "7")
    assert watch.position(0, 2, "r0.pp0") == 7


def _wait_for_a_peer(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def test_a_thread_that_waits_for_a_peer_is_known_by_where_it_waits() -> None:
    progress, ends = Progress(waits_in=(__name__,)), threading.Event()

    def work() -> None:
        with progress.doing("work"):
            _wait_for_a_peer(ends)

    worker = threading.Thread(target=work)
    worker.start()
    until(lambda: any(t.waits_for_peer and "_wait_for_a_peer" in t.where for t in progress.report().threads))
    ends.set()
    worker.join(DEADLINE_S)


def test_a_thread_that_compiles_has_time_for_it_and_the_usual_time_afterwards() -> None:
    progress, compiled, ends = Progress(), threading.Event(), threading.Event()

    def backend(module: Any, inputs: Any) -> Any:
        assert compiled.wait(DEADLINE_S)
        return module.forward

    def work() -> None:
        with progress.doing("work"):
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
            _wait_for_a_peer(ends)

    worker = threading.Thread(target=work)
    worker.start()
    (found,) = until(lambda: [t for t in progress.report().threads if t.doing == f"work/{COMPILES}"])
    assert found.limit_s == COMPILE_S
    compiled.set()
    (then,) = until(lambda: [t for t in progress.report().threads if "_wait_for_a_peer" in t.where])
    assert (then.doing, then.limit_s) == ("work", 0.0) and then.completed > found.completed
    ends.set()
    worker.join(DEADLINE_S)


def test_a_rank_that_is_stopped_before_its_first_regular_report_is_silent() -> None:
    store, now = MemoryRunStore(), [0.0]
    watch = ProgressWatch(store, Limits(10.0, 20.0, 5.0), 1.0, lambda: now[0])
    watch.began(0, 1, ["r0"])
    progress = Progress(store, "r0", 1, period_s=1000.0)  # it never comes to the next one
    found = []
    while not found and now[0] < 60.0:
        now[0] += 2.0
        found = watch.look([0])
    assert [stuck.rank for stuck in found] == ["r0"] and "has not reported for 20 s" in found[0].reason and now[0] < 25.0
    progress.close()


def test_the_first_committed_step_is_reported_at_once() -> None:
    store = MemoryRunStore()
    progress = Progress(store, "r0", 1, period_s=1000.0)
    progress.committed()
    assert ProgressReport.from_json(store.get(progress_key("r0", 1)) or "").committed
    progress.close()


def test_reports_go_on_after_the_store_was_away() -> None:
    store = MoodyStore(late=2)
    progress = Progress(store, "r0", 1, period_s=0.01)
    with progress.doing("work", position=3):
        until(lambda: store.values.get(progress_key("r0", 1)))
    progress.close()
    progress.close()


def test_an_exchange_that_waits_for_a_busy_main_thread_is_not_stuck() -> None:
    rank = Rank()
    rank.looks(50, thread(doing="work/waiting", limit_s=50.0), thread(name=EXCHANGE, doing="exchange"))
    assert rank.stuck is None
    rank.looks(1, thread(doing="work/waiting", limit_s=50.0), thread(name=EXCHANGE, doing="exchange"))
    assert rank.stuck is not None and rank.stuck.reason.startswith("has made no progress for 50 s")
